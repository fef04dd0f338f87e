"""Large graphs, and tasks that continue their history in new runs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowExecutionStatus, WorkflowHistoryEventFilterType

from flowkit import limits
from flowkit.models import TaskStatus
from flowkit.worker import BatchResult
from tests.integration.handlers import Quick
from tests.integration.harness import Harness, eventually, node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowkit.worker import Batch, RoleHandler
    from flowkit.worker.context import RunContext

pytestmark = pytest.mark.server

CLOSING = WorkflowHistoryEventFilterType.CLOSE_EVENT
ROLES = ("fetch", "parse", "index", "rank")
HELD_EVENTS = 400
LARGE = bool(os.environ.get("FLOWKIT_LARGE"))
MOST_LAYERS = 20 if LARGE else 8
"""Layers of the largest graph; `make large` runs the large case."""
BARRIERS = 3
LAYERS = 20 if LARGE else 4
"""Layers next to a node that runs all the time."""
WIDTH = 100
BETWEEN_BARRIERS = WIDTH if LARGE else WIDTH // 2
"""Width of the layers that barriers separate."""
TIMEOUT_SEC = 300.0
"""Seconds for the largest graph, at about 10 ms per node."""


class Counting(Quick):
    """Counts its attempts by node and epoch."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Count the attempt, then return one metrics row."""
        self.ran[f"{ctx.node_id}.{ctx.attempt_epoch}"] += 1
        return await super().process_batch(batch, ctx)


class Gated(Counting):
    """Runs until the test opens its gate, and records an interruption."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.gate = asyncio.Event(), asyncio.Event()
        self.interrupted = False

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait for the gate."""
        self.began.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.interrupted = True
            raise
        return await super().process_batch(batch, ctx)


class GatedFailure(Gated):
    """Fails as soon as its gate is open."""

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait for the gate, then fail."""
        await super().process_batch(batch, ctx)
        return BatchResult(success=False, reason_code="flaky_source")


def layers(count: int, *, barrier_every: int = 0, width: int = WIDTH) -> list[dict[str, Any]]:
    """Return layers of nodes, each with three parents in the previous layer, or with the barrier as only parent."""
    nodes: list[dict[str, Any]] = []
    above: list[str] = []
    for depth in range(count):
        if barrier_every and depth and depth % barrier_every == 0:
            nodes.append(node(f"barrier{depth}", ROLES[0], *above))
            above = [f"barrier{depth}"]
        layer = [f"n{depth}-{place}" for place in range(width)]
        for place, node_id in enumerate(layer):
            parents = {above[(place + step) % len(above)] for step in range(3)} if above else ()
            nodes.append(node(node_id, ROLES[place % len(ROLES)], *sorted(parents)))
        above = layer
    return nodes


def counters() -> dict[str, Counting]:
    """Return one counting handler for each role."""
    return {role: Counting() for role in ROLES}


async def start(harness: Harness, handlers: dict[str, Any]) -> None:
    """Start an engine and a worker with slots for many attempts, which a busy machine may keep from heartbeats."""
    harness.settings["lease_ttl_sec"] = TIMEOUT_SEC
    await harness.engine()
    roles: dict[str, RoleHandler] = handlers
    await harness.worker(roles, concurrency=50)


async def finish(harness: Harness, task_id: str) -> None:
    """Wait for the end of a large task."""
    result = await asyncio.wait_for((await harness.handle(task_id)).result(), TIMEOUT_SEC)
    assert result.status is TaskStatus.FINISHED


async def run_ids(harness: Harness, task_id: str) -> list[str]:
    """Return the run ids of the task's workflow, in order."""
    client, chain = await harness.client(), [(await harness.document(task_id))["first_run_id"]]
    while True:
        handle = client.get_workflow_handle(task_id, run_id=chain[-1])
        if (await handle.describe()).status is not WorkflowExecutionStatus.CONTINUED_AS_NEW:
            return chain
        end = (await handle.fetch_history(event_filter_type=CLOSING)).events[-1]
        chain.append(end.workflow_execution_continued_as_new_event_attributes.new_execution_run_id)


async def run_of(harness: Harness, task_id: str, activity_id: str) -> int:
    """Return the number of the run, from 0, that scheduled this attempt."""
    client = await harness.client()
    for number, run_id in enumerate(await run_ids(harness, task_id)):
        events = (await client.get_workflow_handle(task_id, run_id=run_id).fetch_history()).events
        if any(e.activity_task_scheduled_event_attributes.activity_id == activity_id for e in events):
            return number
    raise AssertionError(f"{activity_id} was never scheduled")


async def assert_each_node_ran_once(harness: Harness, task_id: str, handlers: dict[str, Counting]) -> None:
    """Check that all nodes finished at epoch 1, and that no handler ran a node twice."""
    entries = (await harness.document(task_id))["graph"]["nodes"]
    odd = [e for e in entries if (e["status"], e["attempt_epoch"]) != ("finished", 1)]
    assert odd == []
    ran: Counter[str] = sum((handler.ran for handler in handlers.values()), Counter())
    assert ran == Counter(f"{entry['node_id']}.1" for entry in entries)


@pytest.fixture
def printed_figures(capsys: pytest.CaptureFixture[str]) -> Iterator[list[str]]:
    """Print the figures that a test measured, even when it passes."""
    figures: list[str] = []
    yield figures
    with capsys.disabled():
        for figure in figures:
            sys.stdout.write(f"\n  {figure}")


def figure(name: str, nodes: int, seconds: float, runs: int = 1) -> str:
    """Format one line of figures."""
    each = 1000 * seconds / nodes
    return f"{name}: {nodes} nodes, {runs} runs, {seconds:.1f} s, {each:.1f} ms a node"


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_SEC + 30)
async def test_every_node_of_a_large_graph_runs_once(harness: Harness, printed_figures: list[str]) -> None:
    handlers = counters()
    await start(harness, handlers)
    nodes = layers(MOST_LAYERS)
    assert len(json.dumps({"nodes": nodes})) < limits.TASK_INPUT_BYTES
    begun = time.monotonic()
    task_id = await harness.create(*nodes)
    await finish(harness, task_id)
    printed_figures.append(figure("layers", len(nodes), time.monotonic() - begun))
    await assert_each_node_ran_once(harness, task_id, handlers)


async def test_long_history_continues_as_new_whenever_nothing_is_in_flight(
    short_runs: Harness, printed_figures: list[str]
) -> None:
    handlers = counters()
    await start(short_runs, handlers)
    nodes = layers(BARRIERS * 2, barrier_every=2, width=BETWEEN_BARRIERS)
    begun = time.monotonic()
    task_id = await short_runs.create(*nodes)
    await finish(short_runs, task_id)
    runs = await run_ids(short_runs, task_id)
    printed_figures.append(figure("barriers", len(nodes), time.monotonic() - begun, len(runs)))
    assert len(runs) >= BARRIERS
    await assert_each_node_ran_once(short_runs, task_id, handlers)
    document = await short_runs.document(task_id)
    assert [change["to"] for change in document["status_history"]] == ["queued", "running", "finished"]


@pytest.mark.timeout(TIMEOUT_SEC + 60)
async def test_long_running_node_is_never_interrupted_by_a_new_run(
    short_runs: Harness, printed_figures: list[str]
) -> None:
    long = Gated()
    handlers = {**counters(), "long": long}
    await start(short_runs, handlers)
    nodes = layers(LAYERS, barrier_every=2, width=BETWEEN_BARRIERS)
    begun = time.monotonic()
    task_id = await short_runs.create(
        node("long", "long"), *nodes, node("last", "fetch", "long"), node("very_last", "fetch", "last")
    )
    await until_only_runs(short_runs, task_id, "long.1")
    assert len(await run_ids(short_runs, task_id)) == 1
    long.gate.set()
    await finish(short_runs, task_id)
    runs = await run_ids(short_runs, task_id)
    printed_figures.append(figure("long node", len(nodes) + 3, time.monotonic() - begun, len(runs)))
    assert len(runs) == 2
    assert not long.interrupted
    await assert_each_node_ran_once(short_runs, task_id, handlers)


async def until_only_runs(harness: Harness, task_id: str, activity_id: str) -> None:
    """Wait until this attempt has been the only one in flight for some time."""
    handle = await harness.handle(task_id)
    quiet: Counter[int] = Counter()

    async def look() -> bool:
        found = (await handle.describe()).raw_description
        pending = [activity.activity_id for activity in found.pending_activities]
        length = found.workflow_execution_info.history_length
        quiet[length] += pending == [activity_id]
        return quiet[length] >= 20

    await eventually(look, timeout_sec=TIMEOUT_SEC)


@pytest.mark.slow
async def test_starts_are_held_back_until_a_long_node_allows_a_new_run(
    short_runs: Harness, printed_figures: list[str]
) -> None:
    long = Gated()
    handlers = {**counters(), "long": long}
    short_runs.settings["hold_starts_events"] = HELD_EVENTS
    await start(short_runs, handlers)
    nodes = layers(6, width=BETWEEN_BARRIERS)
    begun = time.monotonic()
    task_id = await short_runs.create(node("long", "long"), *nodes)
    await until_only_runs(short_runs, task_id, "long.1")
    held = [n for n, status in (await short_runs.statuses(task_id)).items() if status == "queued"]
    assert 0 < len(held) < len(nodes)
    long.gate.set()
    await finish(short_runs, task_id)
    runs = await run_ids(short_runs, task_id)
    printed_figures.append(figure("held starts", len(nodes) + 1, time.monotonic() - begun, len(runs)))
    assert len(runs) >= 2
    assert await run_of(short_runs, task_id, f"{held[0]}.1") > 0
    assert not long.interrupted
    await assert_each_node_ran_once(short_runs, task_id, handlers)


async def test_retry_that_waits_across_a_new_run_keeps_its_time_and_count(short_runs: Harness) -> None:
    flaky = GatedFailure()
    await start(short_runs, {**counters(), "failing": flaky})
    task_id = await short_runs.create(
        *layers(1),
        node("flaky", "failing", allow_failure=True, retry_policy={"max": 1, "backoff_sec": 3.0}),
        node("last", "fetch", "flaky"),
    )
    await until_only_runs(short_runs, task_id, "flaky.1")
    flaky.gate.set()
    waiting = await short_runs.until_node(task_id, "flaky", "deferred")
    result = await short_runs.result(task_id)
    assert result.handled_failures == ["flaky"]
    assert await run_of(short_runs, task_id, "flaky.2") > await run_of(short_runs, task_id, "flaky.1")
    entry = await short_runs.node(task_id, "flaky")
    assert (entry["status"], entry["attempt_epoch"]) == ("failed", 2)
    assert entry["started_at"].timestamp() * 1000 >= waiting["next_retry_at_ms"]
