"""`flowkit up --external` starts a Kafka broker, or uses the configured one, and a bridge."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from pymongo import AsyncMongoClient
from tests.cli.up.up_process import UpProcess, environment_without_servers, free_port_base
from tests.integration.harness import eventually
from tests.local.processes import create_program

from flowkit.cli.servers import accepts_connections
from flowkit.cli.up.monitor import create_rows
from flowkit.cli.up.plan import UpOptions, make_plan
from flowkit.cli.up.processes import create_processes
from flowkit.local.ports import is_free
from flowkit.testing import ExternalWorker
from flowkit.testing.external.handlers import scripted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Program


def test_a_configured_broker_is_used_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**environment_without_servers(tmp_path), "KAFKA_BOOTSTRAP_SERVERS": "k.example:9092"}
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "k.example:9092")
    plan = make_plan(UpOptions(only=("mongo",), external=("indexer",)), environment)
    processes = create_processes(plan, tmp_path)
    assert processes.kafka is None
    assert processes.exports["KAFKA_BOOTSTRAP_SERVERS"] == "k.example:9092"
    row, server = create_rows(plan, processes)[-1]
    assert (row.name, row.address, row.detail, server) == ("kafka", "k.example:9092", "external server", None)


async def test_one_reachable_broker_is_enough() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await accepts_connections(f"127.0.0.1:1, 127.0.0.1:{port}", 5)
    assert not await accepts_connections("127.0.0.1:1, 127.0.0.1:no", 5)


def test_install_includes_kafka_only_for_external_roles(program: Program, tmp_path: Path) -> None:
    for name in ("mongod", "kafka-server-start", "kafka-storage"):
        create_program(tmp_path / "bin" / name)
    env = {"PATH": str(tmp_path / "bin"), "FLOWKIT_SERVERS": ""}
    arguments = ("up", "--install", "--only", "mongo")
    assert program.run(*arguments, env=env).out.count("\n") == 1
    printed = program.run(*arguments, "--external", "indexer", env=env)
    assert printed.out.splitlines()[1:] == [f"kafka: {tmp_path / 'bin' / 'kafka-server-start'} (path)"]


@pytest.mark.slow
@pytest.mark.server
async def test_it_starts_a_broker_and_external_workers_run_nodes_of_the_engine(
    tmp_path: Path, up: Callable[..., UpProcess]
) -> None:
    base, data = free_port_base(), tmp_path / "data"
    graph = tmp_path / "graph.json"
    graph.write_text(json.dumps({"nodes": [{"node_id": "a", "type": "indexer"}]}))
    started = up("--no-page", "--external", "indexer", "--data", str(data), "--port-base", str(base))
    exports = await asyncio.to_thread(
        started.exports, "TEMPORAL_ADDRESS", "MONGO_URL", "KAFKA_BOOTSTRAP_SERVERS"
    )
    assert exports["KAFKA_BOOTSTRAP_SERVERS"] == f"127.0.0.1:{base + 4}"
    for name in ("kafka", "bridge"):
        assert any(line.startswith(f"{name} is ready after ") for line in started.lines)
    task = asyncio.create_task(
        asyncio.to_thread(started.run_command, "run", str(graph), "--watch", "--timeout", "80")
    )
    await eventually(lambda: topic_exists(exports["KAFKA_BOOTSTRAP_SERVERS"]))
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(exports["MONGO_URL"], tz_aware=True)
    address = exports["KAFKA_BOOTSTRAP_SERVERS"]
    async with (
        client,
        ExternalWorker(client["flowkit"], {"indexer": scripted}, bootstrap_servers=address),
    ):
        done = await task
    assert done.returncode == 0, done.stdout + done.stderr
    assert await asyncio.to_thread(started.stop) == 0
    assert "stopping bridge, engine, kafka, mongo, temporal" in started.lines
    assert "kafka: not responding" not in started.lines
    assert is_free(base + 4)
    assert (data / "kafka" / "data" / "cmd.indexer.v1-0").is_dir()


async def topic_exists(bootstrap: str) -> bool:
    """Return whether the bridge has created the topics."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        return {"cmd.indexer.v1", "workers.announce.v1"} <= set(await admin.list_topics())
    finally:
        await admin.close()


@pytest.mark.parametrize(
    ("only", "starts"), [((), True), (("engine",), True), (("mongo", "temporal"), False)]
)
def test_the_bridge_starts_with_the_engine(tmp_path: Path, only: tuple[str, ...], starts: bool) -> None:
    environment = {**environment_without_servers(tmp_path), "KAFKA_BOOTSTRAP_SERVERS": "k.example:9092"}
    plan = make_plan(UpOptions(only=only, external=("indexer", "grouper")), environment)
    bridge = create_processes(plan, tmp_path).bridge
    assert (bridge is not None) is starts
    if bridge is not None:
        assert bridge.command()[-3:] == ["bridge", "indexer", "grouper"]
