"""Pausing and resuming a running task on real servers."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowFailureError

from flowkit.errors import ActionRejected
from flowkit.models import TaskStatus
from flowkit.worker import BatchResult
from flowkit.workflows import updates
from flowkit.workflows.task import Task
from tests.integration.handlers import Failing, Quick
from tests.integration.harness import EVENT_TIMEOUT_SEC, Harness, eventually, node, wait_seconds
from tests.integration.test_continue_as_new import chain, histories, replay
from tests.integration.test_large_graphs import run_ids

if TYPE_CHECKING:
    from flowkit.worker import Batch
    from flowkit.worker.context import RunContext

pytestmark = pytest.mark.server

CHAIN = 60
"""Number of nodes that run one after another, until a task with short runs continues in a new one."""


class Gated(Quick):
    """Counts its attempts, and processes its batch when the test opens the gate of the node."""

    role = "gated"

    def __init__(self) -> None:
        self.attempts: list[tuple[str, int]] = []
        self.gates: dict[str, asyncio.Event] = {}

    def gate(self, node_id: str) -> asyncio.Event:
        """Return the event for which a node waits."""
        return self.gates.setdefault(node_id, asyncio.Event())

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait for the gate of the node."""
        self.attempts.append((ctx.node_id, ctx.attempt_epoch))
        await ctx.cancellable(self.gate(ctx.node_id).wait())
        return await super().process_batch(batch, ctx)

    async def until(self, *attempts: tuple[str, int]) -> None:
        """Wait until exactly these attempts have begun."""

        async def look() -> bool:
            return sorted(self.attempts) == sorted(attempts)

        await eventually(look)


async def paused(harness: Harness, task_id: str) -> list[dict[str, Any]]:
    document = await harness.document(task_id)
    return document["coordinator"].get("paused") or []


async def until_drained(harness: Harness, task_id: str) -> None:
    async def look() -> bool:
        scopes = await paused(harness, task_id)
        return bool(scopes) and all(each["drained"] for each in scopes)

    await eventually(look)


async def test_a_paused_task_finishes_what_runs_and_starts_the_rest_after_resume(harness: Harness) -> None:
    gated = Gated()
    engine = await harness.engine()
    await harness.worker({"gated": gated})
    graph = {"nodes": [node("a", "gated"), node("b", "gated", "a"), node("c", "gated")]}
    task_id = await engine.create_task(params={}, graph=graph)
    await gated.until(("a", 1), ("c", 1))
    preview = await engine.preview(task_id, "pause", scopes=["task"])
    result = await engine.pause(task_id, reason="release", by="ada")
    assert result["revision"] == 1
    assert preview == {**result, "revision": 0, "state": preview["state"]}
    assert result["affected"] == [
        {"node_id": "a", "from": "running", "to": "running, then paused"},
        {"node_id": "b", "from": "queued", "to": "paused"},
        {"node_id": "c", "from": "running", "to": "running, then paused"},
    ]
    gated.gate("a").set()
    gated.gate("c").set()
    await until_drained(harness, task_id)
    (scope,) = await paused(harness, task_id)
    assert (scope["scope"], scope["by"], scope["reason"]) == ("task", "ada", "release")
    assert len(gated.attempts) == 2
    with pytest.raises(ActionRejected, match="paused already"):
        await engine.pause(task_id)
    with pytest.raises(ActionRejected, match="the task has revision 1"):
        await engine.resume(task_id, if_revision=0)
    gated.gate("b").set()
    assert (await engine.resume(task_id))["affected"] == [{"node_id": "b", "from": "paused", "to": "queued"}]
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    document = await harness.document(task_id)
    assert [(each["revision"], each["action"]) for each in document["coordinator"]["actions"]] == [
        (1, "pause"),
        (2, "resume"),
    ]
    assert document["coordinator"]["paused"] == []
    with pytest.raises(ActionRejected, match="has ended.*; rerun starts nodes of an ended task again"):
        await engine.pause(task_id)


async def test_interrupted_attempts_run_again_after_resume_without_a_retry(harness: Harness) -> None:
    gated = Gated()
    engine = await harness.engine()
    await harness.worker({"gated": gated})
    graph = {"nodes": [node(name, "gated", retry_policy={"max": 0}) for name in ("a", "b", "c")]}
    task_id = await engine.create_task(params={}, graph=graph)
    await gated.until(("a", 1), ("b", 1), ("c", 1))
    result = await engine.pause(task_id, ["node:a", "node:b"], interrupt=True)
    assert result["affected"] == [{"node_id": name, "from": "running", "to": "paused"} for name in ("a", "b")]
    await until_drained(harness, task_id)
    for name in ("a", "b", "c"):
        gated.gate(name).set()
    await engine.resume(task_id)
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert sorted(gated.attempts) == [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("c", 1)]
    events = (await (await harness.handle(task_id)).fetch_history()).events
    timers = [each for each in events if each.event_type == EventType.EVENT_TYPE_TIMER_STARTED]
    assert len(timers) == 1, "the attempts that one action stops wait together for their cancel flags"


async def test_a_node_that_a_resume_starts_is_paused_before_its_first_step(harness: Harness) -> None:
    """Two updates of one workflow task: the node starts in the first and is paused in the second."""
    gated, engine = Gated(), await harness.engine()
    await harness.worker({"gated": gated})
    task_id = await harness.create(node("long", "gated"), node("a", "gated"), node("b", "gated", "a"))
    await gated.until(("long", 1), ("a", 1))
    await engine.pause(task_id)
    gated.gate("a").set()
    handle = await harness.handle(task_id)

    async def has_noted_the_end() -> bool:
        return bool((await handle.query(Task.status))["nodes"][1]["status"] == "finished")

    await eventually(has_noted_the_end)
    await engine.stop()
    resumed = asyncio.create_task(handle.execute_update("resume", {}, result_type=dict))
    await wait_seconds(0.5)
    interrupt = {"interrupt": True}
    stopped = asyncio.create_task(handle.execute_update("pause", interrupt, result_type=dict))
    await wait_seconds(0.5)
    engine = await harness.engine()
    assert [(await each)["revision"] for each in (resumed, stopped)] == [2, 3]
    await until_drained(harness, task_id)
    gated.gate("long").set()
    gated.gate("b").set()
    await engine.resume(task_id)
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert sorted(gated.attempts) == [("a", 1), ("b", 1), ("long", 1), ("long", 2)]
    await replay(await histories(harness, task_id))


async def test_waits_stand_still_in_a_pause_that_continues_in_a_new_run(short_runs: Harness) -> None:
    gated = Gated()
    engine = await short_runs.engine()
    await short_runs.worker({"gated": gated, "failing": Failing(), "quick": Quick()})
    retry = {"inline": {"failures": 1}, "retry_policy": {"max": 1, "backoff_sec": 2}}
    task_id = await short_runs.create(
        *chain(CHAIN),
        node("a", "gated", deadline_sec=20),
        node("b", "gated", "a"),
        node("r", "failing", **retry),
    )
    await gated.until(("a", 1))
    await short_runs.until_node(task_id, "r", "deferred")
    await engine.pause(task_id, ["node:a", "below:a", "node:r"], interrupt=True, by="ada")
    await until_drained(short_runs, task_id)
    await short_runs.until_node(task_id, f"n{CHAIN - 1}", "finished")
    runs = await run_ids(short_runs, task_id)
    assert len(runs) > 1
    assert [each["scope"] for each in await paused(short_runs, task_id)] == ["node:a", "below:a", "node:r"]
    view = await (await short_runs.handle(task_id)).query(Task.status)
    assert view["revision"] == 1
    assert {each["node_id"]: each.get("waits_for") for each in view["nodes"]}["r"] == "resume"
    gated.gate("a").set()
    gated.gate("b").set()
    await engine.resume(task_id)
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert sorted(gated.attempts) == [("a", 1), ("a", 2), ("b", 1)]
    await replay(await histories(short_runs, task_id))


async def test_a_pause_moves_the_end_of_a_delay_in_seconds_but_not_that_of_a_moment(harness: Harness) -> None:
    engine = await harness.engine()
    until = datetime.now(UTC) + timedelta(seconds=600)
    task_id = await harness.create(
        node("moment", "delay", inline={"until": until.isoformat()}),
        node("span", "delay", inline={"sec": 600}),
    )

    async def ends() -> list[int] | None:
        entries = [await harness.node(task_id, name) for name in ("moment", "span")]
        found = [int(entry.get("next_retry_at_ms") or 0) for entry in entries]
        return found if all(found) else None

    moment, span = await eventually(ends)
    await engine.pause(task_id)
    await until_drained(harness, task_id)
    await engine.resume(task_id)
    moment_after, span_after = await eventually(ends)
    assert moment_after == moment
    assert span_after > span
    await engine.cancel_task(task_id)
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.CANCELLED
    await replay(await histories(harness, task_id))


class Uneven(Quick):
    """Fails the first batch once, and processes the second when the test opens the gate."""

    role = "uneven"

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.failed = False

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Fail, wait, or succeed."""
        if not self.failed:
            self.failed = True
            return BatchResult(success=False, reason_code="busy", error="once")
        await ctx.cancellable(self.gate.wait())
        return await super().process_batch(batch, ctx)


async def test_a_wide_node_is_paused_while_one_of_its_shards_waits_for_a_retry(harness: Harness) -> None:
    uneven = Uneven()
    engine = await harness.engine()
    await harness.worker({"uneven": uneven}, concurrency=4)
    items = {"over": "[1, 2]", "parallel": 2}
    policy = {"max": 3, "backoff_sec": 600}
    task_id = await harness.create(node("wide", "uneven", map=items, retry_policy=policy))

    async def both_began() -> bool:
        rows = await harness.db.node_shards.count_documents({"task_id": task_id})
        return uneven.failed and rows >= 2

    await eventually(both_began)
    await engine.pause(task_id)
    uneven.gate.set()
    await harness.until_node(task_id, "wide", "deferred")
    await until_drained(harness, task_id)
    await engine.resume(task_id)

    async def continues() -> bool:
        return (await harness.node(task_id, "wide")).get("next_retry_at_ms") is not None

    await eventually(continues)
    await engine.skip_node(task_id, "wide")
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    await replay(await histories(harness, task_id))


async def test_a_node_that_waits_for_a_slot_leaves_it_to_others_while_it_is_paused(harness: Harness) -> None:
    harness.settings["max_type_concurrency"] = {"gated": 1}
    gated = Gated()
    engine = await harness.engine()
    await harness.worker({"gated": gated})
    task_id = await harness.create(node("a", "gated"), node("b", "gated"), node("c", "gated"))

    async def first() -> str | None:
        return gated.attempts[0][0] if gated.attempts else None

    holder = await eventually(first)
    paused_node, other = sorted({"a", "b", "c"} - {holder})
    await engine.pause(task_id, [f"node:{paused_node}"])
    gated.gate(holder).set()
    await gated.until((holder, 1), (other, 1))
    gated.gate(other).set()
    await harness.until_node(task_id, other, "finished")
    gated.gate(paused_node).set()
    await engine.resume(task_id)
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert gated.attempts == [(holder, 1), (other, 1), (paused_node, 1)]


async def test_an_inline_attempt_is_interrupted_and_runs_again(harness: Harness) -> None:
    gated = Gated()
    engine = await harness.engine(handlers={"gated": gated})
    task_id = await harness.create(node("a", "gated"))
    await gated.until(("a", 1))
    await engine.pause(task_id, interrupt=True)
    await until_drained(harness, task_id)
    gated.gate("a").set()
    await engine.resume(task_id)
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert gated.attempts == [("a", 1), ("a", 2)]


async def test_a_repeated_update_is_applied_once_and_an_early_one_waits_for_the_task_to_open(
    harness: Harness,
) -> None:
    gated = Gated()
    client = await harness.client()
    await harness.worker({"gated": gated})
    graph = {"nodes": [node("a", "gated")]}
    handle = await client.start_workflow(
        "Task", {"graph": graph}, id=f"early-{harness.queue}", task_queue=harness.queue
    )
    early = asyncio.create_task(
        handle.execute_update("pause", {"reason": "first"}, id="once", result_type=dict)
    )
    engine = await harness.engine()
    assert (await early)["revision"] == 1
    again = await handle.execute_update("pause", {"reason": "first"}, id="once", result_type=dict)
    assert again["revision"] == 1
    results = await asyncio.gather(*(engine.resume(handle.id) for _ in range(10)), return_exceptions=True)
    accepted = [each for each in results if isinstance(each, dict)]
    assert [each["revision"] for each in accepted] == [2]
    assert {str(each) for each in results if not isinstance(each, dict)} == {
        "nothing is paused, so there is nothing to resume; pause a scope first"
    }
    gated.gate("a").set()
    assert await engine.wait(handle.id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED


async def test_a_task_that_is_cancelled_while_it_is_paused_ends(harness: Harness) -> None:
    gated = Gated()
    engine = await harness.engine()
    await harness.worker({"gated": gated})
    task_id = await harness.create(node("a", "gated"), node("b", "gated", "a"))
    await gated.until(("a", 1))
    await engine.pause(task_id, interrupt=True)
    await until_drained(harness, task_id)
    await engine.cancel_task(task_id)
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.CANCELLED
    assert await harness.statuses(task_id) == {"a": "cancelled", "b": "skipped"}


async def test_an_action_that_reaches_a_new_engine_sees_all_earlier_events_and_replays(
    harness: Harness,
) -> None:
    """The ends of two nodes lead to no commands, which is where the SDK divides a history differently in a replay."""
    handler, engine = Gated(), await harness.engine()
    await harness.worker({"gated": handler})
    task_id = await harness.create(*(node(name, "gated") for name in ("long", "first", "second")))

    async def has_noted_the_end(node_id: str) -> bool:
        nodes = (await (await harness.handle(task_id)).query(Task.status))["nodes"]
        return any((each["node_id"], each["status"]) == (node_id, "finished") for each in nodes)

    for name in ("first", "second"):
        handler.gate(name).set()
        await eventually(partial(has_noted_the_end, name))
    await engine.stop()
    engine = await harness.engine()
    result = await engine.pause(task_id, ["node:second", "node:long"])
    assert [(each["node_id"], each["from"]) for each in result["affected"]] == [("long", "running")]
    handler.gate("long").set()
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    await replay(await histories(harness, task_id))


async def test_an_action_follows_the_events_that_a_query_has_brought_to_a_new_engine_and_replays(
    harness: Harness,
) -> None:
    """A query that waits for an engine makes the SDK run the workflow with events of the next workflow task."""
    handler, engine = Gated(), await harness.engine()
    await harness.worker({"gated": handler})
    task_id = await harness.create(node("a", "gated"), node("b", "gated", "a"), node("c", "gated"))
    await handler.until(("a", 1), ("c", 1))
    handle = await harness.handle(task_id)
    assert (await handle.query(Task.status))["status"] == "running"
    await engine.stop()
    asked = asyncio.create_task(handle.query(Task.status))
    await wait_seconds(0.5)
    handler.gate("a").set()

    async def has_noted_the_end() -> bool:
        events = (await handle.fetch_history()).events
        return any(each.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED for each in events)

    await eventually(has_noted_the_end)
    action = asyncio.create_task(handle.execute_update("pause", {"scopes": ["node:c"]}, result_type=dict))
    await wait_seconds(0.5)
    engine = await harness.engine()
    assert (await asked)["status"] == "running"
    assert (await action)["revision"] == 1
    await engine.resume(task_id)
    handler.gate("b").set()
    handler.gate("c").set()
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    await replay(await histories(harness, task_id))


async def test_a_run_with_a_full_history_rejects_actions_until_its_attempts_have_stopped(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "MOST_BYTES", 40_000)
    engine, gated = await harness.engine(), Gated()
    await harness.worker({"gated": gated, "quick": Quick()})
    wanted = [f"partition:{number}" for number in range(40)]
    task_id = await harness.create(node("long", "gated"), node("waits", prerequisites=wanted))
    await gated.until(("long", 1))
    with pytest.raises(ActionRejected, match=r"has a history of 0 MB.*interrupt=true"):
        for name in wanted:
            await engine.satisfy(task_id, name)

    async def has_actions() -> bool:
        return len((await harness.document(task_id))["coordinator"]["actions"]) > 5

    await eventually(has_actions)
    await engine.pause(task_id, interrupt=True)

    async def look() -> bool:
        return len(await run_ids(harness, task_id)) > 1

    await eventually(look)
    await engine.resume(task_id)
    await gated.until(("long", 1), ("long", 2))
    gated.gate("long").set()
    await engine.fail_node(task_id, "waits")
    with pytest.raises(WorkflowFailureError):
        await harness.result(task_id)
    actions = (await harness.document(task_id))["coordinator"]["actions"]
    assert [entry["action"] for entry in actions[-3:]] == ["pause", "resume", "fail_node"]
    assert [entry["revision"] for entry in actions] == [*range(1, len(actions) + 1)]
    await replay(await histories(harness, task_id))
