"""The table of docs/actions.md against a running task: in each cell, what the table says happens, and a
dash is a rejection."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowUpdateFailedError

from flowkit.adapters.tasks.store import TaskStore
from reference.actions import DASH, WITH_INTERRUPT, cells
from tests.integration.handlers import Quick
from tests.integration.harness import Harness, eventually, node
from tests.integration.test_generations import act
from tests.integration.test_pause import Gated
from tests.integration.test_quarantine import Picky

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.models import ResetNodes
    from flowkit.worker import RoleHandler

pytestmark = pytest.mark.server

NEVER = {"max": 0}
LATER = {"max": 3, "backoff_sec": 3_600, "max_backoff_sec": 3_600}
ASIDE = {"attempts": 1, "then": "quarantine", "max": 10}


UPDATES_AT_ONCE = 8
"""Temporal refuses more than 10 updates of a workflow at the same time."""


class Unreadable(Quick):
    """Fails before its first batch."""

    role = "unreadable"

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        """Fail."""
        raise OSError("cannot read the input")


def _sets_aside(name: str, role: str = "quick", *parents: str, **fields: Any) -> dict[str, Any]:
    return node(name, role, *parents, on_batch_failure=ASIDE, **fields)


def _has_set_aside(name: str) -> list[dict[str, Any]]:
    pull = {
        "input_adapter": "pull.from_artifacts",
        "input_args": {"from_nodes": [f"{name}-a"], "poll_ms": 20},
    }
    return [node(f"{name}-a"), _sets_aside(name, "picky", f"{name}-a", inline=pull)]


STATES: dict[str, tuple[str, Callable[[str], list[dict[str, Any]]]]] = {
    "queued, which lacks a prerequisite": ("queued", lambda name: [_sets_aside(name, prerequisites=[name])]),
    "running": ("running", lambda name: [_sets_aside(name, "gated")]),
    "waits for a retry": (
        "deferred",
        lambda name: [_sets_aside(name, "unreadable", retry_policy=LATER)],
    ),
    "held": (
        "deferred",
        lambda name: [_sets_aside(name, "unreadable", retry_policy=NEVER, hold_on_failure=True)],
    ),
    "approval that waits": ("deferred", lambda name: [node(name, "approval")]),
    "finished": ("finished", lambda name: [_sets_aside(name)]),
    "finished, with batches set aside": ("finished", _has_set_aside),
    "failed, in a task that continues": (
        "failed",
        lambda name: [_sets_aside(name, "unreadable", retry_policy=NEVER)],
    ),
    "skipped by a user": ("queued", lambda name: [_sets_aside(name, prerequisites=[f"{name}-a"])]),
    "skipped by a condition": ("skipped", lambda name: [_sets_aside(name, when="params.go")]),
    "skipped because of a parent": (
        "skipped",
        lambda name: [
            node(f"{name}-a", "unreadable", retry_policy=NEVER),
            _sets_aside(name, "quick", f"{name}-a"),
        ],
    ),
    "skipped by a route": (
        "skipped",
        lambda name: [node(f"{name}-a", routing={"on_failure": [name]}), _sets_aside(name)],
    ),
    "paused, before it starts": ("queued", lambda name: [_sets_aside(name, prerequisites=[name])]),
    "being reset by an earlier action": ("queued", lambda name: [_sets_aside(name, prerequisites=[name])]),
}
"""For each state of the table, its status in the document, and the nodes of a cell, of which one has the
cell's name."""

SKIPPED, PAUSED, RESET = (
    "skipped by a user",
    "paused, before it starts",
    "being reset by an earlier action",
)
"""The states into which only an earlier action brings a node."""


class Table:
    """A task in which each cell of the table has its own node."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.cells = cells()
        self.task_id = ""

    def names(self, words: str) -> dict[str, str]:
        """Return the node of each action in one state."""
        row = [*self.cells].index(words)
        return {action: f"{row}-{action}" for action in self.cells[words]}

    async def start(self) -> None:
        """Start the task, and wait until each node has come into its state."""
        nodes = [
            each
            for words, (_, make) in STATES.items()
            for name in self.names(words).values()
            for each in make(name)
        ]
        graph = {"nodes": nodes, "on_node_failure": "continue"}
        self.task_id = await self.harness.coordinator.create_task(params={"go": False}, graph=graph)
        for words, (status, _) in STATES.items():
            await self._until(words, status)
        await self.act("pause", scopes=[f"node:{name}" for name in self.names(PAUSED).values()])
        await self._act_on_all(SKIPPED, "skip_node")
        await self._until(SKIPPED, "skipped")

    async def begin_resets(self) -> None:
        """Let the resets of some nodes begin."""
        await self._act_on_all(RESET, "complete_node")
        await self._until(RESET, "finished")
        await self._act_on_all(RESET, "retry_node")

    async def _act_on_all(self, words: str, action: str) -> None:
        places = asyncio.Semaphore(UPDATES_AT_ONCE)

        async def act_in_place(name: str) -> None:
            async with places:
                await self.act(action, node_id=name)

        await asyncio.gather(*(act_in_place(name) for name in self.names(words).values()))

    async def _until(self, words: str, status: str) -> None:
        """Wait until all nodes of a state have this status."""

        async def look() -> bool:
            entries = await self.entries()
            return {entries[name]["status"] for name in self.names(words).values()} == {status}

        await eventually(look)

    async def entries(self) -> dict[str, dict[str, Any]]:
        """Return the entries of all nodes."""
        document = await self.harness.document(self.task_id)
        return {each["node_id"]: each for each in document["graph"]["nodes"]}

    async def act(self, action: str, **given: Any) -> dict[str, Any]:
        """Send an action."""
        return await act(self.harness, self.task_id, action, **given)

    async def try_cell(self, words: str, action: str) -> None:
        """Send the action of a cell. It affects its node as the table says, or is rejected."""
        outcome, name = self.cells[words][action], self.names(words)[action]
        expected = outcome.removesuffix(WITH_INTERRUPT)
        if outcome != expected:
            await self._is_rejected(action, _given(action, name, interrupt=False))
        given = _given(action, name, interrupt=outcome in (DASH, f"{expected}{WITH_INTERRUPT}"))
        if outcome == DASH:
            await self._is_rejected(action, given)
            return
        affected = (await self.act(action, **given))["affected"]
        assert {each["node_id"]: each["to"] for each in affected}[name] == expected, (words, action)

    async def _is_rejected(self, action: str, given: dict[str, Any]) -> None:
        try:
            done = await self.act(action, **given)
        except WorkflowUpdateFailedError as error:
            assert getattr(error.cause, "type", None) == "action_rejected"
        else:
            pytest.fail(f"{action} {given} was accepted: {done}")

    async def until_shown(self, words: str, before: dict[str, dict[str, Any]]) -> None:
        """Wait until the task shows what the table says of each cell in one state."""
        missing: list[str] = []

        async def look() -> bool:
            handle = await self.harness.handle(self.task_id)
            view, entries = await handle.query("status", result_type=dict), await self.entries()
            missing[:] = [
                f"{words} / {action}: {outcome}, but {entries[name]}"
                for action, outcome in self.cells[words].items()
                if outcome != DASH
                and not _is_shown(
                    action, outcome, entries[name := self.names(words)[action]], before[name], view
                )
            ]
            return not missing

        try:
            await eventually(look, 30)
        except AssertionError:
            raise AssertionError("\n".join(missing)) from None


def _given(action: str, name: str, *, interrupt: bool) -> dict[str, Any]:
    match action:
        case "pause":
            return {"scopes": [f"node:{name}"], "interrupt": interrupt}
        case "resume":
            return {"scopes": [f"node:{name}"]}
        case "satisfy":
            return {"prerequisite": name}
        case "decide":
            return {"node_id": name, "decision": "approve"}
        case "change_graph":
            return {"changes": {name: {"timeout_sec": 60}}}
        case _:
            return {"node_id": name, "interrupt": interrupt}


def _is_shown(
    action: str, outcome: str, entry: dict[str, Any], before: dict[str, Any], view: dict[str, Any]
) -> bool:
    """Return whether the document, or the query, shows what an action has done to a node."""
    name, paused = entry["node_id"], [each.split()[0] for each in view.get("paused", [])]
    match action:
        case "pause" | "resume":
            return (f"node:{name}" in paused) == (action == "pause")
        case "satisfy":
            return name in view["satisfied"] and "prerequisite" not in entry.get("waits_for", "")
        case "change_graph":
            return bool(entry.get("timeout_sec") == 60)
        case "retry_node" | "retry_batches":
            return bool(entry["attempt_epoch"] > before["attempt_epoch"])
        case "skip_batches":
            return entry["attempt_epoch"] > before["attempt_epoch"] or not entry.get("failed_batches")
        case _:
            shown = (entry["status"], entry.get("skip_reason"), entry.get("reason_code"))
            return (
                shown
                == {
                    "skip_node": ("skipped", "user", None),
                    "complete_node": ("finished", None, None),
                    "fail_node": ("failed", None, "failed_by_user"),
                    "decide": ("finished", None, None),
                }[action]
            )


class HeldResets:
    """Lets resets of nodes wait whose ids begin with `prefix`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
        self.go_on, write = threading.Event(), TaskStore.reset_nodes

        async def wait(store: TaskStore, record: ResetNodes, artifacts: ArtifactStore) -> list[int]:
            if record.nodes[0].node_id.startswith(prefix) and record.nodes[0].outcome is None:
                await asyncio.to_thread(self.go_on.wait)
            return await write(store, record, artifacts)

        monkeypatch.setattr(TaskStore, "reset_nodes", wait)


@pytest.mark.slow(35)
async def test_each_action_does_in_each_state_what_the_table_says(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    picky, table = Picky(), Table(harness)
    picky.broken = {"b0"}
    held = HeldResets(monkeypatch, f"{[*table.cells].index(RESET)}-")
    await harness.engine()
    roles: dict[str, RoleHandler] = {
        "quick": Quick(),
        "gated": Gated(),
        "unreadable": Unreadable(),
        "picky": picky,
    }
    await harness.worker(roles, concurrency=40)
    try:
        assert table.cells.keys() == STATES.keys()
        await table.start()
        before = await table.entries()
        for words, outcomes in table.cells.items():
            if words == RESET:
                await table.begin_resets()
                now = await table.entries()
                before |= {name: now[name] for name in table.names(RESET).values()}
            for action in outcomes:
                await table.try_cell(words, action)
        held.go_on.set()
        for words in table.cells:
            await table.until_shown(words, before)
        await harness.coordinator.cancel_task(table.task_id)
        await harness.until_status(table.task_id, "cancelled")
    finally:
        held.go_on.set()
