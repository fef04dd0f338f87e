"""A real Prometheus reads a running deployment, and an alert fires when a worker is killed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import urllib.request
from typing import TYPE_CHECKING

import pytest

from flowkit.local.ports import free_port
from tests.integration.harness import eventually, node
from tests.observability.programs import program
from tests.observability.running import Prometheus
from tests.observability.test_dashboard import GRAPHS, expressions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fork_server import ForkedProcess
    from tests.integration.harness import Harness

pytestmark = [pytest.mark.server, pytest.mark.nightly]

ROLE = "quick"
WORKER = ("worker", "tests.integration.handlers:Quick")


async def until(look: Callable[[], object]) -> None:
    """Wait until a function that asks Prometheus returns a true value."""

    async def asked() -> object:
        return await asyncio.to_thread(look)

    await eventually(asked)


def problems_of(port: int) -> list[str]:
    """Return what promtool finds in the metrics of a process, but in those of Temporal's SDK."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        text = response.read()
    done = subprocess.run(
        [program("promtool"), "check", "metrics"], input=text, capture_output=True, check=False
    )
    return [line for line in done.stderr.decode().splitlines() if not line.startswith("temporal_")]


async def test_prometheus_reads_a_deployment_and_an_alert_fires_when_a_worker_is_killed(
    harness: Harness, tmp_path: Path
) -> None:
    ports = {"flowkit-engine": free_port(), "flowkit-worker": free_port()}

    def start(job: str, *command: str, **cfg: float) -> ForkedProcess:
        settings = tmp_path / f"{job}.json"
        settings.write_text(json.dumps(cfg), encoding="utf-8")
        return harness.process(*command, "--config", str(settings), "--health-port", str(ports[job]))

    start("flowkit-engine", "engine", sweep_sec=1)
    worker = start("flowkit-worker", *WORKER, announce_interval_sec=1)
    with Prometheus(tmp_path, {job: [port] for job, port in ports.items()}) as prometheus:
        await until(prometheus.is_ready)
        await until(lambda: len(prometheus.values("up == 1")) == len(ports))
        await until(lambda: not prometheus.firing())
        await look_at_a_task(harness, prometheus)
        for port in ports.values():
            assert problems_of(port) == []

        worker.kill()
        await until(lambda: "FlowKitProcessDown" in prometheus.firing())
        alert = prometheus.firing()["FlowKitProcessDown"]
        assert alert["labels"]["job"] == "flowkit-worker"
        assert alert["annotations"]["summary"].startswith("flowkit-worker at 127.0.0.1:")

        task = await harness.create(node("n", ROLE))
        await until(lambda: "FlowKitNoWorkerForRole" in prometheus.firing())
        assert prometheus.firing()["FlowKitNoWorkerForRole"]["labels"]["role"] == ROLE
        start("flowkit-worker", *WORKER)
        assert (await harness.result(task)).status == "finished"
        await until(lambda: not prometheus.firing())


async def look_at_a_task(harness: Harness, prometheus: Prometheus) -> None:
    """Run a task, and find it in the panels; Prometheus can evaluate all of them."""
    task = await harness.create(node("n", ROLE), node("m", ROLE, "n"))
    assert (await harness.result(task)).status == "finished"
    ended = 'sum by (status) (flowkit_nodes_closed_total{role="quick"})'
    await until(lambda: prometheus.values(ended) == [({"status": "finished"}, 2.0)])
    for panel in GRAPHS.values():
        for expression in expressions(panel):
            await asyncio.to_thread(prometheus.values, expression)
