"""Deadlines of nodes and of the task on real servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ApplicationError

from flowkit.models import TaskStatus
from tests.integration.handlers import ALL, Quick
from tests.integration.harness import Harness, eventually, node, wait_seconds
from tests.integration.test_cancel_terminate_reset import reset
from tests.integration.test_continue_as_new import chain, histories, replay
from tests.integration.test_large_graphs import run_ids

if TYPE_CHECKING:
    from temporalio.client import WorkflowHistory

    from flowkit.worker import Batch, BatchResult
    from flowkit.worker.context import RunContext

pytestmark = pytest.mark.server

EXCEEDED = "deadline_exceeded: the node took longer than {} s (deadline_sec) from the opening of its gate"
SOON_SEC = 4
"""A deadline that leaves a busy machine the time to start the attempts that the test needs."""

TASK_EXCEEDED = f"deadline_exceeded: the task took longer than {SOON_SEC} s (deadline_sec)"
LONG: dict[str, Any] = {"inline": {"pause": 60}}
LATER: dict[str, Any] = {"inline": {"failures": 9}, "retry_policy": {"max": 9, "backoff_sec": 60}}


class Remedy(Quick):
    """Stores the failures that started its node."""

    role = "remedy"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the reason codes as metrics."""
        result = await super().process_batch(batch, ctx)
        result.metrics["codes"] = [failed["reason_code"] for failed in ctx.failed_nodes]
        return result


class UntilFailed(Quick):
    """Waits until other nodes of its task have failed."""

    role = "until_failed"

    def __init__(self, harness: Harness, *node_ids: str) -> None:
        self._harness = harness
        self._node_ids = node_ids

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait, then return one metrics row."""
        for node_id in self._node_ids:
            await self._harness.until_node(ctx.task_id, node_id, "failed", epoch=0)
        return await super().process_batch(batch, ctx)


class FirstTime(Quick):
    """Takes a minute in the first attempt of its node, and two seconds in later ones."""

    role = "first_time"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait, then return one metrics row."""
        await ctx.cancellable(wait_seconds(60 if ctx.attempt_epoch == 1 else 2))
        return await super().process_batch(batch, ctx)


async def cancel_reason(harness: Harness, attempt: str) -> str:
    """Wait until a handler has recorded its cancel, and return the reason."""

    async def look() -> dict[str, Any] | None:
        found: dict[str, Any] | None = await harness.db.notes.find_one({"_id": attempt})
        return found

    return str((await eventually(look))["reason"])


async def failure(harness: Harness, task_id: str) -> ApplicationError:
    """Wait until the task has failed, and return its error."""
    with pytest.raises(WorkflowFailureError) as caught:
        await harness.result(task_id)
    assert isinstance(caught.value.cause, ApplicationError)
    return caught.value.cause


def deadline_timers(history: WorkflowHistory) -> list[str]:
    """Return the summaries of the deadline timers in a history."""
    started = [event for event in history.events if event.HasField("timer_started_event_attributes")]
    summaries = [event.user_metadata.summary.data.decode() for event in started]
    return [summary for summary in summaries if "deadline" in summary]


async def test_running_node_is_cancelled_and_fails_at_its_deadline_while_others_continue(
    harness: Harness,
) -> None:
    await harness.engine()
    await harness.worker({**ALL, "until_failed": UntilFailed(harness, "slow")})
    task_id = await harness.create(
        node("slow", "paced", **LONG, deadline_sec=SOON_SEC, allow_failure=True),
        node("below", "quick", "slow"),
        node("aside", "until_failed", deadline_sec=600),
        node("last", "quick", "aside"),
    )
    result = await harness.result(task_id)
    assert (result.status, result.handled_failures) == (TaskStatus.FINISHED, ["slow"])
    expected = {"slow": "failed", "below": "skipped", "aside": "finished", "last": "finished"}
    assert await harness.statuses(task_id) == expected
    assert await cancel_reason(harness, "slow.1") == "deadline"
    entry = await harness.node(task_id, "slow")
    assert (entry["last_error"], entry["attempt_epoch"]) == (EXCEEDED.format(SOON_SEC), 1)
    assert "cancelled" not in (await harness.document(task_id))["coordinator"]
    found = await histories(harness, task_id)
    first, second = deadline_timers(found[0])
    assert ("deadline of slow" in first, "deadline of aside" in second) == (True, True)
    await replay(found)


async def test_waiting_nodes_fail_at_their_deadlines_without_another_attempt(harness: Harness) -> None:
    harness.settings["window"] = 1
    await harness.engine()
    await harness.worker({**ALL, "until_failed": UntilFailed(harness, "no_slot", "deferred", "unserved")})
    task_id = await harness.create(
        node("holder", "until_failed"),
        node("no_slot", "until_failed", deadline_sec=SOON_SEC),
        node("deferred", "failing", **LATER, deadline_sec=SOON_SEC),
        node("unserved", "nobody", deadline_sec=SOON_SEC),
        node("last", "quick", "holder"),
        on_node_failure="continue",
    )
    error = await failure(harness, task_id)
    assert (error.type, "(and 2 more failed nodes)" in error.message) == ("task_failed", True)
    entries = {name: await harness.node(task_id, name) for name in ("no_slot", "deferred", "unserved")}
    assert {name: entry["attempt_epoch"] for name, entry in entries.items()} == {
        "no_slot": 0,
        "deferred": 1,
        "unserved": 1,
    }
    for entry in entries.values():
        assert (entry["status"], entry["last_error"]) == ("failed", EXCEEDED.format(SOON_SEC))
        assert entry.get("next_retry_at_ms") is None
    assert (await harness.node(task_id, "last"))["status"] == "finished"
    await replay(await histories(harness, task_id))


async def test_deadline_covers_all_attempts_of_a_node_and_starts_its_remediator(harness: Harness) -> None:
    await harness.engine()
    await harness.worker({**ALL, "remedy": Remedy()})
    retries = {"max": 1000, "backoff_sec": 0.3}
    task_id = await harness.create(
        node("first", "paced", inline={"pause": 2}),
        node(
            "u",
            "failing",
            "first",
            inline={"failures": 1000},
            retry_policy=retries,
            deadline_sec=SOON_SEC,
            routing={"on_failure": ["remed"]},
        ),
        node("remed", "remedy", inline={}),
    )
    result = await harness.result(task_id)
    assert (result.status, result.handled_failures) == (TaskStatus.FINISHED, ["u"])
    entry = await harness.node(task_id, "u")
    assert (entry["last_error"], entry["attempt_epoch"] > 1) == (EXCEEDED.format(SOON_SEC), True)
    (row,) = await harness.rows(task_id, "remed")
    assert row["metrics"]["codes"] == ["deadline_exceeded"]
    found = await histories(harness, task_id)
    assert len(deadline_timers(found[0])) == 1
    await replay(found)


async def test_handler_that_ignores_its_cancel_fails_after_the_grace_period(harness: Harness) -> None:
    harness.settings["cancel_grace_sec"] = 2
    await harness.engine()
    harness.worker_process("Stubborn", "Quick")
    task_id = await harness.create(
        node("first"),
        node("slow", "stubborn", "first", inline={"pause": 30}, deadline_sec=5, allow_failure=True),
        node("below", "quick", "slow", fan_in="any"),
    )
    await harness.until_node(task_id, "slow", "cancelling")
    assert (await harness.result(task_id)).handled_failures == ["slow"]
    entry = await harness.node(task_id, "slow")
    assert (entry["status"], entry["last_error"]) == ("failed", EXCEEDED.format(5))
    await replay(await histories(harness, task_id))


async def test_cancel_of_the_task_while_a_node_stops_cancels_the_node(harness: Harness) -> None:
    await harness.engine()
    harness.worker_process("Stubborn", "Quick")
    task_id = await harness.create(
        node("first"), node("slow", "stubborn", "first", inline={"pause": 30}, deadline_sec=5)
    )
    await harness.until_node(task_id, "slow", "cancelling")
    await (await harness.handle(task_id)).cancel(reason="enough")
    document = await harness.until_status(task_id, "cancelled")
    assert document["coordinator"]["cancel_reason"] == "enough"
    assert await harness.statuses(task_id) == {"first": "finished", "slow": "cancelled"}
    await replay(await histories(harness, task_id))


async def test_task_that_exceeds_its_deadline_cancels_running_nodes_and_fails(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(
        node("done"),
        node("slow", "paced", "done", **LONG),
        node("below", "quick", "slow"),
        deadline_sec=SOON_SEC,
    )
    error = await failure(harness, task_id)
    assert (error.type, error.message) == ("task_failed", TASK_EXCEEDED)
    assert await harness.statuses(task_id) == {"done": "finished", "slow": "cancelled", "below": "skipped"}
    assert await cancel_reason(harness, "slow.1") == "deadline"
    document = await harness.document(task_id)
    assert (document["status"], document["reason"]) == ("failed", TASK_EXCEEDED)
    assert document["coordinator"]["cancel_reason"] == "deadline"
    assert (await harness.node(task_id, "below"))["skip_reason"] == "task_failed"
    await replay(await histories(harness, task_id))


async def test_timer_of_a_deadline_ends_with_its_node(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    nodes = [node(f"n{i}", "quick", *([f"n{i - 1}"] if i else []), deadline_sec=600) for i in range(3)]
    task_id = await harness.create(*nodes, deadline_sec=3600)
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    found = await histories(harness, task_id)
    assert deadline_timers(found[0]) == [f'"deadline of n{i} in 10 min"' for i in range(3)]
    ends = ["activity_task_completed_event_attributes", "timer_canceled_event_attributes"]
    kinds = [event.WhichOneof("attributes") for event in found[0].events]
    assert [kind for kind in kinds if kind in ends][:4] == ends * 2
    await replay(found)


async def test_deadline_that_has_passed_applies_at_once_after_a_reset(harness: Harness) -> None:
    await harness.engine()
    await harness.worker({**ALL, "first_time": FirstTime()})
    task_id = await harness.create(
        node("slow", "first_time", deadline_sec=4, allow_failure=True),
        node("aside", "paced", inline={"pause": 1}),
        node("last", "quick", "aside"),
    )
    assert (await harness.result(task_id)).handled_failures == ["slow"]
    await reset(harness, task_id, "last")
    assert (await harness.result(task_id)).handled_failures == ["slow"]
    assert await harness.statuses(task_id) == {"slow": "failed", "aside": "finished", "last": "finished"}
    assert (await harness.node(task_id, "slow"))["last_error"] == EXCEEDED.format(4)
    client = await harness.client()
    await replay([await client.get_workflow_handle(task_id).fetch_history()])


async def test_deadline_survives_new_runs_of_the_workflow(short_runs: Harness) -> None:
    await short_runs.engine()
    await short_runs.worker()
    task_id = await short_runs.create(
        node("waits", "failing", **LATER, deadline_sec=8, allow_failure=True),
        *chain(30),
        node("last", "paced", "n29", inline={"pause": 9}),
    )
    assert (await short_runs.result(task_id)).handled_failures == ["waits"]
    assert len(await run_ids(short_runs, task_id)) > 1
    entry = await short_runs.node(task_id, "waits")
    assert (entry["last_error"], entry["attempt_epoch"]) == (EXCEEDED.format(8), 1)
    await replay(await histories(short_runs, task_id))
