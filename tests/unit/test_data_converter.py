"""`FLOWKIT_DATA_CONVERTER` gives every process the same data converter; a codec also hides failures."""

from __future__ import annotations

import pytest
from temporalio.contrib.pydantic import PydanticPayloadConverter
from temporalio.converter import (
    CompositePayloadConverter,
    DataConverter,
    DefaultFailureConverter,
    DefaultFailureConverterWithEncodedAttributes,
    JSONPlainPayloadConverter,
)
from tests.integration import encryption
from tests.unit.test_plugin import offline

from flowkit import connection
from flowkit.errors import ConfigError
from flowkit.payload_converter import DATA_CONVERTER, VARIABLE, SharedPayloadConverter, configured_converter
from flowkit.plugin import FlowKitPlugin


class OwnFailures(DefaultFailureConverter):
    """A failure converter of the user."""


class OwnPayloads(PydanticPayloadConverter):
    """A payload converter of the user."""


class Unsuitable(CompositePayloadConverter):
    """A payload converter that cannot serialize FlowKit's records."""

    def __init__(self) -> None:
        super().__init__(JSONPlainPayloadConverter())


OWN = DataConverter(
    payload_converter_class=OwnPayloads,
    failure_converter_class=OwnFailures,
    payload_codec=encryption.Hiding(),
)
UNSUITABLE = DataConverter(payload_converter_class=Unsuitable)


def configured(monkeypatch: pytest.MonkeyPatch, name: str) -> DataConverter:
    """Return the converter for this value of the variable."""
    monkeypatch.setenv(VARIABLE, name)
    return configured_converter()


@pytest.mark.parametrize("empty", ["", None])
def test_without_the_variable_payloads_are_not_hidden(
    empty: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, empty or "")
    if empty is None:
        monkeypatch.delenv(VARIABLE)
    assert configured_converter() is DATA_CONVERTER


def test_a_codec_gets_flowkits_payload_converter_and_hides_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    found = configured(monkeypatch, "tests.integration.encryption:CONVERTER")
    assert found.payload_codec is encryption.CONVERTER.payload_codec
    assert found.payload_converter_class is SharedPayloadConverter
    assert found.failure_converter_class is DefaultFailureConverterWithEncodedAttributes


def test_converters_of_the_user_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert configured(monkeypatch, f"{__name__}:OWN") == OWN


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere.converters:CONVERTER", "No module named 'nowhere'"),
        ("tests.integration.encryption:MISSING", "has no attribute 'MISSING'"),
        ("not a name", "ValueError"),
        (f"{__name__}:VARIABLE", "which is a str"),
        (f"{__name__}:UNSUITABLE", "Unsuitable cannot serialize"),
    ],
)
async def test_a_converter_that_cannot_be_used_is_reported_with_variable_and_value(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(ConfigError) as caught:
        await connection.connect()
    assert f"{VARIABLE} is {name!r}" in str(caught.value)
    assert reason in str(caught.value)


async def test_the_plugin_uses_the_variable_unless_its_client_has_a_converter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "tests.integration.encryption:CONVERTER")
    client = await offline(FlowKitPlugin())
    assert client.data_converter.payload_codec is encryption.CONVERTER.payload_codec
    client = await offline(FlowKitPlugin(), data_converter=OWN)
    assert client.data_converter is OWN


async def test_the_plugin_hides_the_failures_of_a_client_with_a_codec() -> None:
    client = await offline(FlowKitPlugin(), data_converter=encryption.CONVERTER)
    assert client.data_converter.failure_converter_class is DefaultFailureConverterWithEncodedAttributes
