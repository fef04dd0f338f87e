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
from tests.integration.test_quarantine import Picky

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
    for name, given in BEFORE.items():
        await act(harness, task_id, name, **given)
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
    monkeypatch.setattr(updates, "FULL_UPDATES", len(BEFORE) + 1)
    reached = hold_preparation(monkeypatch, place, len(BEFORE) + 2 + len(ACTIONS))
    await harness.engine()
    await harness.worker({"quick": Quick(), "picky": picky})
    task_id = await _started(harness)
    handle = await harness.handle(task_id)
    first_run = (await handle.describe()).run_id
    await act(harness, task_id, "pause", scopes=["node:after"])
    assert await asyncio.to_thread(reached.wait, 60)
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
