"""The cost of a node stays the same as graphs grow: time, history and memory of the engine over the number of nodes."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.models import TaskStatus
from tests.integration.test_large_graphs import layers, printed_figures, run_ids

if TYPE_CHECKING:
    from tests.fork_server import ForkedProcess
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

__all__ = ["printed_figures"]

LARGE = bool(os.environ.get("FLOWKIT_LARGE"))
SIZES = [int(size) for size in os.environ.get("FLOWKIT_SIZES", "400").split(",")] if LARGE else [400]
"""Numbers of nodes; `make large` measures the large ones."""

TIMEOUT_SEC = 900.0
MOST_GROWTH = 1.5
"""Largest ratio between the engine's processor time for a node in the largest graph and in the smallest.

The elapsed time also depends on the machine's load, and on MongoDB: its stand-in copies the document for each update.
"""


def quick_layers(count: int) -> list[dict[str, Any]]:
    """Return layers of 100 nodes, all with the same role."""
    return [{**each, "type": "quick"} for each in layers(count)]


def peak_mb(process: ForkedProcess) -> int:
    """Return the largest memory (RSS) that a process has used, in MB; 0 where the system does not report it."""
    status = Path(f"/proc/{process.pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) // 1_000 for line in lines if line.startswith("VmHWM")), 0)


def processor_sec(process: ForkedProcess) -> float:
    """Return the processor time that a process has used, in seconds; 0 where the system does not report it."""
    stat = Path(f"/proc/{process.pid}/stat")
    used = stat.read_text().rpartition(")")[2].split()[11:13] if stat.exists() else ["0", "0"]
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")


async def events(harness: Harness, task_id: str) -> tuple[int, int]:
    """Return the number of events in all runs of a task, and the number of runs."""
    client, runs = await harness.client(), await run_ids(harness, task_id)
    described = [await client.get_workflow_handle(task_id, run_id=run).describe() for run in runs]
    return sum(each.history_length for each in described), len(runs)


async def measure(harness: Harness, size: int) -> tuple[float, str]:
    """Run a graph on an engine of its own. Return its processor time per node in milliseconds, and all figures."""
    engine = harness.engine_process()
    before = await first_task(harness, engine)
    used = processor_sec(engine)
    nodes = quick_layers(size // 100)
    began = time.monotonic()
    task_id = await harness.create(*nodes)
    submitted = time.monotonic() - began
    result = await asyncio.wait_for((await harness.handle(task_id)).result(), TIMEOUT_SEC)
    assert result.status is TaskStatus.FINISHED
    seconds, peak = time.monotonic() - began, peak_mb(engine)
    of_engine = 1_000 * (processor_sec(engine) - used) / size
    engine.terminate()
    length, runs = await events(harness, task_id)
    return of_engine, (
        f"{size:,} nodes: {seconds:.1f} s ({submitted:.1f} s to submit), {1_000 * seconds / size:.1f} ms a node, of "
        f"which {of_engine:.1f} ms on the engine's processor, {length:,} events in {runs} runs, engine {peak} MB "
        f"(idle {before} MB)"
    )


async def first_task(harness: Harness, engine: ForkedProcess) -> int:
    """Run a small task, so that engine and worker are ready, and return the memory of the engine."""
    await harness.result(await harness.create(*quick_layers(1)))
    return peak_mb(engine)


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_SEC * len(SIZES))
async def test_cost_of_a_node_does_not_grow_with_the_graph(
    harness: Harness, printed_figures: list[str]
) -> None:
    harness.process("worker", "tests.integration.handlers:Quick", "--concurrency", "100")
    found = []
    for size in SIZES:
        each, line = await measure(harness, size)
        printed_figures.append(f"{line}, load {os.getloadavg()[0]:.1f}")
        found.append(each)
    assert found[-1] <= MOST_GROWTH * found[0]
