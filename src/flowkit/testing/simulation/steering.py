"""How a test acts on a task that runs in this process: it waits for a state, decides, retries, pauses, cancels."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from temporalio.exceptions import ApplicationError

from flowkit import reason_codes
from flowkit.actions.records import (
    CHANGE_GRAPH,
    COMPLETE_NODE,
    DECIDE,
    FAIL_NODE,
    PAUSE,
    RESUME,
    RETRY_NODE,
    SATISFY,
    SKIP_NODE,
)
from flowkit.actions.table import parse_action
from flowkit.errors import ActionRejected
from flowkit.models import NodeStatus
from flowkit.testing.simulation.server import TaskStuck

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from datetime import datetime

    from flowkit.testing.simulation.server import TaskServer

    Decisions = Mapping[str, str] | Callable[[str], str | None | Awaitable[str | None]]


class SimulatedTask:
    """A task that runs, for the script of a test. The actions are those of `Coordinator`, with the same rules."""

    def __init__(self, server: TaskServer) -> None:
        self._server = server
        self._watches: list[tuple[Callable[[dict[str, Any]], bool], asyncio.Future[None]]] = []

    @property
    def task_id(self) -> str:
        """The id of the task."""
        return self._server.task_id

    @property
    def now(self) -> datetime:
        """The time of the task."""
        return self._server.clock.now_dt()

    def status(self) -> dict[str, Any]:
        """Return the status of the task and of its nodes, as the query `status` of a workflow does."""
        return self._server.view()

    async def advance(self, seconds: float) -> None:
        """Let so much time pass."""
        await self._server.clock.sleep_ms(seconds * 1000)

    async def until(self, node_id: str, status: str) -> None:
        """Let the task run until a node has this status, such as `running`, `deferred` or `finished`.

        Raise TaskStuck if the task ends before.
        """
        await self._watch(lambda view: status_of(view, node_id) == status, f"node {node_id!r} is {status!r}")

    async def decide(self, node_id: str, decision: str, *, comment: str = "") -> None:
        """Approve or reject at a node of the type `approval`: the decision is `approve` or `reject`."""
        await self.act(DECIDE, node_id=node_id, decision=decision, comment=comment)

    async def satisfy(self, prerequisite: str) -> None:
        """Fulfil a prerequisite."""
        await self.act(SATISFY, prerequisite=prerequisite)

    async def retry_node(self, node_id: str, **given: Any) -> None:
        """Run a node again, and what depends on it, or end its wait for a retry."""
        await self.act(RETRY_NODE, node_id=node_id, **given)

    async def skip_node(self, node_id: str, **given: Any) -> None:
        """End a node as skipped."""
        await self.act(SKIP_NODE, node_id=node_id, **given)

    async def complete_node(self, node_id: str, **given: Any) -> None:
        """End a node as finished, with `metrics` and `batches`."""
        await self.act(COMPLETE_NODE, node_id=node_id, **given)

    async def fail_node(self, node_id: str, **given: Any) -> None:
        """End a node as failed."""
        await self.act(FAIL_NODE, node_id=node_id, **given)

    async def pause(self, *scopes: str, **given: Any) -> None:
        """Start nothing new in these scopes, such as `node:ID`; without one, in the task."""
        await self.act(PAUSE, **({"scopes": scopes} if scopes else {}), **given)

    async def resume(self, *scopes: str) -> None:
        """End the pause of these scopes; without one, of all."""
        await self.act(RESUME, scopes=scopes)

    async def change_graph(self, **given: Any) -> None:
        """Add nodes and edges to the graph, and change nodes that have not started."""
        await self.act(CHANGE_GRAPH, **given)

    async def cancel(self, reason: str = reason_codes.USER_REQUEST) -> None:
        """Cancel the task."""
        self._server.cancel(reason)

    async def act(self, name: str, **given: Any) -> dict[str, Any]:
        """Apply an action by its name, and return its result. Raise ActionRejected if the task rejects it."""
        parse_action(name, given)
        try:
            result: dict[str, Any] = await self._server.act(name, given)
        except ApplicationError as error:
            raise ActionRejected(error.message) from None
        return result

    async def _watch(self, is_met: Callable[[dict[str, Any]], bool], what: str) -> None:
        if is_met(self._server.view()):
            return
        met: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watches.append((is_met, met))
        with self._server.clock.waiting():
            try:
                await met
            except asyncio.CancelledError:
                if self._server.ended:
                    raise TaskStuck(f"the task ended before {what}") from None
                raise

    def observe(self) -> None:
        """Let those continue whose wait is over."""
        waits = [each for each in self._watches if not each[1].done()]
        view = self._server.view() if waits else {}
        for is_met, met in waits:
            if self._server.ended:
                met.cancel()
            elif is_met(view):
                met.set_result(None)
                self._server.clock.note_change()
        self._watches = [each for each in waits if not each[1].done()]


def status_of(view: Mapping[str, Any], node_id: str) -> str | None:
    """Return the status of a node in a view, or None for an unknown node."""
    return next((node["status"] for node in view["nodes"] if node["node_id"] == node_id), None)


async def decide_all(task: SimulatedTask, approvals: Sequence[str], decisions: Decisions) -> None:
    """Decide approvals whenever they wait, those for which there is a decision."""
    await asyncio.gather(*(_decide(task, each, decisions) for each in approvals))


async def _decide(task: SimulatedTask, node_id: str, decisions: Decisions) -> None:
    while True:
        await task.until(node_id, NodeStatus.DEFERRED)
        made = decisions.get(node_id) if isinstance(decisions, Mapping) else decisions(node_id)
        decision = await made if inspect.isawaitable(made) else made
        if decision is None:
            return
        await task.decide(node_id, decision)
