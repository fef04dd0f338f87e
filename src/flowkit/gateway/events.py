"""The events of flows: every change of a status, stored once and in order, whichever gateway sees it.

Nothing writes an event when it happens. A gateway that looks at a flow derives which statuses its nodes have passed
(`status.steps`) and stores those that are missing. The sequence number is part of the key of an event, so that of two
gateways that look at the same time one stores its events, and the other looks again.
"""

from __future__ import annotations

import asyncio
import time
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from flowkit.gateway.flows import ABANDONED, LatestRun, dispatch_id, read_latest
from flowkit.gateway.models import FlowEvent, FlowStatus, NodeStatus
from flowkit.gateway.status import EDGES, Step, abandoned, flow_status, levels, node_states, steps
from flowkit.models import NodeStatus as TaskNodeStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from flowkit.core.utils import Fields
    from flowkit.gateway.status import FlowRun, TaskNode
    from flowkit.gateway.store import FlowStore

LOOK_SEC: Final = 0.25
"""How often a gateway looks at a flow with subscribers."""
IDLE_LOOK_SEC: Final = 1.0
"""How often it looks at a flow that does not run."""
LOOKS: Final = 8
"""At how many flows a gateway looks at the same time. With many flows, it looks less often at each."""
_READ_AT_ONCE: Final = 500


class FlowEvents:
    """Stores the events of flows, and sends them to subscribers."""

    def __init__(self, store: FlowStore) -> None:
        self._store = store
        self._logs: dict[str, EventLog] = {}
        self._looks = asyncio.Semaphore(LOOKS)

    async def observe(self, flow: Fields) -> None:
        """Store the events of a flow up to now, before a new run hides them."""
        if flow["task_id"] is not None:
            await self._look(EventLog(flow["_id"]), flow)

    async def send(self, flow_id: str, after: int, notify: Callable[[str, Fields], Awaitable[None]]) -> None:
        """Send the events of a flow after a sequence number, and those that follow, until cancelled."""
        log = self._logs.setdefault(flow_id, EventLog(flow_id))
        log.subscribers += 1
        try:
            while True:
                await self._look_together(log)
                after = await self._send_stored(log, after, notify)
                await asyncio.sleep(log.next_look - time.monotonic())
        finally:
            log.subscribers -= 1
            if not log.subscribers:
                del self._logs[flow_id]

    async def _look_together(self, log: EventLog) -> None:
        """Look at a flow, unless another subscriber has just done so."""
        async with log.turn:
            if time.monotonic() < log.next_look:
                return
            async with self._looks:
                flow = await self._store.flow_without_nodes(log.flow_id)
                is_open = flow is not None and await self._look(log, await self._with_nodes(log, flow))
            log.next_look = time.monotonic() + (LOOK_SEC if is_open else IDLE_LOOK_SEC)

    async def _with_nodes(self, log: EventLog, flow: Fields) -> Fields:
        """Return a flow with its nodes, which are read only if the flow has changed since the latest look."""
        version, nodes = log.nodes
        if version != flow["version"]:
            nodes = await self._store.nodes_of_flow(log.flow_id)
            log.nodes = flow["version"], nodes
        return {**flow, "nodes": nodes}

    async def _send_stored(
        self, log: EventLog, after: int, notify: Callable[[str, Fields], Awaitable[None]]
    ) -> int:
        """Send the stored events after a sequence number, and return the number of the last one.

        A subscriber that has got all that the latest look has found costs no query.
        """
        while after < log.last:
            rows = await self._store.events(log.flow_id, after, _READ_AT_ONCE)
            if not rows:  # they were deleted
                return after
            for row in rows:
                event = FlowEvent(**{name: row[name] for name in _EVENT_FIELDS})
                await notify("flow.event", event.model_dump(mode="json", by_alias=True))
                after = row["seq"]
        return after

    async def _look(self, log: EventLog, flow: Fields) -> bool:
        """Store the missing events of a flow, and return whether its run is open."""
        while True:
            await self._read(log, flow["task_id"])
            latest = await read_latest(self._store, flow, log.unsettled)
            if latest is None or latest.run is None:
                return False
            new = log.missing(latest, time.time())
            if not new or await self._store.append_events(new):
                log.read(new)
                if log.last > flow["last_event"]:
                    await self._store.note_events(log.flow_id, log.last)
                await self._end_dispatches(latest)
                log.settle(latest.run)
                return flow_status(latest.run) is FlowStatus.STARTED

    async def _end_dispatches(self, latest: LatestRun) -> None:
        """End the dispatches of an ended run for whose supervisors no attempt waits any more."""
        assert latest.run is not None
        task_id = latest.flow["task_id"]
        if ids := [
            dispatch_id(task_id, str(job), each.generation, each.retry) for job, each in abandoned(latest.run)
        ]:
            await self._store.abandon_dispatches(ids, ABANDONED, time.time())

    async def _read(self, log: EventLog, task_id: str | None) -> None:
        """Read the events of a run that were stored since the latest look. Those of other runs do not matter."""
        last = await self._store.last_event(log.flow_id)
        after = log.follow(task_id)
        while task_id is not None and after < last:
            rows = await self._store.events_of_task(task_id, after, _READ_AT_ONCE)
            log.read(rows)
            after = rows[-1]["seq"] if len(rows) == _READ_AT_ONCE else last
        log.last = max(log.last, last)


class EventLog:
    """What a gateway has read of the stored events of the latest run of a flow, so that it reads only new ones."""

    def __init__(self, flow_id: str) -> None:
        self.flow_id = flow_id
        self.subscribers = 0
        self.next_look = 0.0
        """When to look at the flow again, on the monotonic clock."""
        self.turn = asyncio.Lock()
        self.nodes: tuple[int, list[Fields]] = (0, [])
        """The version of the flow at the latest look, and its nodes."""
        self.last = 0
        """The highest sequence number that was read."""
        self._task_id: str | None = None
        self._known: set[tuple[str, int | None, Step | FlowStatus]] = set()
        self._latest: dict[tuple[str, int], Step] = {}
        self._is_closed = False
        self._settled: dict[int, tuple[str, int, int]] = {}
        """The jobs that have ended and whose events are stored: their status, generation and epoch."""

    def follow(self, task_id: str | None) -> int:
        """Follow a run, and forget any other. Return the number up to which the events of this one were read."""
        if task_id == self._task_id:
            return self.last
        self._task_id = task_id
        self._known.clear()
        self._latest.clear()
        self._settled.clear()
        return 0

    def unsettled(self, nodes: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the jobs that have begun and are not settled, of the nodes of a task document."""
        return [
            int(node["node_id"])
            for node in nodes
            if (node["status"] != TaskNodeStatus.QUEUED or node.get("generation"))
            and self._settled.get(int(node["node_id"])) != _state_of(node)
        ]

    def settle(self, run: FlowRun) -> None:
        """Note which jobs have ended: all their events are stored. After the end of a run, all are read once more."""
        if run.status.closed is not self._is_closed:
            self._is_closed = run.status.closed
            self._settled.clear()
            return
        ended = {job: node for job, node in run.nodes.items() if node.status.ended}
        self._settled = {job: _state_in(node) for job, node in ended.items()}

    def read(self, rows: Sequence[Fields]) -> None:
        """Add events that are stored."""
        for row in rows:
            self.last = row["seq"]
            if row["node"] is None:
                self._known.add((row["run_id"], None, FlowStatus(row["to"])))
                continue
            step = Step(row["generation"], row["retry"], NodeStatus(row["to"]))
            self._known.add((row["task_id"], row["node"], step))
            self._latest[row["task_id"], row["node"]] = step

    def missing(self, latest: LatestRun, at: float) -> list[Fields]:
        """Return the events of the latest run that are not stored, with the next sequence numbers.

        They also follow those of events that were deleted, so that a client misses none with the last one
        that it has seen.
        """
        assert latest.run is not None
        events = [*self._of_flow(latest, FlowStatus.STARTED), *self._of_nodes(latest)]
        if (status := flow_status(latest.run)) is not FlowStatus.STARTED:
            events += self._of_flow(latest, status)
        flow = latest.flow
        own = {
            "flow": self.flow_id,
            "context_id": flow["context_id"],
            "flow_id": flow["id"],
            "task_id": flow["task_id"],
            "run_id": latest.id,
            "at": at,
        }
        return [
            {"_id": f"{self.flow_id}:{seq}", "seq": seq, **own, **event}
            for seq, event in enumerate(events, max(self.last, flow["last_event"]) + 1)
        ]

    def _of_flow(self, latest: LatestRun, status: FlowStatus) -> list[Fields]:
        """Return the event of a status of the flow, or nothing if it is stored."""
        if (latest.id or "", None, status) in self._known:
            return []
        before = FlowStatus.CREATED if status is FlowStatus.STARTED else FlowStatus.STARTED
        fields = {"from_": before.value, "to": status.value, "attempt": 0, "generation": 0, "retry": 0}
        return [{"node": None, "filled": False, **fields}]

    def _of_nodes(self, latest: LatestRun) -> list[Fields]:
        """Return the missing events of all nodes, parents before their children."""
        assert latest.run is not None
        states = node_states(latest.nodes, latest.run)
        events: list[Fields] = []
        task_id = latest.flow["task_id"]
        nodes = latest.run.nodes
        for job in chain.from_iterable(levels(latest.nodes)):
            if job in nodes and self._settled.get(job) == _state_in(nodes[job]):
                continue
            passed = steps(states[job], latest.run.dispatches.get(job) or ())
            before = self._latest.get((task_id, job))
            for number, step in enumerate(passed, 1):
                if (task_id, job, step) not in self._known and _follows(before, step):
                    events.append(_event(job, before, step, filled=number < len(passed)))
                    before = step
        return events


_EVENT_FIELDS: Final = tuple(FlowEvent.model_fields)


def _state_of(node: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return status, generation and epoch of a node in a task document."""
    return node["status"], node.get("generation") or 0, node.get("attempt_epoch") or 0


def _state_in(node: TaskNode) -> tuple[str, int, int]:
    """Return status, generation and epoch of a node in a run."""
    return node.status.value, node.generation, node.epoch


def _follows(before: Step | None, step: Step) -> bool:
    """Return whether a status can follow the latest one whose event is stored.

    A supervisor may end a job after its node was cancelled. The record of its dispatch then says more than the events.
    """
    if before is None or before.generation < step.generation:
        return True
    return before.generation == step.generation and step.status in EDGES[before.status]


def _event(node: int, before: Step | None, step: Step, *, filled: bool) -> Fields:
    """Return a change of a node. A generation of a node begins with `Pending`."""
    continues = before is not None and before.generation == step.generation
    return {
        "node": node,
        "from_": before.status.value if before is not None and continues else NodeStatus.PENDING.value,
        "to": step.status.value,
        "generation": step.generation,
        "retry": step.retry,
        "attempt": step.retry + 1,
        "filled": filled,
    }
