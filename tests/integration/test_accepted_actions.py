"""An action that a task has accepted has its effect, whatever the task does meanwhile: it continues as new, stops, resets."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from temporalio import workflow

from flowkit.workflows import updates
from flowkit.workflows.document import TaskDocument
from flowkit.workflows.node import RunningNodes
from flowkit.workflows.slots import ConcurrencySlots
from tests.integration.handlers import Quick
from tests.integration.harness import Harness, eventually, node
from tests.integration.test_generations import act, puller
from tests.integration.test_large_graphs import run_ids
from tests.integration.test_quarantine import Picky

pytestmark = pytest.mark.server

AWAITS = {
    "nodes": (RunningNodes, "cancel"),
    "slots": (ConcurrencySlots, "flush"),
    "document": (TaskDocument, "flush"),
}
"""What a run awaits while it prepares the next one, besides the handlers of updates."""


class Preparation:
    """Lets a run that prepares the next one wait at one place, until it has accepted all `actions` but the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: str, actions: int) -> None:
        self._monkeypatch, self._actions = monkeypatch, actions
        self.reached = threading.Event()
        self._applied = 0
        self._waits = False
        owner, name = AWAITS[place]
        self._patch_prepare_cancel()
        self._patch_audit()
        original = getattr(owner, name)

        async def held(*given: Any, **more: Any) -> None:
            await original(*given, **more)
            if self._waits:
                self._waits = False
                self.reached.set()
                await workflow.wait_condition(lambda: self._applied >= self._actions)

        monkeypatch.setattr(owner, name, held)

    def begin(self) -> None:
        """Let the next action make the run full."""
        self._monkeypatch.setattr(updates, "FULL_UPDATES", 1)

    def _patch_prepare_cancel(self) -> None:
        original = RunningNodes.prepare_cancel

        def prepare(nodes: RunningNodes) -> None:
            original(nodes)
            self._waits = not self.reached.is_set()
            self._monkeypatch.setattr(updates, "FULL_UPDATES", 1_500)

        self._monkeypatch.setattr(RunningNodes, "prepare_cancel", prepare)

    def _patch_audit(self) -> None:
        original = updates.TaskActions._take_effect

        def apply(*given: Any) -> None:
            self._applied += 1
            original(*given)

        self._monkeypatch.setattr(updates.TaskActions, "_take_effect", apply)


def _approval(name: str, *parents: str, **fields: Any) -> dict[str, Any]:
    return node(name, "approval", *parents, allow_failure=True, **fields)


def _aside(name: str) -> dict[str, Any]:
    return {
        **puller(name, "source"),
        "type": "picky",
        "on_batch_failure": {"attempts": 1, "then": "quarantine"},
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
    "after": "deferred",
    "needs": "deferred",
    "resumed": "deferred",
    "paused": "deferred",
    "new": "deferred",
    "again": "finished",
    "without": "finished",
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
    await act(harness, task_id, "decide", node_id="retried", decision="approve")
    await act(harness, task_id, "pause", scopes=["node:resumed"])
    await harness.until_node(task_id, "retried", "finished", epoch=0)
    return task_id


@pytest.mark.parametrize("place", AWAITS)
async def test_actions_that_arrive_while_a_run_prepares_the_next_one_have_their_effect(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    picky = Picky()
    picky.broken = {"b0"}
    if place == "slots":
        harness.settings["max_global_running"] = 10
    preparation = Preparation(monkeypatch, place, len(ACTIONS) + 4)
    await harness.engine()
    await harness.worker({"quick": Quick(), "picky": picky})
    task_id = await _started(harness)
    handle = await harness.handle(task_id)
    first_run = (await handle.describe()).run_id
    preparation.begin()
    await act(harness, task_id, "pause", scopes=["node:after"])
    assert await asyncio.to_thread(preparation.reached.wait, 60)
    picky.broken.clear()
    sent = {f"{place}-{name}": (name, given) for name, given in ACTIONS.items()}
    sent[f"{place}-reject"] = ("decide", REJECT)
    results = await asyncio.gather(
        *(handle.execute_update(name, given, id=each) for each, (name, given) in sent.items())
    )

    async def has_effects() -> bool:
        statuses = await harness.statuses(task_id)
        again, without = [await harness.node(task_id, name) for name in ("again", "without")]
        aside = [each.get("failed_batches", 0) for each in (again, without)]
        return {**EFFECTS, "after": "queued"}.items() <= statuses.items() and aside == [0, 0]

    await eventually(has_effects, 30)
    assert (await handle.describe()).run_id != first_run
    repeated = await asyncio.gather(
        *(handle.execute_update(name, given, id=each) for each, (name, given) in sent.items())
    )
    assert repeated == results
    view = await handle.query("status", result_type=dict)
    assert {each.split()[0] for each in view["paused"]} == {"node:after", "node:paused"}
    await harness.coordinator.cancel_task(task_id)
    await harness.until_status(task_id, "cancelled")
