"""Inline roles: attempts that an engine runs itself, with the same outcome as those of a worker."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.api.enums.v1 import EventType

from flowkit.models import TaskStatus
from tests.integration.handlers import Gated, InlineQuick
from tests.integration.harness import EVENT_TIMEOUT_SEC, is_local_attempt, node
from tests.integration.test_continue_as_new import histories
from tests.integration.test_process_failures import assert_every_batch_counts_once

if TYPE_CHECKING:
    from flowkit.worker import Batch, BatchResult, RoleHandler
    from flowkit.worker.context import RunContext
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

patient = pytest.mark.usefixtures("patient")

INLINE: dict[str, RoleHandler] = {"inline": InlineQuick()}
ONCE: dict[str, Any] = {"retry_policy": {"max": 0}}
SOON: dict[str, Any] = {"retry_policy": {"max": 2, "backoff_sec": 0.1}}
PULL = {"input_adapter": "pull.from_artifacts"}


class Observing(InlineQuick):
    """Notes the threads on which it runs, and how many of its attempts run at once; waits until so many do."""

    def __init__(self, together: int = 1) -> None:
        self.threads: set[str] = set()
        self.now = self.most = 0
        self._gate = asyncio.Barrier(together)

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Count this attempt while its batch runs."""
        self.threads.add(threading.current_thread().name)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.wait_for(self._gate.wait(), EVENT_TIMEOUT_SEC)
            return await super().process_batch(batch, ctx)
        finally:
            self.now -= 1


def chain(length: int, **fields: Any) -> list[dict[str, Any]]:
    """Return inline nodes that run in sequence."""
    return [node(f"n{i}", "inline", *([f"n{i - 1}"] if i else []), **fields) for i in range(length)]


async def events_of(harness: Harness, task_id: str) -> list[Any]:
    """Return the events in the task's history."""
    return [*(await (await harness.handle(task_id)).fetch_history()).events]


async def counts(harness: Harness, task_id: str) -> tuple[int, int]:
    """Return how many local activities ran attempts of the task, and how many ordinary activities of `inline` did."""
    events = await events_of(harness, task_id)
    local = sum(map(is_local_attempt, events))
    names = [event.activity_task_scheduled_event_attributes.activity_type.name for event in events]
    return local, names.count("inline")


async def attempts(harness: Harness, task_id: str) -> dict[str, tuple[str, int]]:
    """Return the status and the epoch of each node."""
    nodes = (await harness.document(task_id))["graph"]["nodes"]
    return {each["node_id"]: (each["status"], each["attempt_epoch"]) for each in nodes}


# --- the path ---------------------------------------------------------------------------------------------------


@patient
async def test_a_chain_of_inline_nodes_needs_no_ordinary_activity(harness: Harness) -> None:
    await harness.engine(handlers=INLINE)
    task_id = await harness.create(*chain(10))
    await harness.result(task_id)
    assert await counts(harness, task_id) == (10, 0)
    assert set((await attempts(harness, task_id)).values()) == {("finished", 1)}


@patient
async def test_several_inline_nodes_run_concurrently(harness: Harness) -> None:
    handler = Observing(together=5)
    await harness.engine(handlers={"inline": handler})
    task_id = await harness.create(*(node(f"n{i}", "inline") for i in range(5)))
    await harness.result(task_id)
    assert await counts(harness, task_id) == (5, 0)
    assert handler.most == 5


async def test_handler_does_not_run_on_the_thread_of_the_engine(harness: Harness) -> None:
    handler = Observing()
    await harness.engine(handlers={"inline": handler})
    await harness.result(await harness.create(*chain(3)))
    assert handler.threads == {threading.main_thread().name}


@patient
async def test_web_ui_shows_the_node_of_a_local_activity(harness: Harness) -> None:
    await harness.engine(handlers=INLINE)
    task_id = await harness.create(*chain(1, inline={"failures": 1}, **SOON))
    await harness.result(task_id)
    marked = [event for event in await events_of(harness, task_id) if is_local_attempt(event)]
    summaries = [event.user_metadata.summary.data.decode() for event in marked]
    assert summaries == ['"n0, role inline"', '"n0, retry 1 of 2, role inline"']
    failure = marked[0].marker_recorded_event_attributes.failure
    assert (failure.message, failure.application_failure_info.type) == ("as ordered", "flaky")
    assert b"inline attempt" in marked[0].marker_recorded_event_attributes.details["data"].payloads[0].data


# --- an optimization only ---------------------------------------------------------------------------------------

MIXED = [
    node("a", "inline", inline={"batches": 3}),
    node("again", "inline", "a", inline={"failures": 1, "batches": 2}, **SOON),
    node("broken", "inline", "again", inline={"failures": 9}, allow_failure=True, **SOON),
    node(
        "wrong",
        "inline",
        "broken",
        inline={"failures": 9, "permanent": True},
        allow_failure=True,
        fan_in="any",
    ),
    node("last", "inline", "a", "again"),
]
RUNNER = re.compile(r" \(worker [^ ]+, version [^ ]+\)$")
"""The end of an error."""
VOLATILE = {
    "_id",
    "task_id",
    "id",
    "pipeline_id",
    "lease",
    "run_id",
    "first_run_id",
    "worker_id",
    "created_at",
}
VOLATILE |= {
    "updated_at",
    "started_at",
    "attempt_ended_at",
    "finished_at",
    "last_event_recv_ms",
    "at",
    "ts",
    "closed_run_id",
}
VOLATILE |= {
    "next_retry_at_ms",
    "recv_ts_ms",
    "lease_id",
    "lease_deadline_ts_ms",
    "event_hash",
    "ts_ms",
    "recorded_at",
}


def constant(value: Any) -> Any:
    """Return a document without times and ids."""
    if isinstance(value, dict):
        return {key: constant(item) for key, item in value.items() if key not in VOLATILE}
    if isinstance(value, str):
        return RUNNER.sub(" (…)", value)
    return [constant(item) for item in value] if isinstance(value, list) else value


async def outcome(harness: Harness, task_id: str) -> dict[str, list[str]]:
    """Return everything that a task has stored, without times and ids."""
    found = {}
    for name, key in (
        ("tasks", "id"),
        ("artifacts", "task_id"),
        ("metrics_raw", "task_id"),
        ("worker_events", "task_id"),
    ):
        rows = [row async for row in harness.db[name].find({key: task_id})]
        found[name] = sorted(repr(sorted(constant(row).items())) for row in rows)
    return found


@patient
async def test_inline_attempts_store_the_same_documents_as_those_of_a_worker(harness: Harness) -> None:
    engine = await harness.engine()
    worker = await harness.worker(INLINE)
    ordinary = await harness.create(*MIXED)
    assert (await harness.result(ordinary)).status is TaskStatus.FINISHED
    await asyncio.gather(engine.stop(), worker.stop())
    host = await harness.engine(handlers=INLINE)
    inline = await harness.create(*MIXED)
    assert (await harness.result(inline)).status is TaskStatus.FINISHED
    await host.stop()
    assert (await counts(harness, ordinary))[0] == 0
    assert (await counts(harness, inline))[1] == 0
    assert await outcome(harness, inline) == await outcome(harness, ordinary)


async def test_permanent_failure_of_an_inline_node_fails_the_task(harness: Harness) -> None:
    await harness.engine(handlers=INLINE)
    task_id = await harness.create(*chain(2, inline={"failures": 9, "permanent": True}))
    document = await harness.until_status(task_id, "failed")
    assert [each["status"] for each in document["graph"]["nodes"]] == ["failed", "skipped"]
    failed = document["graph"]["nodes"][0]
    worker_id, version = failed["lease"]["worker_id"], failed["lease"]["version"]
    assert worker_id.startswith("engine-")
    assert failed["last_error"] == f"flaky: as ordered (worker {worker_id}, version {version})"


# --- limits of the path -----------------------------------------------------------------------------------------


async def test_consecutive_local_activities_let_a_cancel_through_within_two_seconds(harness: Harness) -> None:
    await harness.engine(handlers=INLINE)
    task_id = await harness.create(*chain(60, inline={"pause": 0.5}))
    await harness.until_node(task_id, "n2", "finished")
    await harness.coordinator.cancel_task(task_id)
    await harness.until_status(task_id, "cancelled")
    assert (await harness.statuses(task_id))["n59"] == "skipped"
    (history,) = await histories(harness, task_id)
    kinds = [str(event.WhichOneof("attributes")) for event in history.events]
    tasks = " ".join(kinds).split("workflow_task_completed_event_attributes")
    assert max(each.count("marker_recorded") for each in tasks) <= 4, "each takes half a second"


@patient
async def test_streaks_of_local_activities_are_separated_by_timers(harness: Harness) -> None:
    await harness.engine(handlers=INLINE)
    task_id = await harness.create(*chain(12, inline={"pause": 0.3}))
    await harness.result(task_id)
    started = [
        event.event_type == EventType.EVENT_TYPE_TIMER_STARTED for event in await events_of(harness, task_id)
    ]
    assert 2 <= sum(started) < 12, "three on an idle machine"
    assert await counts(harness, task_id) == (12, 0)


async def test_attempt_that_takes_too_long_continues_as_an_ordinary_one_at_no_charge(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    await harness.engine(handlers=INLINE)
    task_id = await harness.create(*chain(1, inline={"pause": 2.5, "batches": 1}, **ONCE))
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert await attempts(harness, task_id) == {"n0": ("finished", 2)}
    assert await counts(harness, task_id) == (1, 1)
    await assert_every_batch_counts_once(harness, task_id, "n0", 1)
    assert (
        "the attempt of node n0 inside the engine took too long; an ordinary attempt follows" in caplog.text
    )
    assert "Traceback" not in caplog.text


async def test_node_that_fell_back_stays_ordinary(harness: Harness) -> None:
    await harness.engine(handlers=INLINE)
    task_id = await harness.create(*chain(1, inline={"pause": 2.2, "failures": 2}, **SOON))
    await harness.result(task_id)
    assert await attempts(harness, task_id) == {"n0": ("finished", 3)}
    assert await counts(harness, task_id) == (1, 2)


@patient
async def test_task_that_moves_to_an_engine_without_the_role_continues(harness: Harness) -> None:
    host = await harness.engine(handlers=INLINE)
    gated = Gated()
    worker = await harness.worker({"gated": gated, **INLINE})
    task_id = await harness.create(
        node("before", "inline", **ONCE),
        node("long", "gated", "before", **ONCE),
        node("after", "inline", "long", **ONCE),
    )
    await harness.until_node(task_id, "long", "running")
    await host.stop()
    gated.gate.set()
    await harness.engine()
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert await attempts(harness, task_id) == {
        "before": ("finished", 1),
        "long": ("finished", 1),
        "after": ("finished", 2),
    }
    assert (await harness.node(task_id, "after"))["lease"]["worker_id"] == worker.worker_id


@patient
async def test_nodes_that_pull_or_stream_are_ordinary(harness: Harness) -> None:
    await harness.engine(handlers=INLINE)
    task_id = await harness.create(
        node("source", "inline", inline={"batches": 2}),
        node("pulls", "inline", "source", inline=PULL),
        node("streamed", "inline", "pulls", inline={"batches": 2}),
        {**node("streams", "inline", "streamed"), "io": {"input_inline": PULL, "start_when": "first_batch"}},
    )
    await harness.result(task_id)
    assert await counts(harness, task_id) == (1, 3)


@patient
async def test_inline_node_is_ordinary_while_an_ordinary_sibling_is_ready(harness: Harness) -> None:
    await harness.engine(handlers=INLINE)
    await harness.worker()
    task_id = await harness.create(
        node("i", "inline", inline={"pause": 1.5}), node("o"), node("below", "inline", "i", "o")
    )
    await harness.result(task_id)
    assert await counts(harness, task_id) == (1, 1)


@patient
async def test_inline_node_is_ordinary_while_a_condition_is_due(harness: Harness) -> None:
    await harness.engine(handlers=INLINE)
    task_id = await harness.create(
        node("first", "inline"), node("i", "inline", "first"), node("when", "inline", "first", when="true")
    )
    await harness.result(task_id)
    assert await counts(harness, task_id) == (2, 1)


@pytest.mark.parametrize(
    "limit", [{"max_type_concurrency": {"inline": 2}}, {"window": 2}, {"max_in_flight": 2}]
)
async def test_limits_count_inline_attempts(harness: Harness, limit: dict[str, Any]) -> None:
    harness.settings |= limit
    handler = Observing()
    await harness.engine(handlers={"inline": handler})
    task_id = await harness.create(*(node(f"n{i}", "inline", inline={"pause": 0.2}) for i in range(6)))
    await harness.result(task_id)
    assert handler.most == 2
