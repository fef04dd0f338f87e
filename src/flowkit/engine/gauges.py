"""Reports what is open in a queue: tasks, nodes, workers, slots, and how long nodes wait.

One engine of the queue at a time reports it, so that other engines do no work for it. An engine whose turn is over has
no values any more. Without a recorder of measurements, no engine counts anything.

Tasks and nodes are counted from the task documents. After the first count, an engine reads only the documents that
have changed since, by an index. Some processes write the time of a change late, so all open documents are read again
from time to time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from temporalio.service import RPCError

from flowkit.adapters.dispatches import DispatchStore
from flowkit.adapters.slots import ALL_ROLES, QueueLimits, SlotUsage
from flowkit.adapters.tasks.fields import nodes_of, read_pins
from flowkit.adapters.tasks.open_tasks import OpenTasks, is_open
from flowkit.adapters.turns import Turns
from flowkit.adapters.worker_registry import WorkerRegistry
from flowkit.attempt.background import BackgroundLoop, Expected, new_owner, release_turn
from flowkit.attempt.pollers import backlog_ages
from flowkit.connection import TemporalUnavailable
from flowkit.core.instruments import (
    OLDEST_DECISION,
    OLDEST_EVENT,
    OLDEST_READY,
    OPEN_NODES,
    OPEN_TASKS,
    ROLE_WORKERS,
    SLOTS,
    TAKEN_TIMES,
    is_measured,
)
from flowkit.errors import FlowKitError, StoreUnavailable
from flowkit.models import ENGINE_TYPES, OPEN_NODE_STATUSES, OPEN_TASK_STATUSES
from flowkit.models.graphs import ENGINE_NODES, NodeStatus
from flowkit.models.temporal_names import role_queue
from flowkit.models.waits import OUTSIDE, WaitKind, read_wait

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flowkit.adapters.slots import WaitingRole
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.attempt.background import LoopHealth
    from flowkit.connection import Namespace
    from flowkit.core.utils import Fields
    from flowkit.engine.slot_grants import SlotGrants

_logger = logging.getLogger("flowkit.engine.worker")

EVERY_SEC = 15.0
"""How often the values are read."""
_CHECK_SEC = 5.0
"""How often an engine looks between two counts whether MongoDB still responds, and how long it waits for that.

So the values of a frozen server disappear within about ten seconds: nobody knows whether they are still true.
"""
_OTHERS_SEC = 10.0
"""How long the reads of slots, workers and waits may take."""
_SHARE = 20.0
"""The pause is at least this many times as long as the count before it, so that counting stays a small load."""
_TURN_SEC = 15.0
"""Extra time for which an engine keeps its turn after the next count is due, in case it is late."""
_OVERLAP_SEC = 60.0
"""Documents are read again if they changed up to this long before the last count: clocks differ, and writes wait."""
_FULL_COUNT_SEC = 300.0
"""How often all open documents are read, for changes whose time was written even later."""
_TAKEN_EVERY_SEC = 300.0
"""How often ids of nominal times are looked for that something else has taken. It reads each schedule."""
_MOST_QUEUES = 200
"""Of how many task queues Temporal says how long activities wait: those of the roles with the most open nodes."""

_WAITS_FOR_WORKER = (NodeStatus.QUEUED.value, NodeStatus.DEFERRED.value)

CountTaken = Callable[[], Awaitable[Mapping[str, int]]]
"""Returns by schedule how many of its nominal times have an id that something else has taken."""
Labels = tuple[str, ...]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _TaskCount:
    """What is open in one task."""

    status: str
    nodes: Mapping[tuple[str, str], int]
    """How many nodes are open, by role and status."""
    waits: Mapping[tuple[WaitKind, str], float] = field(default_factory=dict)
    """When the first wait for somebody outside the task began, by kind and role, in seconds since the Unix epoch."""
    pins: frozenset[tuple[str, str]] = frozenset()
    """The versions that the task has fixed, with their roles."""


class OpenStates:
    """Counts the open tasks and their nodes, from what their documents showed when they were read last."""

    def __init__(self) -> None:
        self._tasks: dict[Any, _TaskCount] = {}
        self._statuses: Counter[str] = Counter()
        self._nodes: Counter[tuple[str, str]] = Counter()
        self._waiting: set[Any] = set()
        """The tasks with nodes that wait for somebody outside them."""
        self._pins: Counter[tuple[str, str]] = Counter()

    def note(self, document: Fields) -> None:
        """Replace what is counted of a task by what its document shows now; nothing if the task has ended."""
        key = document["_id"]
        self._forget(key)
        if is_open(document):
            count = self._tasks[key] = _count_task(document)
            self._statuses[count.status] += 1
            self._nodes.update(count.nodes)
            self._pins.update(count.pins)
            if count.waits:
                self._waiting.add(key)

    def _forget(self, key: Any) -> None:
        count = self._tasks.pop(key, None)
        if count is not None:
            self._statuses[count.status] -= 1
            self._nodes.subtract(count.nodes)
            self._pins.subtract(count.pins)
            self._waiting.discard(key)

    def tasks(self) -> dict[Labels, float]:
        """Return how many tasks are open, by status; 0 for the statuses that none has."""
        found = dict.fromkeys(OPEN_TASK_STATUSES, 0) | +self._statuses
        return {(status,): count for status, count in found.items()}

    def nodes(self) -> dict[Labels, float]:
        """Return how many nodes are open, by role and status."""
        return {labels: count for labels, count in self._nodes.items() if count > 0}

    def oldest(self, kind: WaitKind, now: float) -> dict[Labels, float]:
        """Return for how many seconds the node has waited that has waited longest for this, by role."""
        since: dict[str, float] = {}
        for key in self._waiting:
            for (other, role), at in self._tasks[key].waits.items():
                if other is kind:
                    since[role] = min(at, since.get(role, at))
        return {(role,): max(0.0, now - at) for role, at in since.items()}

    def roles(self, statuses: Sequence[str] = OPEN_NODE_STATUSES) -> list[str]:
        """Return the roles with nodes of these statuses, by the number of such nodes. The largest comes first."""
        found: Counter[str] = Counter()
        for (role, status), count in self._nodes.items():
            if count > 0 and status in statuses and role not in ENGINE_NODES:
                found[role] += count
        return [role for role, _ in found.most_common()]

    def waiting_queues(self, queue: str) -> dict[str, str]:
        """Return the task queues in which nodes may wait for a worker, with their roles. `queue` is the engine's."""
        roles = self.roles(_WAITS_FOR_WORKER)
        versions = [pin for pin, count in self._pins.items() if count > 0 and pin[0] in roles]
        pairs = [*((role, "") for role in roles), *versions]
        return {role_queue(queue, role, version): role for role, version in pairs[:_MOST_QUEUES]}


def _count_task(document: Fields) -> _TaskCount:
    """Return what is open in a task. Leave out what another program has written."""
    nodes: Counter[tuple[str, str]] = Counter()
    waits: dict[tuple[WaitKind, str], float] = {}
    for node in nodes_of(document):
        role, status = node.get("type"), node.get("status")
        if not isinstance(role, str) or status not in OPEN_NODE_STATUSES:
            continue
        wait = read_wait(node)
        if wait is not None and wait.kind in OUTSIDE and wait.since is not None:
            status = wait.kind.value
            waits[wait.kind, role] = min(wait.since, waits.get((wait.kind, role), wait.since))
        nodes[role, status] += 1
    pins = frozenset(read_pins(document).items())
    return _TaskCount(status=document["status"], nodes=nodes, waits=waits, pins=pins)


def slot_values(
    limits: QueueLimits, usage: SlotUsage, waiting: Mapping[str, WaitingRole]
) -> dict[Labels, float]:
    """Return the used slots, the requests that wait, and the size of each limit, by its name and this state."""
    used = {**usage.by_role, ALL_ROLES: usage.total}
    requests = {role: each.requests for role, each in waiting.items()}
    requests[ALL_ROLES] = sum(requests.values())
    states = {"used": used, "waiting": requests, "size": limits.sizes}
    return {
        (limit, state): values.get(limit, 0) for limit in limits.sizes for state, values in states.items()
    }


def oldest_ready(
    backlogs: Mapping[str, float],
    queues: Mapping[str, str],
    since: Iterable[Mapping[str, float]],
    now: float,
) -> dict[Labels, float]:
    """Return for how many seconds the node waits that has waited longest for a worker or a slot, by role.

    `backlogs` are the seconds that activities wait in the task queues `queues`; `since` are times by role since which
    others wait.
    """
    ages = [(queues[queue], age) for queue, age in backlogs.items()]
    ages += [(role, now - at) for each in since for role, at in each.items()]
    found: dict[Labels, float] = {}
    for role, age in ages:
        found[role,] = max(age, found.get((role,), 0.0))
    return found


async def _timely(answer: Awaitable[T], seconds: float) -> T:
    """Return what MongoDB answers. Raise StoreUnavailable if it does not within this time."""
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise StoreUnavailable(f"MongoDB did not respond within {seconds:g} s") from None


class Gauges:
    """Reports the gauges of one queue, while it is this engine's turn."""

    def __init__(
        self,
        tasks: TaskStore,
        namespace: Namespace,
        grants: SlotGrants,
        queue: str,
        count_taken: CountTaken | None = None,
    ) -> None:
        self._count_taken = count_taken
        self._taken_due_at = 0.0
        self._store = tasks
        self._tasks = OpenTasks(tasks.database)
        self._turns = Turns(tasks.database)
        self._workers = WorkerRegistry(tasks.database)
        self._dispatches = DispatchStore(tasks.database)
        self._namespace = namespace
        self._grants = grants
        self._queue = queue
        self._owner = new_owner()
        self._turn = ""
        """The name of the turn, once it is known."""
        self._counts: OpenStates | None = None
        """What was counted; None before the first count of a turn."""
        self._counted_at = 0.0
        self._full_count_at = 0.0
        self._pause_sec = 0.0
        log = partial(_logger.info, "the open tasks and nodes were not counted; retrying: %s")
        outages = Expected(errors=(FlowKitError, RPCError), log=log)
        self._loop = BackgroundLoop("measuring open tasks", self._step, expected=outages)

    @property
    def health(self) -> LoopHealth:
        """The health of the background loop."""
        return self._loop.health

    async def run(self) -> None:
        """Report until cancelled. Errors are logged, and the next step retries."""
        try:
            await self._loop.run()
        finally:
            self._clear()
            if self._turn:
                ending = self._turns.end(self._turn, self._owner)
                await asyncio.shield(release_turn(ending, "to count open tasks"))

    async def _step(self) -> None:
        try:
            await self._pause()
            self._pause_sec = EVERY_SEC
            if not is_measured():
                return
            begun = time.monotonic()
            if await self.report():
                self._pause_sec = max(EVERY_SEC, _SHARE * (time.monotonic() - begun))
                await self._take_turn()
                await self._report_taken()
        except Exception:
            self._clear()
            raise

    async def _report_taken(self) -> None:
        """Count taken nominal times if it is time for that. An error says nothing about the other values."""
        begun = time.monotonic()
        if self._count_taken is None or begun < self._taken_due_at:
            return
        counts: Mapping[str, int] = {}
        try:
            counts = await self._count_taken()
        except (FlowKitError, RPCError) as error:
            _logger.info("the taken nominal times of schedules were not counted; retrying: %s", error)
        TAKEN_TIMES.set({(schedule,): count for schedule, count in counts.items()})
        ended = time.monotonic()
        self._taken_due_at = ended + max(_TAKEN_EVERY_SEC, _SHARE * (ended - begun))

    async def _pause(self) -> None:
        """Wait until the next count is due. While values are shown, raise StoreUnavailable if MongoDB freezes."""
        until = time.monotonic() + self._pause_sec
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _CHECK_SEC))
            if self._counts is not None and not await self._take_turn():
                self._clear()

    async def report(self) -> bool:
        """Set all gauges if it is this engine's turn, and clear them otherwise. Return whether they are set."""
        namespace_id = await self._namespace.id()
        if not namespace_id:
            problem = "Temporal did not return the id of the namespace"
            raise TemporalUnavailable(problem, "check that the Temporal server responds")
        self._turn = f"gauges:{json.dumps([namespace_id, self._queue])}"
        if not await self._take_turn() or (counts := await self._count(namespace_id)) is None:
            self._clear()
            return False
        await _timely(self._report_others(counts), _OTHERS_SEC)
        now = time.time()
        OPEN_TASKS.set(counts.tasks())
        OPEN_NODES.set(counts.nodes())
        OLDEST_DECISION.set(counts.oldest(WaitKind.DECISION, now))
        OLDEST_EVENT.set(counts.oldest(WaitKind.EVENT, now))
        return True

    async def _take_turn(self) -> bool:
        taking = self._turns.take(self._turn, self._owner, self._pause_sec + _TURN_SEC)
        return await _timely(taking, _CHECK_SEC)

    def _clear(self) -> None:
        """Report nothing any more: what this process would go on to show is no longer true."""
        self._counts, self._taken_due_at = None, 0.0
        for gauge in (
            OPEN_TASKS,
            OPEN_NODES,
            OLDEST_DECISION,
            OLDEST_EVENT,
            OLDEST_READY,
            ROLE_WORKERS,
            SLOTS,
            TAKEN_TIMES,
        ):
            gauge.set({})

    async def _count(self, namespace_id: str) -> OpenStates | None:
        """Return the counts of now, or None if the turn of this engine has ended meanwhile."""
        at = time.time()
        is_full = self._counts is None or time.monotonic() - self._full_count_at >= _FULL_COUNT_SEC
        counts = OpenStates() if self._counts is None or is_full else self._counts
        since = None if is_full else self._counted_at - _OVERLAP_SEC
        database_id = await self._store.database_id()
        states = self._tasks.states(since=since, namespace_id=namespace_id, database_id=database_id)
        while page := await _timely(anext(states, []), _OTHERS_SEC):
            for document in page:
                counts.note(document)
            if not await self._take_turn():
                return None
        if is_full:
            self._full_count_at = time.monotonic()
        self._counts, self._counted_at = counts, at
        return counts

    async def _report_others(self, counts: OpenStates) -> None:
        """Set the gauges of workers, slots and waits."""
        slots, queues = await self._grants.store(), counts.waiting_queues(self._queue)
        serving = await self._workers.count_online(self._queue)
        waiting, usage = await slots.waiting_by_role(), await slots.usage()
        unaccepted = await self._dispatches.oldest_unaccepted(self._queue)
        backlogs = await backlog_ages(self._grants.client, queues)
        # Those with nodes that may wait come first, because a gauge has a bounded number of roles.
        roles = (*counts.roles(_WAITS_FOR_WORKER), *counts.roles())
        wanted = dict.fromkeys(role for role in roles if role not in ENGINE_TYPES)
        since = [{role: each.since for role, each in waiting.items()}, unaccepted]
        ROLE_WORKERS.set({(role,): serving[role] for role in {**wanted, **serving}})
        SLOTS.set(slot_values(self._grants.limits, usage, waiting))
        OLDEST_READY.set(oldest_ready(backlogs, queues, since, time.time()))
