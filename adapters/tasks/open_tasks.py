"""Queries for open task documents, the turns of the sweep, and the close of tasks whose workflow is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pymongo import ASCENDING

from flowkit.adapters.mongo import Database, aggregated, durable, ensure_index, iso, moment, translate_errors
from flowkit.adapters.tasks.cancel_flags import set_of_task_flag
from flowkit.adapters.tasks.close import count_ended, counted_fields
from flowkit.adapters.tasks.fields import NODE_STATES, PINNED, has_ended_since, nodes_of
from flowkit.adapters.turns import Turns
from flowkit.models import OPEN_NODE_STATUSES, OPEN_TASK_STATUSES, NodeStatus, SkipReason, TaskStatus
from flowkit.models.waits import FIELDS as WAIT_FIELDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.core.utils import Fields


_NOT_ENDED: Fields = {"finished_at": None}
_NOT_CLOSED: Fields = {"status": {"$in": [*OPEN_TASK_STATUSES, TaskStatus.FAILED.value]}, **_NOT_ENDED}
"""Filter for tasks that may still change. A failed task shows its status before its last attempts have ended."""

_OPEN = [("finished_at", ASCENDING), ("namespace_id", ASCENDING), ("_id", ASCENDING)]
"""Keys of the index for these queries. It contains only tasks that have not ended, in the order of the pages."""

_OF_ONE_PAGE = 200
_STATES_OF_ONE_PAGE = 50
"""How many documents are read at once with the states of their nodes. Some are large."""
_CHANGED = {"status": {"$in": [status.value for status in TaskStatus]}}
"""Filter with which MongoDB finds the tasks that have changed since a moment by the index of the statuses."""
_PROJECTION = {
    "id": 1,
    "run_id": 1,
    "first_run_id": 1,
    "namespace_id": 1,
    "updated_at": 1,
    "coordinator.liveness.silent_nodes": 1,
}
_STATES = {
    "status": 1,
    "finished_at": 1,
    PINNED: 1,
    **{f"graph.nodes.{name}": 1 for name in ("type", "status", *WAIT_FIELDS)},
}


class OpenTasks:
    """Open tasks of one database. Raises StoreUnavailable if MongoDB does not respond."""

    def __init__(self, db: Database) -> None:
        self._tasks = durable(db).tasks
        self._turns = Turns(db)

    @translate_errors
    async def prepare(self) -> None:
        """Create the index with which no query here reads a task that has ended."""
        await ensure_index(self._tasks, _OPEN, "ix_task_open", partialFilterExpression=_NOT_ENDED)

    async def pages(self, *, namespace_id: str, database_id: str = "") -> AsyncIterator[list[Fields]]:
        """Yield pages of open documents that belong to a namespace or to none.

        Each document has `id`, `run_id`, `first_run_id`, `namespace_id`, `updated_at`, and its silent
        nodes. If `namespace_id` is empty, yield only documents without a namespace. Omit documents with
        another database id, which come from a copy.
        """
        async for page in self._pages(_NOT_CLOSED | _owned_filter(namespace_id, database_id)):
            yield page

    async def states(
        self, *, since: float | None = None, namespace_id: str, database_id: str
    ) -> AsyncIterator[list[Fields]]:
        """Yield pages of the same documents, with their statuses and with what says how far each node is.

        With `since`, yield those that have changed at that time or later instead, also of tasks that have ended. Their
        times are those of the processes that have changed them, and some write late.
        """
        wanted = _NOT_CLOSED if since is None else {**_CHANGED, "updated_at": {"$gte": moment(since)}}
        owned = _owned_filter(namespace_id, database_id)
        cursor = self._tasks.find(wanted | owned, _STATES, batch_size=_STATES_OF_ONE_PAGE)
        while page := await self._read_page(cursor):
            yield page

    @translate_errors
    async def _read_page(self, cursor: Any) -> list[Fields]:
        found: list[Fields] = await cursor.to_list(_STATES_OF_ONE_PAGE)
        return found

    async def pages_of(self, namespace_id: str) -> AsyncIterator[list[Fields]]:
        """Yield pages of open documents that belong to this namespace."""
        async for page in self._pages({**_NOT_CLOSED, "namespace_id": namespace_id}):
            yield page

    async def _pages(self, wanted: Fields) -> AsyncIterator[list[Fields]]:
        after: Fields = {}
        while page := await self._page({**wanted, **after}):
            yield page
            after = {"_id": {"$gt": page[-1]["_id"]}}

    @translate_errors
    async def _page(self, wanted: Fields) -> list[Fields]:
        found = self._tasks.find(wanted, _PROJECTION).sort("_id", ASCENDING).limit(_OF_ONE_PAGE)
        return [document async for document in found]

    @translate_errors
    async def counts(self) -> dict[str | None, int]:
        """Return the number of open documents by namespace id; None is the key for documents without a namespace."""
        grouped = {"$group": {"_id": "$namespace_id", "count": {"$sum": 1}}}
        rows = await aggregated(self._tasks, [{"$match": _NOT_CLOSED}, grouped])
        return {row["_id"]: row["count"] for row in rows}

    @translate_errors
    async def close_orphan(self, task_id: str, run_id: str | None, reason: str, at: float) -> bool:
        """Close a task whose workflow is gone. Return False if its document has changed meanwhile."""
        unchanged = {"id": task_id, "run_id": run_id, **_NOT_CLOSED}
        stored = await self._tasks.find_one(
            unchanged, {**NODE_STATES, **counted_fields(), "run_id": 1, "status": 1}
        )
        if stored is None:
            return False
        change = {"from": stored["status"], "to": TaskStatus.FAILED.value, "at": iso(at)}
        done = await self._tasks.update_one(
            unchanged | _unchanged_filter(stored),
            {"$set": _orphan_set(stored, reason, at), "$push": {"status_history": change}},
        )
        if done.matched_count:
            nodes = enumerate(nodes_of(stored))
            ended = (node for index, node in nodes if has_ended_since(index, node, stored))
            count_ended(TaskStatus.FAILED, map(_end_of, ended))
        return bool(done.matched_count)

    async def take_turn(self, namespace_id: str, owner: str, seconds: float) -> bool:
        """Reserve the sweep of this namespace for `owner`, as `Turns.take` does."""
        return await self._turns.take(_turn(namespace_id), owner, seconds)

    async def end_turn(self, namespace_id: str, owner: str) -> None:
        """Release the owner's reservation, so that another engine can sweep immediately."""
        await self._turns.end(_turn(namespace_id), owner)


def _owned_filter(namespace_id: str, database_id: str) -> Fields:
    """Return the filter for documents that belong to this namespace and database, or name none."""
    owned: Fields = {"namespace_id": {"$in": [namespace_id or None, None]}}
    if database_id:
        owned["database_id"] = {"$in": [database_id, None]}
    return owned


def is_open(document: Fields) -> bool:
    """Return whether the task of a document may still change."""
    return document.get("finished_at") is None and document.get("status") in _NOT_CLOSED["status"]["$in"]


def _turn(namespace_id: str) -> str:
    return f"sweep:{namespace_id or 'unknown'}"


def _unchanged_filter(stored: Fields) -> Fields:
    """Return the filter for a document in which every open node still has the status that was read."""
    return {
        f"graph.nodes.{index}.status": node["status"]
        for index, node in enumerate(nodes_of(stored))
        if node.get("status") in OPEN_NODE_STATUSES
    }


def _orphan_set(stored: Fields, reason: str, at: float) -> Fields:
    """Return the `$set` for a task whose workflow is gone: it sets cancel flags and ends open nodes (spec: sweep)."""
    fields: Fields = {
        "status": TaskStatus.FAILED.value,
        "reason": reason,
        "closed_run_id": stored.get("run_id"),
        "finished_at": moment(at),
        "updated_at": moment(at),
        "next_retry_at_ms": None,
        **set_of_task_flag(reason, at, stored.get("run_id")),
    }
    for index, node in enumerate(nodes_of(stored)):
        if node.get("status") in OPEN_NODE_STATUSES:
            fields |= _ended_set(f"graph.nodes.{index}", begun=bool(node.get("attempt_epoch")), at=at)
    return fields


def _end_of(node: Fields) -> tuple[str, str]:
    """Return role and status of a node of a task whose workflow is gone."""
    status = node.get("status") or ""
    if status in OPEN_NODE_STATUSES:
        status = _status_after(begun=bool(node.get("attempt_epoch"))).value
    return node.get("type") or "", status


def _status_after(*, begun: bool) -> NodeStatus:
    return NodeStatus.CANCELLED if begun else NodeStatus.SKIPPED


def _ended_set(path: str, *, begun: bool, at: float) -> Fields:
    status = _status_after(begun=begun)
    fields: Fields = {f"{path}.status": status.value, f"{path}.finished_at": moment(at)}
    if begun:
        return fields | {f"{path}.last_error": None}
    return fields | {f"{path}.skip_reason": SkipReason.TASK_FAILED.value}
