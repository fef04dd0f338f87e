"""Concurrency limits: which roles may get another slot, which attempts hold one, and which requests wait for one.

One document in `slots` for each namespace and engine queue holds the counters and the attempts that hold a
slot. A grant is one update, whose filter checks the limits and that the attempt does not hold a slot yet.
It is therefore exact with any number of engines, and can be repeated. Waiting requests are documents of
`slot_requests`, one for each task and role.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from pymongo import ASCENDING, DESCENDING
from pymongo.errors import DuplicateKeyError

from flowkit.adapters.entries import utc
from flowkit.adapters.mongo import Database, aggregated, durable, ensure_index, moment, translate_errors
from flowkit.adapters.turns import Turns
from flowkit.models import Slot, SlotRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from flowkit.config import CoordinatorConfig
    from flowkit.core.utils import Fields


PAGE = 50
"""Largest number of requests that are read at once."""

ALL_ROLES = "*"
"""The name of the limit for all roles together. No role has this name."""

_CHECKED = 20
_USAGE: Fields = {"total": 1, "counts": 1, "turn": 1}
_REQUEST = ("task_id", "run_id", "node_id", "epoch", "role", "priority", "asked_at", "wanted_at")
_ORDER = [("turn", ASCENDING), ("priority", DESCENDING), ("since", ASCENDING)]


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueLimits:
    """How many attempts may be in flight over all tasks of a queue."""

    total: int | None = None
    """Limit for all roles together; None means no limit."""
    by_role: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, config: CoordinatorConfig) -> Self:
        """Return the limits that the configuration contains at this moment."""
        return cls(total=config.max_global_running, by_role=dict(config.max_type_concurrency))

    @property
    def configured(self) -> bool:
        """Whether there is any limit."""
        return self.total is not None or bool(self.by_role)

    def concern(self, role: str) -> bool:
        """Return whether a limit applies to attempts of `role`."""
        return bool(self.names_for(role))

    def names_for(self, role: str) -> tuple[str, ...]:
        """Return the names of the limits that apply to attempts of `role`, as `sizes` has them."""
        return tuple(name for name in (role, ALL_ROLES) if name in self.sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each limit, by its name: the role, or ALL_ROLES."""
        return {**self.by_role, **({} if self.total is None else {ALL_ROLES: self.total})}


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotUsage:
    """How many slots are in use."""

    total: int = 0
    by_role: Mapping[str, int] = field(default_factory=dict)
    turn: int = 0
    """The turn of the latest request that got its slot after a wait."""

    def with_one(self, role: str) -> SlotUsage:
        """Return the usage with one more slot of `role`."""
        return SlotUsage(
            total=self.total + 1,
            by_role={**self.by_role, role: self.by_role.get(role, 0) + 1},
            turn=self.turn,
        )


def is_full(limits: QueueLimits, usage: SlotUsage) -> bool:
    """Return whether no role can get a slot."""
    return limits.total is not None and usage.total >= limits.total


def full_roles(limits: QueueLimits, usage: SlotUsage) -> frozenset[str]:
    """Return the roles that use all of their slots."""
    return frozenset(role for role, limit in limits.by_role.items() if usage.by_role.get(role, 0) >= limit)


def has_room(limits: QueueLimits, usage: SlotUsage, role: str) -> bool:
    """Return whether `role` can get a slot."""
    return not is_full(limits, usage) and role not in full_roles(limits, usage)


def wait_reason(limits: QueueLimits, usage: SlotUsage, role: str, *, served: bool) -> str:
    """Return why a request of `role` waits, such as `12 of 12`."""
    if role in full_roles(limits, usage):
        return f"{usage.by_role[role]} of {limits.by_role[role]}"
    if is_full(limits, usage):
        return f"{usage.total} of {limits.total} over all roles"
    return "other tasks are first" if served else "no worker serves the role"


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingRole:
    """The requests of one role that wait."""

    requests: int
    """Their number: one for each task with nodes that wait."""
    since: float
    """When the oldest of them arrived, in seconds since the Unix epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """An attempt that holds a slot."""

    task_id: str
    run_id: str
    node_id: str
    epoch: int
    role: str
    at: float
    """When it got the slot, in seconds since the Unix epoch."""
    renewals: int = 0
    """How often attempts of the queue had asked again for a slot that they held when this one was read."""

    @property
    def key(self) -> tuple[str, str, int]:
        """Task, node and epoch."""
        return self.task_id, self.node_id, self.epoch

    @property
    def slot(self) -> Slot:
        """The slot."""
        return Slot(node_id=self.node_id, epoch=self.epoch, role=self.role)


class SlotStore:
    """The slots of one queue in one namespace. Raises StoreUnavailable if MongoDB does not respond."""

    def __init__(self, db: Database, *, namespace_id: str, queue: str) -> None:
        stored = durable(db)
        self._slots = stored.slots
        self._requests = stored.slot_requests
        self._turns = Turns(db)
        self._id = json.dumps([namespace_id, queue])

    @translate_errors
    async def prepare(self) -> None:
        """Create the document of the queue, and the index of its requests."""
        await ensure_index(self._requests, [("queue", ASCENDING), *_ORDER], "ix_slot_requests")
        empty = {"total": 0, "counts": {}, "turn": 0, "holders": []}
        with suppress(DuplicateKeyError):
            await self._slots.update_one({"_id": self._id}, {"$setOnInsert": empty}, upsert=True)

    @translate_errors
    async def usage(self) -> SlotUsage:
        """Return how many slots are in use."""
        stored = await self._slots.find_one({"_id": self._id}, _USAGE) or {}
        counts = {_role(field): count for field, count in (stored.get("counts") or {}).items()}
        return SlotUsage(total=stored.get("total", 0), by_role=counts, turn=stored.get("turn", 0))

    @translate_errors
    async def grant(self, request: SlotRequest, limits: QueueLimits, at: float) -> bool:
        """Give the attempt a slot if the limits allow it.

        Return whether it holds one, possibly from an earlier call.
        """
        counter = _counter(request.role)
        free: Fields = {"_id": self._id, "holders": {"$not": {"$elemMatch": _attempt_key(request)}}}
        if limits.total is not None:
            free["total"] = {"$lt": limits.total}
        if request.role in limits.by_role:
            free[counter] = {"$not": {"$gte": limits.by_role[request.role]}}
        holder = {**_attempt_key(request), "run_id": request.run_id, "role": request.role, "at": at}
        done = await self._slots.update_one(
            free, {"$push": {"holders": holder}, "$inc": {"total": 1, counter: 1}}
        )
        return bool(done.modified_count) or await self._renew(request)

    @translate_errors
    async def renew(self, request: SlotRequest) -> bool:
        """Return whether the attempt holds a slot.

        If it does, `release_unused` frees no holder that was read before.
        """
        return await self._renew(request)

    async def _renew(self, request: SlotRequest) -> bool:
        held = {"_id": self._id, "holders": {"$elemMatch": _attempt_key(request)}}
        return bool((await self._slots.update_one(held, {"$inc": {"renewals": 1}})).matched_count)

    @translate_errors
    async def release(self, task_id: str, slot: Slot) -> bool:
        """Free the slot of an attempt. Return False if it holds none."""
        attempt = {"task_id": task_id, "node_id": slot.node_id, "epoch": slot.epoch}
        if slot.withdrawn:
            await self._requests.delete_many({"queue": self._id, **attempt})
        return await self._release(attempt, slot.role, {})

    @translate_errors
    async def release_unused(self, holder: Holder) -> bool:
        """Free a slot that nothing uses. Return False if an attempt has renewed its slot since `holder` was read."""
        attempt = {"task_id": holder.task_id, "node_id": holder.node_id, "epoch": holder.epoch}
        return await self._release(attempt, holder.role, {"renewals": holder.renewals or None})

    async def _release(self, attempt: Fields, role: str, fence: Fields) -> bool:
        held = {"_id": self._id, "holders": {"$elemMatch": {**attempt, "role": role}}, **fence}
        done = await self._slots.update_one(
            held, {"$pull": {"holders": attempt}, "$inc": {"total": -1, _counter(role): -1}}
        )
        return bool(done.modified_count)

    @translate_errors
    async def release_task(self, task_id: str) -> int:
        """Free all slots of a task and remove its requests. Return the number of slots."""
        await self._requests.delete_many({"queue": self._id, "task_id": task_id})
        own = [holder for holder in await self.holders() if holder.task_id == task_id]
        return sum([await self.release(task_id, holder.slot) for holder in own])

    @translate_errors
    async def holders(self) -> list[Holder]:
        """Return the attempts that hold a slot."""
        stored = await self._slots.find_one({"_id": self._id}, {"holders": 1, "renewals": 1}) or {}
        renewals = stored.get("renewals", 0)
        return [Holder(**holder, renewals=renewals) for holder in stored.get("holders") or ()]

    @translate_errors
    async def enqueue(self, request: SlotRequest, at: float) -> None:
        """Let a request wait. It replaces an earlier one of the same task and role, and keeps its place.

        It does not replace a later one. The activity of a request that the workflow has withdrawn may still
        run, and the workflow does not repeat the later request for a minute.

        Its turn is the one after the present turn, so that a task that gets a slot waits for all others
        before the next.
        """
        own = dict(zip(_REQUEST, (getattr(request, name) for name in _REQUEST), strict=True))
        turn = (await self.usage()).turn + 1
        first = {"queue": self._id, "turn": turn, "since": moment(at)}
        key = json.dumps([self._id, request.task_id, request.role])
        same: Fields = {"_id": key, "asked_at": {"$not": {"$gt": request.asked_at}}}
        for _ in range(
            2
        ):  # The insert fails if there is a later request, or if another engine has just inserted one.
            with suppress(DuplicateKeyError):
                await self._requests.update_one(same, {"$set": own, "$setOnInsert": first}, upsert=True)
                return

    @translate_errors
    async def dequeue(self, request: SlotRequest) -> None:
        """Remove a request that got its slot, and begin its turn."""
        query = {"queue": self._id, **_attempt_key(request)}
        stored = await self._requests.find_one_and_delete(query)
        if stored is not None:
            await self._slots.update_one({"_id": self._id}, {"$max": {"turn": stored["turn"]}})

    @translate_errors
    async def waiting(self, *, without: Collection[str] = (), most: int = PAGE) -> list[SlotRequest]:
        """Return the first waiting requests, except for roles in `without`: by turn, then priority, then time."""
        wanted: Fields = {"queue": self._id}
        if without:
            wanted["role"] = {"$nin": sorted(without)}
        found = self._requests.find(wanted, dict.fromkeys(_REQUEST, 1) | {"_id": 0}).sort(_ORDER).limit(most)
        return [SlotRequest(**request) async for request in found]

    @translate_errors
    async def waiting_by_role(self) -> dict[str, WaitingRole]:
        """Return how many requests wait, and how long, by role."""
        grouped = {"_id": "$role", "requests": {"$sum": 1}, "since": {"$min": "$since"}}
        rows = await aggregated(self._requests, [{"$match": {"queue": self._id}}, {"$group": grouped}])
        return {
            row["_id"]: WaitingRole(requests=row["requests"], since=utc(row["since"]).timestamp())
            for row in rows
        }

    @translate_errors
    async def is_used(self) -> bool:
        """Return whether an attempt holds a slot or a request waits."""
        held = await self._slots.find_one({"_id": self._id, "total": {"$gt": 0}}, {"_id": 1})
        return held is not None or await self._requests.find_one({"queue": self._id}, {"_id": 1}) is not None

    @translate_errors
    async def requests_after(self, last: str) -> list[tuple[str, str]]:
        """Return the key and the task of the next few requests after the key `last`, in the order of the keys."""
        query = {"queue": self._id, "_id": {"$gt": last}}
        found = self._requests.find(query, {"task_id": 1}).sort("_id", ASCENDING).limit(_CHECKED)
        return [(request["_id"], request["task_id"]) async for request in found]

    async def take_turn(self, owner: str, seconds: float) -> bool:
        """Reserve the check for leaks for `owner`. Return False if another engine has reserved it."""
        return await self._turns.take(f"slots:{self._id}", owner, seconds)


def _attempt_key(request: SlotRequest) -> Fields:
    return {"task_id": request.task_id, "node_id": request.node_id, "epoch": request.epoch}


def _counter(role: str) -> str:
    """Return the path of a role's counter. A role may contain dots, but no `~`."""
    return f"counts.{_PREFIX}{role.replace('.', '~')}"


_PREFIX = "r_"
"""Begins every counter, because a role may be a number, which a path takes for a position."""


def _role(field: str) -> str:
    return field.removeprefix(_PREFIX).replace("~", ".")
