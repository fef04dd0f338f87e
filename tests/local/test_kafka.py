"""The local Kafka broker: its data, its listeners and its program."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from aiokafka.errors import KafkaError
from tests.kafka_server import PASSWORD, Broker, BrokerAuthority, client_settings, secured
from tests.local.processes import create_program

from flowkit.errors import ConfigError
from flowkit.local import Kafka
from flowkit.local.errors import ProgramMissing
from flowkit.local.kafka import (
    BrokerPlace,
    BrokerSecurity,
    SaslMechanism,
    format_command,
    kafka_program,
    properties_file,
    start_command,
)
from flowkit.local.ports import is_free
from flowkit.local.sources import Source

if TYPE_CHECKING:
    from flowkit.local.kafka import BrokerTls


@pytest.mark.server
async def test_topics_and_records_survive_a_stop_and_a_kill(tmp_path: Path) -> None:
    with Kafka(tmp_path) as server:
        port, broker = server.port, Broker(bootstrap_servers=server.bootstrap_servers)
        await broker.create_topics("cmd.indexer.v1")
        await broker.produce("cmd.indexer.v1", b"first")

        server.stop()
        assert not server.running
        assert is_free(port)

        server.start()
        assert (server.port, await broker.consume("cmd.indexer.v1", 1)) == (port, [b"first"])
        await broker.produce("cmd.indexer.v1", b"second")

        server.kill()
        server.start()
        assert await broker.consume("cmd.indexer.v1", 2) == [b"first", b"second"]


@pytest.mark.server
async def test_another_broker_on_other_ports_reads_the_data_of_a_folder(tmp_path: Path) -> None:
    with Kafka(tmp_path) as first:
        broker = Broker(bootstrap_servers=first.bootstrap_servers)
        await broker.create_topics("a")
        await broker.produce("a", b"kept")
    with Kafka(tmp_path) as second:
        assert second.port != first.port
        assert await Broker(bootstrap_servers=second.bootstrap_servers).consume("a", 1) == [b"kept"]


@pytest.mark.server
async def test_the_broker_creates_no_topics_by_itself(kafka: Broker) -> None:
    impatient = Broker(bootstrap_servers=kafka.bootstrap_servers, client_settings={"request_timeout_ms": 500})
    with pytest.raises(KafkaError):
        await impatient.produce("missing", b"x")


KINDS = [
    pytest.param(SaslMechanism.PLAIN, False, False, id="SASL_PLAINTEXT-PLAIN"),
    pytest.param(SaslMechanism.SCRAM_SHA_512, True, False, id="SASL_SSL-SCRAM-SHA-512"),
    pytest.param(SaslMechanism.PLAIN, True, True, id="SASL_SSL-PLAIN-client-certificates"),
    pytest.param(None, True, True, id="SSL-client-certificates"),
]


@pytest.mark.server
@pytest.mark.parametrize(("mechanism", "encrypted", "mutual"), KINDS)
async def test_a_secured_listener_serves_only_clients_with_its_credentials(
    tmp_path: Path, mechanism: SaslMechanism | None, encrypted: bool, mutual: bool
) -> None:
    authority = BrokerAuthority(tmp_path)
    tls = authority.tls(require_client_certificate=mutual) if encrypted else None
    security = secured(mechanism, tls)
    context = authority.client_context(certificate=mutual) if encrypted else None
    with Kafka(tmp_path / "data", security=security) as server:
        good = Broker(
            bootstrap_servers=server.bootstrap_servers, client_settings=client_settings(security, context)
        )
        await good.create_topics("a")
        await good.produce("a", b"one")
        assert await good.consume("a", 1) == [b"one"]
        for wrong in wrong_clients(security, authority, tls):
            with pytest.raises(KafkaError):
                await Broker(bootstrap_servers=server.bootstrap_servers, client_settings=wrong).create_topics(
                    "b"
                )


def wrong_clients(
    security: BrokerSecurity, authority: BrokerAuthority, tls: BrokerTls | None
) -> list[dict[str, object]]:
    """Return settings of clients that the broker must refuse: a wrong password, or no certificate."""
    wrong: list[dict[str, object]] = []
    mutual = tls is not None and tls.client_ca is not None
    if security.mechanism is not None:
        context = authority.client_context(certificate=mutual) if tls else None
        wrong.append(client_settings(security, context, password="wrong"))
    if mutual:
        wrong.append(client_settings(security, authority.client_context(certificate=False)))
    return wrong


@pytest.mark.server
async def test_a_secured_broker_keeps_its_users_when_it_restarts(tmp_path: Path) -> None:
    security = secured(SaslMechanism.SCRAM_SHA_256, None)
    with Kafka(tmp_path, security=security) as server:
        broker = Broker(
            bootstrap_servers=server.bootstrap_servers, client_settings=client_settings(security, None)
        )
        await broker.create_topics("a")
        server.restart()
        await broker.create_topics("b")
        wrong = client_settings(security, None, password="wrong")
        with pytest.raises(KafkaError):
            await Broker(bootstrap_servers=server.bootstrap_servers, client_settings=wrong).create_topics("c")


def test_a_password_that_kafka_cannot_store_is_an_error() -> None:
    with pytest.raises(ConfigError, match="user 'me' for SCRAM-SHA-512; use letters"):
        BrokerSecurity(mechanism=SaslMechanism.SCRAM_SHA_512, users={"me": "a,b"})


def test_a_plain_password_may_have_any_characters() -> None:
    security = BrokerSecurity(mechanism=SaslMechanism.PLAIN, users={"me": 'a"b\\c'})
    place = BrokerPlace(port=1, controller_port=2, folder=Path("/data"))
    assert r'PlainLoginModule required user_me="a\\"b\\\\c";' in properties_file(place, security)


def test_keys_and_passwords_are_not_shown_and_only_this_user_reads_them(tmp_path: Path) -> None:
    tls = BrokerAuthority(tmp_path).tls(require_client_certificate=True)
    security = secured(SaslMechanism.PLAIN, tls)
    assert "PRIVATE KEY" not in repr(security)
    assert PASSWORD not in repr(security)
    security.write_files(tmp_path)
    assert (tmp_path / "broker.pem").stat().st_mode & 0o077 == 0


def test_clients_connect_to_this_machine_even_if_the_broker_runs_in_a_container() -> None:
    place = BrokerPlace(port=1, controller_port=2, folder=Path("/flowkit"), listen_on="0.0.0.0")
    lines = properties_file(place, BrokerSecurity()).splitlines()
    assert "listeners=CLIENT://0.0.0.0:1,INTERNAL://127.0.0.1:0,CONTROLLER://127.0.0.1:2" in lines
    assert "advertised.listeners=CLIENT://127.0.0.1:1,INTERNAL://127.0.0.1:0" in lines
    assert "log.dirs=/flowkit/data" in lines


@pytest.mark.parametrize("suffix", ["", ".sh"])
def test_a_distribution_on_path_is_used_if_it_can_format_its_storage(empty_path: Path, suffix: str) -> None:
    start = create_program(empty_path / f"kafka-server-start{suffix}")
    assert kafka_program(tuple(Source)).source is Source.DOWNLOAD
    storage = create_program(empty_path / f"kafka-storage{suffix}")
    program = kafka_program(tuple(Source))
    assert (program.source, program.description) == (Source.PATH, start)
    assert format_command(program, ["-c", "f"]) == [storage, "format", "-c", "f"]
    assert start_command(program, Path("f")) == [start, "f"]


@pytest.mark.parametrize("missing", ["java", "mvn"])
def test_a_missing_program_is_reported_with_the_remedy(empty_path: Path, missing: str) -> None:
    if missing == "mvn":
        empty_path.mkdir()
        (empty_path / "java").symlink_to(
            shutil.which("java", path="/usr/bin:/bin") or pytest.skip("needs Java")
        )
    with pytest.raises(
        ProgramMissing, match=rf"`{missing}` is not on PATH; install a JDK 17 or newer and Maven"
    ):
        kafka_program([Source.DOWNLOAD]).install()
