"""Storage of a task's variables in MongoDB: each validated change is one update (spec: CoordinatorAdapters).

The update's own filter contains its preconditions, so no change is written partially and no concurrent write is lost.
If the filter matches nothing, FlowKit reads the document afterwards to find the cause.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from pymongo import ReturnDocument
from pymongo.errors import PyMongoError

from flowkit.adapters.mongo import code_of, translate_errors, unavailable, with_room
from flowkit.adapters.tasks.room import make_room
from flowkit.adapters.vars import changes, rules
from flowkit.core.instruments import STORED_BYTES, is_measured
from flowkit.errors import AdapterError, StoreUnavailable
from flowkit.validation.arguments import require, task_id_problem

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flowkit.adapters.tasks.attempts import EntryWrite
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.adapters.vars.changes import Tree, VarsChange
    from flowkit.adapters.vars.rules import SizeReservation

_MAX_WRITES = 20
"""Maximum number of updates for one write. Each may fail because the document changed after it was read."""

_MAX_PRUNES = 20
"""Maximum number of updates for one pruning."""

_NOT_READ: Tree = {}
"""Represents a document that was updated without reading its previous content."""

_VARS = {"_id": 0, changes.ROOT: 1}
_SIZES = {rules.BOUND: 1, rules.CORRECTED: 1}
_ENTRIES = dict.fromkeys(
    (
        f"graph.nodes.{name}"
        for name in ("node_id", "attempt_epoch", "run_id", "status", "applied_generation", "vars_write")
    ),
    1,
)


class Variables:
    """The variables of the tasks in one database."""

    def __init__(self, tasks: TaskStore, now: Callable[[], datetime] | None = None) -> None:
        self._store = tasks
        self._tasks = tasks.database.tasks
        self._now = now or (lambda: datetime.now(UTC))
        self._last = datetime.min.replace(tzinfo=UTC)

    async def write(self, task_id: str, change: VarsChange, write: EntryWrite | None = None) -> bool | None:
        """Apply `change`, in the same update as the fields of the attempt to which `write` belongs.

        Return None if the effect is counted already. Otherwise, return True if the update read the document and the
        task had no variables before, and False in all other cases. Raise AdapterError, which names the conflicting path
        or the unknown task.
        """
        reserved = rules.reserve_within_bound(change)
        for _ in range(_MAX_WRITES):
            before = await self._update(task_id, change, write, reserved) if reserved else None
            if before is not None:
                STORED_BYTES.add("variables", amount=rules.growth_of(change) if is_measured() else 0)
                return before is not _NOT_READ and not _variables(before)
            document = await self._document(task_id, {**_VARS, **_SIZES, **_ENTRIES})
            if write and await write.settle(document, self._store.attempts):
                return None
            if problem := rules.conflict(_variables(document), change):
                raise AdapterError(f"vars.{change.operation}: {problem}")
            reserved = rules.reserve(document.get("coordinator") or {}, change)
        raise StoreUnavailable(f"the variables of task {task_id!r} change too often; try again")

    async def read(self, task_id: str) -> Tree:
        """Return all variables of a task. Raise AdapterError if the task is unknown or the task id is invalid."""
        require(task_id_problem(task_id), error=AdapterError)
        return _variables(await self._document(task_id, _VARS))

    async def prune(self, task_id: str) -> list[str]:
        """Remove all objects that contain no leaf and return their paths. Keep objects that were filled meanwhile."""
        for _ in range(_MAX_PRUNES):
            empty = rules.empty_objects(await self.read(task_id))
            if not empty or await self._remove(task_id, empty):
                return sorted(map(changes.full, empty))
        return []

    @translate_errors
    async def _remove(self, task_id: str, empty: Tree) -> bool:
        still = {changes.full(path): value for path, value in empty.items()}
        done = await self._tasks.update_one(
            {"id": task_id, **still},
            {"$unset": dict.fromkeys(still, ""), "$set": {"updated_at": self.moment()}},
        )
        return bool(done.matched_count)

    async def _update(
        self, task_id: str, change: VarsChange, write: EntryWrite | None, reserved: SizeReservation
    ) -> Any:
        """Update the document. Return its previous content, or `_NOT_READ`, or None if the filter matched nothing."""
        if write is None and not change.paths:
            return await self._document(task_id, _VARS)
        condition, update = (
            _condition(task_id, change, write, reserved),
            self._fields(change, write, reserved),
        )
        sees = change.operation == "merge" and len(change.sets) > 1
        perform = partial(self._update_seen if sees else self._tasks.update_one, condition, update)
        room = partial(make_room, self._tasks, task_id)
        done = await self._guarded(change, lambda: with_room(perform, room))
        if sees:
            return done
        return _NOT_READ if done.matched_count else None

    async def _update_seen(self, condition: Tree, update: Tree) -> Any:
        return await self._tasks.find_one_and_update(
            condition, update, projection={"id": 1, changes.ROOT: 1}, return_document=ReturnDocument.BEFORE
        )

    async def _guarded(self, change: VarsChange, call: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result of `call()`, raising driver errors as FlowKit errors.

        A driver's message may contain values, so the FlowKit error contains only its type or code.
        """
        try:
            return await call()
        except PyMongoError as error:
            if unavailable(error):
                raise StoreUnavailable(f"MongoDB is unavailable ({type(error).__name__})") from None
            raise AdapterError(
                f"vars.{change.operation}: MongoDB rejected the write to {_some(change.paths)} (code {code_of(error)})"
            ) from None

    def _fields(self, change: VarsChange, write: EntryWrite | None, reserved: SizeReservation) -> Tree:
        sets = {changes.full(path): value for path, value in change.sets.items()}
        unsets = dict.fromkeys(map(changes.full, change.removes), "")
        node = (write.sets if write else {}) | {"updated_at": self.moment()}
        update: Tree = {"$set": node | sets}
        if adds := {changes.full(path): amount for path, amount in change.adds.items()} | reserved.adds:
            update["$inc"] = adds
        if removes := unsets | (write.unsets if write else {}):
            update["$unset"] = removes
        return update

    @translate_errors
    async def _document(self, task_id: str, shown: Tree) -> Tree:
        found: Tree | None = await self._tasks.find_one({"id": task_id}, shown)
        if found is None:
            raise AdapterError(f"there is no task {task_id!r}")
        return found

    def moment(self) -> datetime:
        """Return the current time, at least a millisecond after the last result, so `updated_at` always increases."""
        now = self._now()
        now = now.replace(microsecond=now.microsecond // 1000 * 1000)
        self._last = max(now, self._last + timedelta(milliseconds=1))
        return self._last


def _condition(task_id: str, change: VarsChange, write: EntryWrite | None, reserved: SizeReservation) -> Tree:
    above = _no_list_or_nothing if change.removes else _object_or_nothing
    filters = [_object_or_nothing(changes.ROOT)] if change.paths else []
    filters += [above(changes.full(path)) for path in change.ancestors]
    filters += [_number_or_nothing(changes.full(path)) for path in change.adds]
    filters += [
        _with_room_for(changes.full(path), by) for path, by in change.adds.items() if isinstance(by, int)
    ]
    filters += [reserved.condition] if reserved.condition else []
    condition: Tree = {"id": task_id} | (write.fence if write else {})
    return condition | ({"$and": filters} if filters else {})


def _object_or_nothing(where: str) -> Tree:
    return {"$or": [{where: {"$exists": False}}, {where: {"$type": "object"}}], **_no_list(where)}


def _number_or_nothing(where: str) -> Tree:
    return {"$or": [{where: {"$exists": False}}, {where: {"$type": "number"}}], **_no_list(where)}


def _with_room_for(where: str, by: int) -> Tree:
    """Return the filter for a sum that fits into 64 bits. Not every server rejects a sum that does not."""
    fits = {"$lte": changes.LARGEST_INT - by} if by > 0 else {"$gte": changes.SMALLEST_INT - by}
    other: list[Tree] = [
        {where: {"$exists": False}},
        {where: {"$type": "double"}},
        {where: {"$type": "decimal"}},
    ]
    return {"$or": [*other, {where: fits}]}


def _no_list_or_nothing(where: str) -> Tree:
    return {"$or": [{where: {"$exists": False}}, _no_list(where)]}


def _no_list(where: str) -> Tree:
    """Return a filter that excludes lists. It is necessary because `$type` also matches the elements of a list."""
    return {where: {"$not": {"$type": "array"}}}


def _variables(document: Tree) -> Tree:
    found = (document.get("coordinator") or {}).get("vars", {})
    if not isinstance(found, dict):
        raise AdapterError(
            f"{changes.ROOT} holds {changes.kind(found)}, not an object: another program has overwritten it"
        )
    return found


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (" and more" if len(paths) > 3 else "")
