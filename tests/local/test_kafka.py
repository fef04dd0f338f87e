"""The local Kafka broker: its data, its listeners and its program."""

from __future__ import annotations

import shutil
from pathlib import Path

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


@pytest.mark.slow
@pytest.mark.server
async def test_topics_records_and_users_survive_a_stop_a_kill_and_a_move_to_other_ports(
    tmp_path: Path,
) -> None:
    security = secured(SaslMechanism.SCRAM_SHA_256, None)
    own, wrong = [client_settings(security, None, password=each) for each in (PASSWORD, "wrong")]
    with Kafka(tmp_path, security=security) as server:
        port, broker = (
            server.port,
            Broker(bootstrap_servers=server.bootstrap_servers, client_settings=own),
        )
        await broker.create_topics("cmd.indexer.v1")
        await broker.produce("cmd.indexer.v1", b"first")

        server.stop()
        assert not server.running
        assert is_free(port)

        server.start()
        assert (server.port, await broker.consume("cmd.indexer.v1", 1)) == (port, [b"first"])
        await broker.produce("cmd.indexer.v1", b"second")
        with pytest.raises(KafkaError):
            await Broker(bootstrap_servers=server.bootstrap_servers, client_settings=wrong).create_topics("a")

        server.kill()
    with Kafka(tmp_path, security=security) as other:
        assert other.port != port
        broker = Broker(bootstrap_servers=other.bootstrap_servers, client_settings=own)
        assert await broker.consume("cmd.indexer.v1", 2) == [b"first", b"second"]


@pytest.mark.server
async def test_the_broker_creates_no_topics_by_itself(kafka: Broker) -> None:
    impatient = Broker(bootstrap_servers=kafka.bootstrap_servers, client_settings={"request_timeout_ms": 500})
    with pytest.raises(KafkaError):
        await impatient.produce("missing", b"x")


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
