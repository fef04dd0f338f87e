"""The check of Kafka."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from tests.local.processes import create_program

from flowkit.cli.doctor.findings import Severity
from flowkit.cli.doctor.servers import check_kafka

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kafka_server import Broker


@pytest.mark.server
async def test_a_broker_that_responds_is_ok(kafka: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    finding = await check_kafka()
    assert (finding.name, finding.state) == ("kafka", Severity.OK)
    assert finding.found.startswith(f"responds at {kafka.bootstrap_servers}: 1 broker, cluster ")


async def test_an_unreachable_broker_is_bad(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    finding = await check_kafka()
    assert (finding.state, finding.found) == (Severity.BAD, "no broker responds at 127.0.0.1:1")
    assert finding.remedy.startswith("start it, or correct KAFKA_BOOTSTRAP_SERVERS")
    assert caplog.records == []


async def test_a_broker_that_refuses_plain_clients_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", address)
        finding = await check_kafka()
    assert finding.state is Severity.NOTE
    assert finding.found == f"{address} accepts connections, but refuses a client without TLS and password"
    assert "TLS or a password" in finding.remedy


async def test_the_local_broker_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAFKA_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.setenv("FLOWKIT_SERVERS", "path")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    missing = await check_kafka()
    assert (missing.name, missing.state) == ("kafka here", Severity.OK)
    assert missing.found == "no Kafka found in FLOWKIT_SERVERS=path; only external workers need it"
    for name in ("kafka-server-start", "kafka-storage"):
        create_program(tmp_path / "bin" / name)
    start = tmp_path / "bin" / "kafka-server-start"
    assert (await check_kafka()).found == f"path: {start}; only external workers need it"
    monkeypatch.setenv("FLOWKIT_SERVERS", "download")
    assert "`flowkit up --external ROLE` installs" in (await check_kafka()).found
