"""An action that a task has accepted has its effect, whatever the task does meanwhile: it continues as new,
stops, resets."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from temporalio import workflow
from temporalio.client import WorkflowUpdateFailedError
from temporalio.service import RPCError, RPCStatusCode

from flowkit.adapters.tasks.store import TaskStore
from flowkit.models import TaskStatus
from flowkit.models.ownership import MEMO
from flowkit.worker import Batch
from flowkit.workflows import updates
from flowkit.workflows.document import TaskDocument
from flowkit.workflows.node import RunningNodes
from flowkit.workflows.slots import ConcurrencySlots
from tests.integration.handlers import Quick, Relay
from tests.integration.harness import EVENT_TIMEOUT_SEC, Harness, eventually, node
from tests.integration.test_continue_as_new import histories, replay
from tests.integration.test_generations import BROKEN, Fragile, act, puller, until_held
from tests.integration.test_quarantine import Picky

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.models import NodeRecord, RecordTask, ResetNodes, SettleBatches
    from flowkit.worker import BatchResult
    from flowkit.worker.context import RunContext

pytestmark = pytest.mark.server

AWAITS = {
    "nodes": (RunningNodes, "cancel"),
    "slots": (ConcurrencySlots, "flush"),
    "document": (TaskDocument, "flush"),
}
"""What a run awaits while it prepares the next one, besides the handlers of updates."""


def hold_preparation(monkeypatch: pytest.MonkeyPatch, place: str, until_revision: int) -> threading.Event:
    """Let the first run of a task wait at one place of its preparation of the next run, and return an event of that.

    It waits until the task has this revision, so that all actions before arrive in this place.
    """
    owner, name = AWAITS[place]
    original, reached = getattr(owner, name), threading.Event()

    async def held(*given: Any, **more: Any) -> None:
        await original(*given, **more)
        task: Any = workflow.instance()
        if task._nodes.stopping and workflow.info().continued_run_id is None:
            reached.set()
            await workflow.wait_condition(lambda: task._actions._audit.revision >= until_revision)

    monkeypatch.setattr(owner, name, held)
    return reached


def _approval(name: str, *parents: str, **fields: Any) -> dict[str, Any]:
    return node(name, "approval", *parents, allow_failure=True, **fields)


def _aside(name: str) -> dict[str, Any]:
    return {
        **puller(name, "source"),
        "type": "picky",
        "on_batch_failure": {"attempts": 1, "then": "quarantine"},
    }


BEFORE: dict[str, dict[str, Any]] = {
    "decide": {"node_id": "retried", "decision": "approve"},
    "pause": {"scopes": ["node:resumed"]},
}
ACTIONS: dict[str, dict[str, Any]] = {
    "pause": {"scopes": ["node:paused"]},
    "resume": {"scopes": ["node:resumed"]},
    "retry_node": {"node_id": "retried"},
    "skip_node": {"node_id": "skipped"},
    "complete_node": {"node_id": "completed"},
    "fail_node": {"node_id": "failed"},
    "retry_batches": {"node_id": "again"},
    "skip_batches": {"node_id": "without"},
    "decide": {"node_id": "approved", "decision": "approve"},
    "satisfy": {"prerequisite": "data"},
    "change_graph": {"nodes": [_approval("new")]},
}
REJECT = {"node_id": "rejected", "decision": "reject"}
EFFECTS = {
    "retried": "deferred",
    "skipped": "skipped",
    "completed": "finished",
    "failed": "failed",
    "approved": "finished",
    "rejected": "failed",
    "after": "queued",
    "needs": "deferred",
    "resumed": "deferred",
    "paused": "deferred",
    "new": "deferred",
    "again": "finished",
    "without": "finished",
    "again, set aside": 0,
    "without, set aside": 0,
}


async def _started(harness: Harness) -> str:
    """Return a task with a node for each action, of which none runs."""
    waiting = ("paused", "skipped", "completed", "failed", "approved", "rejected", "retried")
    task_id = await harness.create(
        *map(_approval, waiting),
        _approval("resumed", "source"),
        _approval("after", "approved"),
        _approval("needs", prerequisites=["data"]),
        node("source"),
        _aside("again"),
        _aside("without"),
        on_node_failure="continue",
    )
    for name in waiting:
        await harness.until_node(task_id, name, "deferred", epoch=0)
    for name in ("again", "without"):
        await harness.until_node(task_id, name, "finished")
    for name, given in BEFORE.items():
        await act(harness, task_id, name, **given)
    await harness.until_node(task_id, "retried", "finished", epoch=0)
    return task_id


async def _send(handle: Any, update_id: str, name: str, given: dict[str, Any]) -> Any:
    """Send an update, again with the same id if the server could not deliver it while the run has ended."""
    while True:
        try:
            return await handle.execute_update(name, given, id=update_id)
        except RPCError as error:
            if error.status is not RPCStatusCode.FAILED_PRECONDITION:
                raise


@pytest.mark.parametrize("place", AWAITS)
async def test_actions_that_arrive_while_a_run_prepares_the_next_one_have_their_effect(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    picky = Picky()
    picky.broken = {"b0"}
    if place == "slots":
        harness.settings["max_global_running"] = 10
    monkeypatch.setattr(updates, "FULL_UPDATES", len(BEFORE) + 1)
    reached = hold_preparation(monkeypatch, place, len(BEFORE) + 2 + len(ACTIONS))
    await harness.engine()
    await harness.worker({"quick": Quick(), "picky": picky})
    task_id = await _started(harness)
    handle = await harness.handle(task_id)
    first = await handle.describe()
    await act(harness, task_id, "pause", scopes=["node:after"])
    assert await asyncio.to_thread(reached.wait, EVENT_TIMEOUT_SEC)
    picky.broken.clear()
    sent = {f"{place}-{name}": (name, given) for name, given in ACTIONS.items()}
    sent[f"{place}-reject"] = ("decide", REJECT)
    results = await asyncio.gather(*(_send(handle, each, *what) for each, what in sent.items()))

    missing: dict[str, Any] = {}

    async def has_effects() -> bool:
        document = await harness.document(task_id)
        entries = {each["node_id"]: each for each in document["graph"]["nodes"]}
        shown = {name: each["status"] for name, each in entries.items()}
        shown |= {
            f"{name}, set aside": entries[name].get("failed_batches", 0) for name in ("again", "without")
        }
        missing.clear()
        missing.update({name: shown.get(name) for name, each in EFFECTS.items() if shown.get(name) != each})
        return not missing

    try:
        await eventually(has_effects, 30)
    except AssertionError:
        pytest.fail(f"without effect: {missing}")
    latest = await handle.describe()
    assert latest.run_id != first.run_id
    assert await latest.memo_value(MEMO) == await first.memo_value(MEMO)
    repeated = await asyncio.gather(*(_send(handle, each, *what) for each, what in sent.items()))
    assert repeated == results
    view = await handle.query("status", result_type=dict)
    assert {each.split()[0] for each in view["paused"]} == {"node:after", "node:paused"}
    await harness.coordinator.cancel_task(task_id)
    await harness.until_status(task_id, "cancelled")


async def test_a_held_node_keeps_its_error_if_the_task_fails_while_a_run_prepares_the_next_one(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "FULL_UPDATES", 1)
    reached = hold_preparation(monkeypatch, "document", 2)
    await harness.engine({"fragile": Fragile()})
    task_id = await harness.create(
        node("held", "fragile", inline=BROKEN, hold_on_failure=True, hold_sec=600.0),
        _approval("other"),
        node("asked", "approval"),
        on_node_failure="finish_running",
    )
    await until_held(harness, task_id, "held")
    await act(harness, task_id, "pause", scopes=["node:other"])
    assert await asyncio.to_thread(reached.wait, EVENT_TIMEOUT_SEC)
    await act(harness, task_id, "decide", node_id="asked", decision="reject")
    assert await harness.coordinator.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FAILED
    assert (await harness.node(task_id, "held"))["reason_code"] == "broken"


class HeldResets:
    """Lets the resets of nodes wait until the test releases them, by node id."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *node_ids: str) -> None:
        self.gates, write = {name: threading.Event() for name in node_ids}, TaskStore.reset_nodes

        async def held(store: TaskStore, record: ResetNodes, artifacts: ArtifactStore) -> list[int]:
            await asyncio.to_thread(self.gates[record.nodes[0].node_id].wait, EVENT_TIMEOUT_SEC)
            return await write(store, record, artifacts)

        monkeypatch.setattr(TaskStore, "reset_nodes", held)

    def release(self, *node_ids: str) -> None:
        """Let the resets of these nodes continue, or all."""
        for name in node_ids or self.gates:
            self.gates[name].set()


@pytest.mark.parametrize("ends", [TaskStatus.FAILED, TaskStatus.CANCELLED])
async def test_nodes_end_as_persons_have_decided_although_the_task_stops_meanwhile(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, ends: TaskStatus
) -> None:
    held = HeldResets(monkeypatch, "first", "failed", "completed", "skipped")
    engine = await harness.engine()
    task_id = await harness.create(*(node(name, "approval") for name in held.gates))
    await harness.until_node(task_id, "skipped", "deferred", epoch=0)
    for name in ("first", "failed"):
        await act(harness, task_id, "fail_node", node_id=name, reason="as agreed")
    await act(harness, task_id, "complete_node", node_id="completed", metrics={"total": 7})
    await act(harness, task_id, "skip_node", node_id="skipped")
    handle = await harness.handle(task_id)
    if ends is TaskStatus.CANCELLED:
        await engine.cancel_task(task_id)
        held.release()
    else:
        held.release("first")

        async def has_failed() -> bool:
            view = await handle.query("status", result_type=dict)
            return bool(view["nodes"][0]["status"] == "failed")

        await eventually(has_failed)
        held.release()
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is ends
    assert await harness.statuses(task_id) == {
        "first": "failed",
        "failed": "failed",
        "completed": "finished",
        "skipped": "skipped",
    }
    assert (await harness.node(task_id, "skipped"))["skip_reason"] == "user"
    assert (await harness.node(task_id, "failed"))["last_error"] == "failed_by_user: failed: as agreed"
    marker: Any = await harness.db.artifacts.find_one({"node_id": "completed", "status": "complete"})
    assert marker["meta"] == {"total": 7}
    await replay(await histories(harness, task_id))


async def test_a_node_does_not_start_again_while_its_batches_are_skipped(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, reached, settle = threading.Event(), threading.Event(), TaskStore.settle_batches

    async def held(store: TaskStore, record: SettleBatches, artifacts: ArtifactStore) -> int:
        reached.set()
        await asyncio.to_thread(gate.wait, EVENT_TIMEOUT_SEC)
        return await settle(store, record, artifacts)

    monkeypatch.setattr(TaskStore, "settle_batches", held)
    handler = Picky()
    handler.broken = {"b1"}
    await harness.engine()
    await harness.worker({"quick": Quick(), "picky": handler})
    source = node("source", inline={"batches": 2})
    task_id = await harness.create(source, _aside("aside"), _approval("open"))
    await harness.until_node(task_id, "aside", "finished")
    handle = await harness.handle(task_id)

    async def known() -> bool:
        return bool((await handle.query("status", result_type=dict))["nodes"][1]["status"] == "finished")

    await eventually(known)
    skip = asyncio.create_task(act(harness, task_id, "skip_batches", node_id="aside"))
    await asyncio.to_thread(reached.wait, EVENT_TIMEOUT_SEC)
    for name, about in (("retry_node", "aside"), ("retry_node", "source"), ("skip_node", "aside")):
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await act(harness, task_id, name, node_id=about)
        assert "an earlier action resets" in str(refused.value.cause)
    gate.set()
    await skip
    assert (await harness.node(task_id, "aside"))["failed_batches"] == 0
    await act(harness, task_id, "retry_node", node_id="aside")
    await act(harness, task_id, "decide", node_id="open", decision="approve")
    assert (await harness.result(task_id)).failed_batches == {"aside": 1}
    await replay(await histories(harness, task_id))


async def test_a_stop_waits_only_for_the_grace_until_a_decision_replaces_an_attempt(harness: Harness) -> None:
    harness.settings["cancel_grace_sec"] = 1
    engine = await harness.engine()
    harness.worker_process("Stubborn")
    task_id = await harness.create(node("a", "stubborn", inline={"pause": 20}))
    await harness.until_node(task_id, "a", "running")
    await act(harness, task_id, "fail_node", node_id="a", interrupt=True)
    await engine.cancel_task(task_id)
    assert await engine.wait(task_id, 15) is TaskStatus.CANCELLED
    entry = await harness.node(task_id, "a")
    assert (entry["status"], entry["reason_code"]) == ("failed", "failed_by_user")


class Generations(Quick):
    """Names its batches by their generation. The first one of the first generation ignores cancels, and waits."""

    role = "generations"

    def __init__(self) -> None:
        self.waits, self.go_on = asyncio.Event(), asyncio.Event()
        self._attempts = 0

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield two batches."""
        self._attempts += 1
        for number in range(2):
            yield Batch(batch_uid=f"{self._attempts}-{number}", payload={"number": number})

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return one metrics row. In the first generation, wait before."""
        if batch.batch_uid == "1-0":
            self.waits.set()
            await self.go_on.wait()
        elif ctx.generation == 0:
            await ctx.cancellable(asyncio.Event().wait())
        return await super().process_batch(batch, ctx)


async def test_a_node_does_not_start_on_a_batch_of_an_attempt_that_an_action_stops(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, record, done = Generations(), TaskStore.record, threading.Event()

    async def slow(store: TaskStore, given: RecordTask) -> list[NodeRecord]:
        if given.actions.applied:
            await asyncio.to_thread(done.wait, EVENT_TIMEOUT_SEC)
        return await record(store, given)

    monkeypatch.setattr(TaskStore, "record", slow)
    engine = await harness.engine()
    await harness.worker({"quick": Quick(), "generations": source, "relay": Relay()})
    child = puller("c", "s")
    child["io"]["start_when"] = "first_batch"
    task_id = await harness.create(node("p"), node("s", "generations", "p"), child)
    await source.waits.wait()
    await act(harness, task_id, "retry_node", node_id="p", interrupt=True)
    source.go_on.set()
    await harness.until_batches(task_id, "s", 1)
    done.set()
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert {row["batch_uid"] for row in await harness.rows(task_id, "c")} == {"2-0", "2-1"}
    assert (await harness.node(task_id, "c"))["attempt_epoch"] == 1
    await replay(await histories(harness, task_id))


class Attempts(Generations):
    """Names its batches by their attempt, and waits for nothing."""

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return one metrics row."""
        return await Quick.process_batch(self, batch, ctx)


async def test_a_node_does_not_start_on_what_a_source_has_stored_that_is_being_reset(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, reached, reset = threading.Event(), threading.Event(), TaskStore.reset_nodes

    async def held(store: TaskStore, record: ResetNodes, artifacts: ArtifactStore) -> list[int]:
        reached.set()
        await asyncio.to_thread(gate.wait, EVENT_TIMEOUT_SEC)
        return await reset(store, record, artifacts)

    monkeypatch.setattr(TaskStore, "reset_nodes", held)
    engine = await harness.engine()
    await harness.worker({"generations": Attempts(), "relay": Relay()})
    reader = {**puller("c", "s"), "depends_on": [], "prerequisites": ["go"]}
    task_id = await harness.create(node("s", "generations"), reader)
    await harness.until_node(task_id, "s", "finished")
    await act(harness, task_id, "retry_node", node_id="s")
    await asyncio.to_thread(reached.wait, EVENT_TIMEOUT_SEC)
    await act(harness, task_id, "satisfy", prerequisite="go")
    assert (await harness.node(task_id, "c"))["status"] == "queued"
    gate.set()
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert {row["batch_uid"] for row in await harness.rows(task_id, "c")} == {"2-0", "2-1"}
    await replay(await histories(harness, task_id))
