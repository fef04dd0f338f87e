"""No password in the address or the settings of a server reaches a message, whatever is wrong with them."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

import pytest

from flowkit import CoordinatorConfig
from flowkit.cli.errors import describe_error
from flowkit.cli.options import DeploymentOptions
from flowkit.cli.servers import connect_temporal, database
from flowkit.connection import temporal_address
from flowkit.errors import ConfigError, FlowKitError, StoreUnavailable
from flowkit.text import shown_address

if TYPE_CHECKING:
    from pathlib import Path

    from flowkit.cli.errors import ErrorReport

SECRET = "s3cret"
NUMBER = "271828"

SECRET_URLS = [
    f"mongodb://flowkit:{SECRET}@db.example:27017/flowkit",
    f"mongodb://flowkit:pa/{SECRET}@db.example:27017/flowkit",
    f"mongodb://flowkit:pa?{SECRET}=1@db.example:27017",
    f"mongodb://flowkit:pa#{SECRET}@db.example",
    f"mongodb://flowkit:pa@{SECRET}@db.example",
    f"mongodb+srv://flowkit:pa/{SECRET}@db.example",
    f"mongodb://flowkit:{NUMBER}/34@db.example",
    f"flowkit:{SECRET}@db.example:27017",
    f"//flowkit:{SECRET}@db.example",
    f"mongodb://flowkit:{SECRET}",
    f"mongodb://db.example/?proxyHost=proxy&proxyUsername=me&proxyPassword={SECRET}",
    f"mongodb://db.example/?tls=true&tlsCertificateKeyFilePassword={SECRET}",
    f"mongodb://db.example/?authMechanismProperties=AWS_SESSION_TOKEN:{SECRET}",
    f"mongodb://db.example/?authMechanismProperties=AWS_SESSION_TOKEN:abc@{SECRET}",
    f"mongodb://db.example/?readPreference={SECRET}",
    f"mongodb://db.example/?{SECRET}=1",
    f"https://user:{SECRET}@temporal.example:7233",
    f"user:{SECRET}@one:9092,user:{SECRET}@two:9092",
]


def test_a_shown_address_contains_no_part_of_a_password() -> None:
    for url in SECRET_URLS:
        shown = shown_address(url)
        assert SECRET not in shown
        assert NUMBER not in shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("mongodb://localhost:27017", "mongodb://localhost:27017"),
        ("mongodb://me:pw@a.example:1,b-2.example:2/db?w=1", "mongodb://a.example:1,b-2.example:2"),
        ("mongodb+srv://me:pw@cluster.example/?tls=true", "mongodb+srv://cluster.example"),
        ("mongodb://me:pw@[::1]:27017/", "mongodb://[::1]:27017"),
        ("mongodb://%2Ftmp%2Fmongodb-27017.sock", "mongodb://%2Ftmp%2Fmongodb-27017.sock"),
        ("temporal.example:7233", "temporal.example:7233"),
        ("one:9092, two:9092", "one:9092, two:9092"),
        ("me:pw@db.example:27017", "db.example:27017"),
        ("mongodb://me:p/w@db.example", "mongodb://…"),
        ("me:pw", "…"),
        ("", "…"),
    ],
)
def test_a_shown_address_is_its_scheme_and_its_hosts(url: str, shown: str) -> None:
    assert shown_address(url) == shown


@pytest.mark.parametrize("url", SECRET_URLS)
async def test_no_message_about_a_mongodb_address_contains_its_password(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="flowkit")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        report = await _failure(url)
    text = f"{report} {[str(each.message) for each in seen]} {caplog.text}"
    assert SECRET not in text
    assert NUMBER not in text


async def _failure(url: str) -> ErrorReport:
    """Return what the command line reports when it cannot use this address."""
    try:
        async with database(DeploymentOptions(mongo_url=url)):
            raise StoreUnavailable("MongoDB is unavailable")
    except FlowKitError as error:
        return describe_error(error)


async def test_an_ignored_option_of_a_mongodb_address_is_named(caplog: pytest.LogCaptureFixture) -> None:
    await _failure("mongodb://db.example/?maxPoolSize=many&unknown=1")
    assert sorted(caplog.messages) == [
        "MONGO_URL has an option that the driver ignores",
        "MONGO_URL has an option that the driver ignores: check maxpoolsize",
    ]


async def test_a_missing_key_file_is_a_wrong_setting() -> None:
    report = await _failure("mongodb://db.example/?tls=true&tlsCertificateKeyFile=/nowhere/key.pem")
    assert report.code == "invalid_config"
    assert any(text in report.message for text in ("No such file", "not readable")), report.message


@pytest.mark.parametrize("line", [f'api_key = "{SECRET}', f"api_key = {NUMBER}", f'api_key = ["{SECRET}"]'])
async def test_an_invalid_temporal_profile_is_reported_without_its_lines(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "temporal.toml"
    file.write_text(f'[profile.default]\naddress = "localhost:1"\n{line}\n', encoding="utf-8")
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", str(file))
    with pytest.raises(ConfigError, match="line 3") as caught:
        await connect_temporal()
    assert SECRET not in str(caught.value)
    assert NUMBER not in str(caught.value)
    with pytest.raises(ConfigError, match="line 3"):
        temporal_address()


@pytest.mark.parametrize("address", [f"user:{SECRET}@127.0.0.1:1", f"user:pa/{SECRET}@127.0.0.1:1"])
async def test_an_error_of_temporals_address_contains_no_password(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", address)
    with pytest.raises(FlowKitError) as caught:
        await connect_temporal()
    assert SECRET not in f"{caught.value} {describe_error(caught.value)}"


@pytest.mark.parametrize("brokers", [f"user:{SECRET}@one:9092", f"{SECRET}@one:9092"])
def test_an_error_of_the_brokers_addresses_contains_no_password(brokers: str) -> None:
    with pytest.raises(ConfigError, match="kafka_bootstrap") as caught:
        CoordinatorConfig(kafka_bootstrap=brokers)
    assert SECRET not in str(caught.value)
