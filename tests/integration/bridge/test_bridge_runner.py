"""A bridge without an engine: `BridgeRunner`, and the process `flowkit bridge`."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.attempt.pollers import recent_pollers
from flowkit.bridge_runner import BridgeRunner
from flowkit.errors import ConfigError, GraphError
from flowkit.local.ports import free_port
from flowkit.models.temporal_names import role_queue
from tests.fork_server import fork_server
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, node
from tests.kafka_server import Broker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.integration.bridge.external_tasks import ExternalTasks

pytestmark = pytest.mark.server

CLOSED_PORT = "127.0.0.1:1"


async def two_batches(run: Any) -> AsyncIterator[dict[str, Any]]:
    yield {"count": 1}
    yield {"count": 2}


class BridgeProcess:
    """A `flowkit bridge` for the roles and topics of a test, with an HTTP endpoint for its health."""

    def __init__(self, external: ExternalTasks, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.health_file = folder / "health.json"
        names = external.names.config(queue=external.queue, **external.settings)
        settings = {name: value for name, value in vars(names).items() if value is not None}
        config = folder / "bridge.json"
        config.write_text(json.dumps(settings))
        health = ("--health-port", str(self.port), "--health-file", str(self.health_file))
        self.process = fork_server().start(
            ["bridge", external.role, "--config", str(config), *health, *options],
            folder,
            external.environment,
            stderr=subprocess.PIPE,
        )

    def lines_until(self, part: str) -> list[str]:
        """Read stderr until a line contains the text, and return the lines."""
        lines: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            lines.append(line.rstrip())
            if part in line:
                return lines
        raise AssertionError(f"there is no line with {part!r}: {lines}")

    def get(self) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of the health endpoint."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/", timeout=EVENT_TIMEOUT_SEC
            ) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    async def until_role(self, **wanted: Any) -> dict[str, Any]:
        """Wait until the health of the role has these values, and return the whole health."""

        async def look() -> dict[str, Any] | None:
            _, body = await asyncio.to_thread(self.get)
            role = body["bridge"]["roles"][0] if body["bridge"] else {}
            return body if all(role.get(name) == value for name, value in wanted.items()) else None

        return await eventually(look)

    def stop(self) -> int:
        """Send SIGTERM, and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=EVENT_TIMEOUT_SEC)
        return self.process.wait()

    def close(self) -> None:
        """Kill the process if it still runs."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def bridges() -> Iterator[list[BridgeProcess]]:
    """The processes of a test, which end with it."""
    started: list[BridgeProcess] = []
    yield started
    for each in started:
        each.close()


async def test_a_bridge_process_runs_nodes_and_reports_its_health(
    external: ExternalTasks, tmp_path: Path, bridges: list[BridgeProcess]
) -> None:
    external.settings["worker_types"] = []
    await external.engine()
    bridge = BridgeProcess(external, tmp_path)
    bridges.append(bridge)
    ready = (await asyncio.to_thread(bridge.lines_until, "Ctrl-C"))[-1]
    assert f"running: bridge connects {external.role} on queue {external.queue} to Kafka at " in ready

    task_id = await external.create(node("a", external.role))
    await bridge.until_role(waits_for=None, workers=0, attempts=1, queued=1, status_lag=0)
    await external.external(two_batches)
    await external.until_status(task_id, "finished")
    body = await bridge.until_role(waits_for=None, workers=1, attempts=0, queued=0, status_lag=0)
    assert (await asyncio.to_thread(bridge.get))[0] == 200
    assert (body["ok"], body["bridge"]["attempts"], body["bridge"]["malformed"]) == (True, 0, {})
    assert json.loads(bridge.health_file.read_text())["bridge"]["bridge_id"] == body["bridge"]["bridge_id"]
    assert await asyncio.to_thread(bridge.stop) == 0
    assert not bridge.health_file.exists()


async def test_large_graph_with_a_role_of_another_process_is_rejected(
    external: ExternalTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    external.settings["worker_types"] = []
    await external.engine()
    monkeypatch.setattr("flowkit.graph.submission.EXTERNAL_NODES", 1)
    nodes = [node("a", external.role), node("b", "native", "a")]
    await external.coordinator.cancel_task(await external.create(*nodes))
    runner = BridgeRunner(db=external.db, cfg=external.config, roles=[external.role])
    await runner.start()
    await eventually(lambda: polled(external))
    with pytest.raises(GraphError, match=rf"external role '{external.role}', and graph.nodes has 2 entries"):
        await external.create(*nodes)
    await runner.stop()


@pytest.mark.slow
async def test_without_kafka_a_bridge_warns_and_keeps_trying(
    external: ExternalTasks, tmp_path: Path, bridges: list[BridgeProcess]
) -> None:
    bridge = BridgeProcess(external, tmp_path, "--kafka", CLOSED_PORT)
    bridges.append(bridge)
    lines = await asyncio.to_thread(bridge.lines_until, "is not served yet")
    assert any("Ctrl-C" in line for line in lines)
    status, body = await asyncio.to_thread(bridge.get)
    assert (status, body["ok"]) == (200, True)
    role = body["bridge"]["roles"][0]
    assert CLOSED_PORT in role["waits_for"]
    assert (role["workers"], role["queued"], role["status_lag"]) == (None, None, None)
    assert await asyncio.to_thread(bridge.stop) == 0


async def test_malformed_records_are_counted_by_topic(external: ExternalTasks) -> None:
    await external.served_engine()
    topic = external.config.topic_status(external.role)
    await Broker(bootstrap_servers=external.names.bootstrap).produce(topic, b"no JSON")

    async def counted() -> bool:
        bridge = external.coordinator.health().bridge
        return bridge is not None and bridge.malformed == {topic: 1}

    await eventually(counted)


async def test_a_runner_starts_again_after_its_stop(external: ExternalTasks) -> None:
    external.settings["worker_types"] = []
    await external.engine()
    runner = BridgeRunner(db=external.db, cfg=external.config, roles=[external.role])
    assert runner.health().running is False
    for _ in range(2):
        await runner.start()
        await eventually(lambda: served(runner))
        async with external.new_external(two_batches):
            task_id = await external.create(node("a", external.role))
            await external.until_status(task_id, "finished")
        assert runner.health().ok
        await runner.stop()
    assert runner.health().bridge is None


async def test_bridge_stops_although_the_tasks_of_a_worker_were_cancelled(external: ExternalTasks) -> None:
    """As when an event loop ends: Temporal's shutdown of such a worker never returns."""
    runner = BridgeRunner(db=external.db, cfg=external.config, roles=[external.role])
    await runner.start()
    await eventually(lambda: polled(external))
    names = ("RoleService.run", "_ActivityWorker.run")
    serving = [
        task for task in asyncio.all_tasks() if any(f" {name} at" in repr(task.get_coro()) for name in names)
    ]
    assert len(serving) == 2
    for task in serving:
        task.cancel()
    await asyncio.wait_for(runner.stop(), EVENT_TIMEOUT_SEC)


async def polled(external: ExternalTasks) -> bool:
    """Return whether a process polls the queue of the role: a bridge serves a role shortly before its first poll."""
    return bool(
        await recent_pollers(await external.client(), role_queue(external.config.queue, external.role))
    )


async def served(runner: BridgeRunner) -> bool:
    """Return whether all roles of a runner are served."""
    bridge = runner.health().bridge
    return bridge is not None and bridge.served


async def test_roles_are_checked_before_anything_starts(external: ExternalTasks) -> None:
    with pytest.raises(
        ConfigError, match=r"the bridge has no roles: pass roles=\['my_role'\], or set worker_types"
    ):
        BridgeRunner(db=external.db, cfg=external.names.config(), roles=[])
    with pytest.raises(ConfigError, match=r"worker_types\[0\] is 'in dexer'"):
        BridgeRunner(db=external.db, cfg=external.names.config(), roles=["in dexer"])
    long = external.names.config(topic_cmd_fmt="c" * 200 + "{type}")
    with pytest.raises(ConfigError, match="topic_cmd_fmt for role"):
        BridgeRunner(db=external.db, cfg=long, roles=["r" * 100])
