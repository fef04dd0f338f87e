"""Retrying, skipping, completing and failing nodes of a running task, approvals, prerequisites and delays."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.adapters.tasks.record import Recording
from flowkit.errors import ActionRejected
from flowkit.models import NodeRecord, RecordTask, TaskStatus
from flowkit.worker import BatchResult
from tests.integration.handlers import Quick, Relay
from tests.integration.harness import EVENT_TIMEOUT_SEC, Harness, eventually, node
from tests.integration.test_continue_as_new import chain, histories, replay
from tests.integration.test_large_graphs import run_ids
from tests.integration.test_pause import CHAIN, Gated

if TYPE_CHECKING:
    from flowkit.worker import Batch
    from flowkit.worker.context import RunContext

pytestmark = pytest.mark.server


class Fragile(Quick):
    """Fails permanently while its input says `broken`, after it has stored its first batch."""

    role = "fragile"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Fail in the second batch."""
        if batch.payload.get("broken") and batch.payload["number"] == 1:
            return BatchResult(success=False, reason_code="broken", error="no data", permanent=True)
        return await super().process_batch(batch, ctx)


BROKEN = {"batches": 3, "broken": True}


def puller(node_id: str, source: str, **fields: Any) -> dict[str, Any]:
    inline = {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": [source], "poll_ms": 50}}
    return node(node_id, "relay", source, inline=inline, **fields)


async def act(harness: Harness, task_id: str, name: str, **given: Any) -> dict[str, Any]:
    """Send an action as Temporal's own command does."""
    handle = await harness.handle(task_id)
    result: dict[str, Any] = await handle.execute_update(name, given, result_type=dict)
    return result


async def until_held(harness: Harness, task_id: str, node_id: str, epoch: int = 1) -> dict[str, Any]:
    """Wait until the document shows a node as held, and return its entry."""

    async def look() -> dict[str, Any] | None:
        entry = await harness.node(task_id, node_id)
        waits = entry.get("wait_kind") == "decision"
        return entry if waits and entry["status"] == "deferred" and entry["attempt_epoch"] >= epoch else None

    return await eventually(look)


async def test_a_held_node_is_retried_with_changed_input_while_its_sibling_runs(harness: Harness) -> None:
    gated = Gated()
    engine = await harness.engine()
    await harness.worker({"fragile": Fragile(), "gated": gated, "relay": Relay()})
    task_id = await harness.create(
        node("a", "fragile", inline=BROKEN, hold_on_failure=True), puller("b", "a"), node("side", "gated")
    )
    entry = await until_held(harness, task_id, "a")
    assert entry["waits_for"] == "a decision: failed with broken"
    hold_ms = entry["held_until_ms"] - entry["waits_since_ms"]
    assert hold_ms == pytest.approx(7 * 86_400_000, abs=2)
    assert [each.task_id for each in await engine.list_tasks(waits="decision")] == [task_id]
    await gated.until(("side", 1))
    preview = await engine.preview(task_id, "retry_node", node_id="a")
    assert preview["affected"] == [{"node_id": "a", "from": "held", "to": "queued"}]
    result = await act(harness, task_id, "retry_node", node_id="a", input_inline={"broken": False}, by="ada")
    assert (result["revision"], result["notes"]) == (1, ["variables keep their values"])
    await harness.until_node(task_id, "b", "finished")
    entry = await harness.node(task_id, "a")
    assert (entry["generation"], entry["first_epoch"], entry["attempt_epoch"]) == (1, 2, 3)
    assert entry["io"]["input_inline"]["broken"] is False
    assert {row["attempt_epoch"] for row in await harness.rows(task_id, "a")} == {3}
    assert len(await harness.rows(task_id, "b")) == 3
    assert gated.attempts == [("side", 1)]
    gated.gate("side").set()
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    await replay(await histories(harness, task_id))


async def test_a_hold_that_no_person_ends_fails_the_node(harness: Harness) -> None:
    engine = await harness.engine()
    await harness.worker({"fragile": Fragile()})
    task_id = await harness.create(node("a", "fragile", inline=BROKEN, hold_on_failure=True, hold_sec=1.0))
    await until_held(harness, task_id, "a")
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FAILED
    entry = await harness.node(task_id, "a")
    assert (entry["status"], entry["reason_code"]) == ("failed", "broken")
    assert not {"waits_for", "wait_kind", "waits_since_ms", "held_until_ms"} & entry.keys()


async def test_finish_running_waits_for_running_attempts_and_not_for_people_and_times(
    harness: Harness,
) -> None:
    gated = Gated()
    engine = await harness.engine()
    await harness.worker({"fragile": Fragile(), "gated": gated})
    graph = {
        "nodes": [
            node("held", "fragile", inline=BROKEN, hold_on_failure=True),
            node("ask", "approval"),
            node("later", "delay", inline={"sec": 2_592_000}),
            node("a", "gated"),
            node("b", "fragile", "a", inline=BROKEN),
            node("runs", "gated"),
        ],
        "on_node_failure": "finish_running",
    }
    task_id = await engine.create_task(params={}, graph=graph)
    await until_held(harness, task_id, "held")
    await gated.until(("a", 1), ("runs", 1))
    gated.gate("a").set()
    await harness.until_node(task_id, "b", "failed")
    assert (await harness.until_node(task_id, "held", "failed"))["reason_code"] == "broken"
    assert (await harness.document(task_id))["status"] == "running"
    gated.gate("runs").set()
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FAILED
    document = await harness.document(task_id)
    ends = {
        entry["node_id"]: (entry["status"], entry.get("skip_reason")) for entry in document["graph"]["nodes"]
    }
    skipped = ("skipped", "task_failed")
    assert (ends["ask"], ends["later"], ends["runs"]) == (skipped, skipped, ("finished", None))


@pytest.mark.parametrize(
    ("action", "given", "statuses", "ends"),
    [
        ("skip_node", {}, {"a": "skipped", "b": "finished", "c": "finished"}, TaskStatus.FINISHED),
        ("fail_node", {"reason": "no"}, {"a": "failed", "b": "skipped", "c": "skipped"}, TaskStatus.FAILED),
        ("complete_node", {}, {"a": "finished", "b": "finished", "c": "finished"}, TaskStatus.FINISHED),
    ],
)
async def test_a_decision_ends_a_held_node(
    harness: Harness, action: str, given: dict[str, Any], statuses: dict[str, str], ends: TaskStatus
) -> None:
    engine = await harness.engine()
    await harness.worker({"fragile": Fragile(), "quick": Quick(), "relay": Relay()})
    task_id = await harness.create(
        node("a", "fragile", inline=BROKEN, hold_on_failure=True),
        node("o", "quick"),
        puller("b", "a", fan_in="all_done" if action == "skip_node" else "all"),
        node("c", "quick", "a", "o"),
    )
    await until_held(harness, task_id, "a")
    if action == "complete_node":
        given = {"metrics": {"total": 7}, "batches": [{"batch_uid": "x", "metrics": {"number": 5}}]}
    await act(harness, task_id, action, node_id="a", **given)
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is ends
    found = await harness.statuses(task_id)
    assert {name: found[name] for name in statuses} == statuses
    if action == "complete_node":
        assert [row["batch_uid"] for row in await harness.rows(task_id, "b")] == ["x"]
        marker: Any = await harness.db.artifacts.find_one({"node_id": "a", "status": "complete"})
        assert marker["meta"] == {"total": 7}
    await replay(await histories(harness, task_id))


async def test_a_finished_node_starts_again_with_its_descendants_and_an_interrupt(harness: Harness) -> None:
    gated = Gated()
    engine = await harness.engine()
    await harness.worker({"gated": gated, "quick": Quick(), "relay": Relay()})
    task_id = await harness.create(
        node("a", "quick", inline={"batches": 2}),
        puller("b", "a"),
        node("c", "gated", "b"),
        node("count", "coordinator_fn", "b", io={"fn": "vars.incr", "fn_args": {"key": "n"}}),
        node("end", "quick", "c", "count"),
    )
    await gated.until(("c", 1))
    await harness.until_node(task_id, "count", "finished")
    with pytest.raises(ActionRejected, match=r"c (depends|and count depend) on node 'a' and run"):
        await engine.preview(task_id, "retry_node", node_id="a")
    result = await act(harness, task_id, "retry_node", node_id="a", interrupt=True)
    assert [each["node_id"] for each in result["affected"]] == ["a", "b", "c", "count"]
    await gated.until(("c", 1), ("c", 3))
    gated.gate("c").set()
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    document = await harness.document(task_id)
    assert document["coordinator"]["vars"] == {"n": 2}
    assert {each["node_id"]: each.get("generation", 0) for each in document["graph"]["nodes"]} == {
        "a": 1,
        "b": 1,
        "c": 1,
        "count": 1,
        "end": 0,
    }
    assert len(await harness.rows(task_id, "b")) == 2
    await replay(await histories(harness, task_id))


class Flaky(Relay):
    """Fails in its first attempt once it has stored a batch."""

    role = "flaky"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Fail, or return one metrics row."""
        if ctx.attempt_epoch == 1 and ctx.kv.get("seen"):
            return BatchResult(success=False, reason_code="flaky", error="not yet")
        return await super().process_batch(batch, ctx)


@pytest.mark.parametrize("paused", [False, True])
async def test_a_retry_in_the_backoff_starts_the_next_attempt_now_in_the_same_generation(
    harness: Harness, *, paused: bool
) -> None:
    engine = await harness.engine()
    await harness.worker({"quick": Quick(), "flaky": Flaky(), "relay": Relay()})
    follower = puller("b", "a")
    follower["io"]["start_when"] = "first_batch"
    policy = {"max": 1, "backoff_sec": 3600}
    flaky = puller("a", "source", retry_policy=policy) | {"type": "flaky"}
    task_id = await harness.create(node("source", inline={"batches": 3}), flaky, follower)
    await harness.until_node(task_id, "a", "deferred")
    await harness.until_node(task_id, "b", "running")
    if paused:
        await engine.pause(task_id, ["node:a"])
    result = await engine.retry_node(task_id, "a")
    to = "paused" if paused else "deferred, due now"
    assert result["affected"] == [{"node_id": "a", "from": "deferred", "to": to}]
    if paused:
        await engine.resume(task_id)
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    entry = await harness.node(task_id, "a")
    assert (entry.get("generation", 0), entry["attempt_epoch"]) == (0, 2)
    assert sorted(row["attempt_epoch"] for row in await harness.rows(task_id, "a")) == [1, 2, 2]
    assert (await harness.node(task_id, "b"))["attempt_epoch"] == 1
    await replay(await histories(harness, task_id))


async def test_a_running_node_is_restarted_with_another_input(harness: Harness) -> None:
    gated = Gated()
    engine = await harness.engine()
    await harness.worker({"gated": gated})
    task_id = await harness.create(node("a", "gated", inline={"limit": 1}))
    await gated.until(("a", 1))
    with pytest.raises(ActionRejected, match="node 'a' is running; retry_node with interrupt=true stops"):
        await engine.retry_node(task_id, "a", input_inline={"limit": 2})
    await engine.retry_node(task_id, "a", input_inline={"limit": 2}, interrupt=True)
    await gated.until(("a", 1), ("a", 3))
    gated.gate("a").set()
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    entry = await harness.node(task_id, "a")
    assert (entry["generation"], entry["io"]["input_inline"]) == (1, {"limit": 2})
    await replay(await histories(harness, task_id))


@pytest.mark.slow
async def test_holds_and_generations_survive_a_new_run(short_runs: Harness) -> None:
    engine = await short_runs.engine()
    await short_runs.worker({"fragile": Fragile(), "quick": Quick(), "relay": Relay()})
    task_id = await short_runs.create(
        node("x", "quick"),
        node("a", "fragile", inline=BROKEN, hold_on_failure=True),
        puller("b", "a"),
        *chain(CHAIN),
    )
    await until_held(short_runs, task_id, "a")
    await act(short_runs, task_id, "retry_node", node_id="a")
    await until_held(short_runs, task_id, "a", epoch=3)
    await short_runs.until_node(task_id, f"n{CHAIN - 1}", "finished")
    assert len(await run_ids(short_runs, task_id)) > 1
    await act(short_runs, task_id, "retry_node", node_id="a", input_inline={"broken": False})
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    entry = await short_runs.node(task_id, "a")
    assert (entry["generation"], entry["attempt_epoch"]) == (2, 5)
    assert {row["attempt_epoch"] for row in await short_runs.rows(task_id, "a")} == {5}
    await replay(await histories(short_runs, task_id))


@pytest.mark.parametrize("decision", ["approve", "reject"])
async def test_an_approval_waits_for_its_decision(harness: Harness, decision: str) -> None:
    engine = await harness.engine()
    await harness.worker({"quick": Quick()})
    approval = node("ok", "approval", "a", inline={"text": "publish?"})
    approval["routing"] = {"on_failure": ["undo"]}
    task_id = await harness.create(
        node("a", "quick"), approval, node("publish", "quick", "ok"), node("undo", "quick")
    )
    waiting = await harness.until_node(task_id, "ok", "deferred", epoch=0)
    assert (waiting["wait_kind"], waiting["waits_since_ms"] > 0) == ("decision", True)
    assert [each.task_id for each in await engine.list_tasks(waits="decision")] == [task_id]
    await act(harness, task_id, "decide", node_id="ok", decision=decision, comment="as agreed", by="ada")
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    approved = decision == "approve"
    assert await harness.statuses(task_id) == {
        "a": "finished",
        "ok": "finished" if approved else "failed",
        "publish": "finished" if approved else "skipped",
        "undo": "skipped" if approved else "finished",
    }
    if not approved:
        assert (await harness.node(task_id, "ok"))["last_error"] == "rejected: rejected by ada: as agreed"


async def test_a_deadline_decides_an_approval_by_its_default(harness: Harness) -> None:
    engine = await harness.engine()
    task_id = await harness.create(
        node("yes", "approval", inline={"default": "approve"}, deadline_sec=1),
        node("no", "approval", deadline_sec=1, allow_failure=True),
    )
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert await harness.statuses(task_id) == {"yes": "finished", "no": "failed"}


async def test_prerequisites_and_delays_hold_nodes(harness: Harness) -> None:
    engine = await harness.engine()
    await harness.worker({"quick": Quick()})
    task_id = await harness.create(
        node("a", "quick", prerequisites=["data:eu", "data:us"]),
        node("wait", "delay", "a", inline={"sec": 1}),
        node("b", "quick", "wait", prerequisites=["late"]),
    )
    await _until_waits(harness, task_id, a="the prerequisites data:eu and data:us", b="the prerequisite late")
    since = [(await harness.node(task_id, name))["waits_since_ms"] for name in ("a", "b")]
    assert [each.task_id for each in await engine.list_tasks(waits="event")] == [task_id]
    await act(harness, task_id, "satisfy", prerequisite="late")
    await act(harness, task_id, "satisfy", prerequisite="data:eu")
    await _until_waits(harness, task_id, a="the prerequisite data:us", b=None)
    waiting = await harness.node(task_id, "a")
    assert (waiting["wait_kind"], waiting["waits_since_ms"]) == ("event", since[0])
    assert (await harness.statuses(task_id))["a"] == "queued"
    await act(harness, task_id, "satisfy", prerequisite="data:us")
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert set((await harness.statuses(task_id)).values()) == {"finished"}
    await _until_waits(harness, task_id, a=None, b=None)


async def _until_waits(harness: Harness, task_id: str, **waits: str | None) -> None:
    """Wait until the task document shows what these nodes wait for."""

    async def look() -> bool:
        return {name: (await harness.node(task_id, name)).get("waits_for") for name in waits} == waits

    await eventually(look)


async def test_a_rerun_starts_what_failed_and_keeps_the_rest(harness: Harness) -> None:
    engine = await harness.engine()
    await harness.worker({"fragile": Fragile(), "quick": Quick(), "relay": Relay()})
    count = {"fn": "vars.incr", "fn_args": {"key": "n"}}
    task_id = await harness.create(
        node("first", "quick"),
        node("count", "coordinator_fn", "first", io=count),
        node("a", "fragile", "count", inline=BROKEN),
        puller("b", "a"),
    )
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FAILED
    before = await harness.document(task_id)
    planned = await engine.rerun(task_id, inputs={"a": {"broken": False}}, dry_run=True)
    assert [(each["node_id"], each["from"]) for each in planned["affected"]] == [
        ("a", "failed"),
        ("b", "skipped"),
    ]
    started = await asyncio.gather(
        *(engine.rerun(task_id, inputs={"a": {"broken": False}}, by="ada") for _ in range(2)),
        return_exceptions=True,
    )
    assert [each["run_seq"] for each in started if isinstance(each, dict)] == [2]
    (refused,) = (str(each) for each in started if isinstance(each, ActionRejected))
    assert refused in {  # the second text, if it looks at the task after the other has started it
        f"task {task_id!r} runs already; another rerun has started it",
        f"task {task_id!r} has not ended; retry_node starts a node of an open task again",
    }
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    document = await harness.document(task_id)
    assert (document["run_seq"], document["coordinator"]["vars"]) == (2, {"n": 1})
    assert [each["action"] for each in document["coordinator"]["actions"]] == ["rerun"]
    entries = {each["node_id"]: each for each in document["graph"]["nodes"]}
    assert [entries[name].get("generation", 0) for name in ("first", "count", "a", "b")] == [0, 0, 1, 1]
    assert entries["first"]["finished_at"] == before["graph"]["nodes"][0]["finished_at"]
    assert (entries["a"]["attempt_epoch"], len(await harness.rows(task_id, "b"))) == (3, 3)
    with pytest.raises(ActionRejected, match="all nodes have finished"):
        await engine.rerun(task_id)
    await engine.rerun(task_id, ["count"])
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    document = await harness.document(task_id)
    assert document["coordinator"]["vars"] == {"n": 2}
    assert [each["action"] for each in document["coordinator"]["actions"]] == ["rerun", "rerun"]
    await replay(await histories(harness, task_id))


async def _failed(harness: Harness, engine: Any) -> str:
    """Return a task that has failed in its first node."""
    task_id = await harness.create(node("a", "unknown", deadline_sec=0.2), node("c", "quick"))
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FAILED
    return task_id


class Deaf(Quick):
    """Ignores every cancellation until the test releases it."""

    role = "deaf"

    def __init__(self) -> None:
        self.release = asyncio.Event()

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait for the release."""
        while not self.release.is_set():
            with suppress(asyncio.CancelledError):
                await self.release.wait()
        return await super().process_batch(batch, ctx)


async def test_a_failed_status_comes_with_its_reason_and_a_rerun_waits_for_the_end(harness: Harness) -> None:
    harness.settings["cancel_grace_sec"] = 30
    gated, deaf = Gated(), Deaf()
    engine = await harness.engine()
    await harness.worker({"fragile": Fragile(), "gated": gated, "deaf": deaf}, concurrency=4)
    task_id = await harness.create(
        node("a", "gated"), node("b", "fragile", "a", inline=BROKEN), node("c", "deaf")
    )
    await harness.until_node(task_id, "c", "running")
    gated.gate("a").set()

    async def failed() -> dict[str, Any] | None:
        document = await harness.document(task_id)
        return document if document["status"] == "failed" else None

    document = await eventually(failed)
    reason = "node 'b' failed: broken: no data"
    assert document["reason"].startswith(reason)
    assert document["finished_at"] is None
    assert (await (await harness.handle(task_id)).query("status"))["reason"] == document["reason"]
    rerun = asyncio.create_task(engine.rerun(task_id, inputs={"b": {"broken": False}}))
    deaf.release.set()
    assert (await rerun)["run_seq"] == 2
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert (await harness.document(task_id))["reason"] is None


async def test_no_write_shows_a_final_status_before_the_close_of_the_task(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[RecordTask] = []
    write = Recording.write

    async def note(self: Recording, record: RecordTask) -> list[NodeRecord]:
        written.append(record)
        return await write(self, record)

    monkeypatch.setattr(Recording, "write", note)
    engine = await harness.engine()
    await harness.worker({"fragile": Fragile()})
    graph = {
        "on_node_failure": "continue",
        "nodes": [node("a", "fragile", inline=BROKEN), node("b", "fragile", "a"), node("c", "fragile", "b")],
    }
    task_id = await engine.create_task(params={}, graph=graph)
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FAILED
    assert written
    assert not [each for each in written if each.status.closed]


async def test_a_rerun_that_leaves_stopped_nodes_fails_and_names_them(harness: Harness) -> None:
    gated = Gated()
    engine = await harness.engine()
    await harness.worker({"gated": gated, "quick": Quick()})
    task_id = await harness.create(node("a", "quick"), node("b", "gated"), node("c", "quick", "b"))
    await harness.until_node(task_id, "a", "finished")
    await gated.until(("b", 1))
    await engine.cancel_task(task_id)
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.CANCELLED
    await engine.rerun(task_id, ["a"])
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FAILED
    with pytest.raises(ActionRejected, match="node 'a' has failed, and its failure would stop the new run"):
        await engine.rerun(await _failed(harness, engine), ["c"])
    reason = "an earlier run was stopped before these nodes ended: b and c; run them again, too"
    assert (await harness.document(task_id))["reason"] == reason
    gated.gate("b").set()
    await engine.rerun(task_id)
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED


async def test_a_node_that_an_operator_has_failed_runs_again_in_a_rerun(harness: Harness) -> None:
    engine = await harness.engine()
    await harness.worker({"fragile": Fragile(), "quick": Quick()})
    task_id = await harness.create(
        node("a", "fragile", inline=BROKEN), node("b", "quick", "a"), on_node_failure="hold"
    )
    await until_held(harness, task_id, "a")
    await act(harness, task_id, "fail_node", node_id="a")
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FAILED
    await engine.rerun(task_id, inputs={"a": {"broken": False}})
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED


async def test_of_ten_retries_at_once_one_is_applied_and_a_repeated_one_counts_once(harness: Harness) -> None:
    engine = await harness.engine()
    await harness.worker({"fragile": Fragile()})
    task_id = await harness.create(node("a", "fragile", inline=BROKEN, hold_on_failure=True))
    await until_held(harness, task_id, "a")
    results = await asyncio.gather(
        *(engine.retry_node(task_id, "a") for _ in range(10)), return_exceptions=True
    )
    assert [each["revision"] for each in results if isinstance(each, dict)] == [1]
    assert all("node 'a'" in str(each) for each in results if not isinstance(each, dict))
    await until_held(harness, task_id, "a", epoch=3)
    handle, given = await harness.handle(task_id), {"node_id": "a", "input_inline": {"broken": False}}
    for _ in range(2):
        result = await handle.execute_update("retry_node", given, id="once", result_type=dict)
        assert result["revision"] == 2
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert (await harness.document(task_id))["coordinator"]["revision"] == 2


async def test_a_task_that_stops_during_a_reset_ends_and_accepts_no_action(harness: Harness) -> None:
    gated = Gated()
    engine = await harness.engine()
    await harness.worker({"gated": gated, "quick": Quick()})
    task_id = await harness.create(node("a", "quick"), node("c", "gated", "a"))
    await gated.until(("c", 1))
    await engine.retry_node(task_id, "a", interrupt=True)
    await engine.cancel_task(task_id)
    with pytest.raises(ActionRejected, match="is ending|has ended"):
        await engine.retry_node(task_id, "a")
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.CANCELLED
    statuses = set((await harness.statuses(task_id)).values())
    assert statuses <= {"cancelled", "skipped", "finished"}
    await replay(await histories(harness, task_id))
