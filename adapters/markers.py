"""Complete markers for nodes that ended without writing one, so that the nodes that pull from them can finish.

A task may need thousands of markers at once. As for all rows, a higher epoch replaces a marker and a lower epoch
changes nothing. Up-to-date markers are not written again, so a retry continues where the interrupted write stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pymongo import UpdateOne
from pymongo.errors import BulkWriteError

from flowkit.adapters.durability import durable
from flowkit.adapters.mongo import DUPLICATE_KEY, Database, moment, translate_errors
from flowkit.adapters.tasks.record import chunks
from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.adapters.notifications import ArtifactNotifier
    from flowkit.models import NodeRecord

Row = dict[str, Any]

_AT_ONCE = 500


class Markers:
    """Complete markers in the collection `artifacts` of one database. Reports each write to `notifier`."""

    def __init__(self, db: Database, notifier: ArtifactNotifier) -> None:
        self._artifacts = durable(db).artifacts
        self._notifier = notifier

    async def write(self, task_id: str, nodes: Sequence[NodeRecord], at: float) -> None:
        """Write a marker for each of `nodes` that ended without finishing and from which another node pulls."""
        for some in chunks([node for node in nodes if _needs_marker(node)], _AT_ONCE):
            for node in await self._put(task_id, some, at):
                self._notifier.notify(task_id, node.node_id)

    @translate_errors
    async def _put(self, task_id: str, nodes: Sequence[NodeRecord], at: float) -> Sequence[NodeRecord]:
        """Insert markers, replace older ones, and return the nodes whose markers were written.

        The insert comes first because it is the fastest write.
        """
        try:
            await self._artifacts.insert_many([_row(task_id, node, at) for node in nodes], ordered=False)
        except BulkWriteError as error:
            taken = _duplicate_indexes(error)
            older = await self._older(task_id, [nodes[index] for index in sorted(taken)])
            if older:
                replacements = [_replacement(task_id, node, at) for node in older]
                await self._artifacts.bulk_write(replacements, ordered=False)
            return [node for index, node in enumerate(nodes) if index not in taken] + older
        return nodes

    async def _older(self, task_id: str, nodes: Sequence[NodeRecord]) -> list[NodeRecord]:
        """Return the nodes whose stored marker is missing or outdated."""
        cursor = self._artifacts.find(
            {**_marker(task_id), "node_id": {"$in": [node.node_id for node in nodes]}},
            {"_id": 0, "node_id": 1, "attempt_epoch": 1, "meta.ended": 1},
        )
        stored = {row["node_id"]: row async for row in cursor}
        return [node for node in nodes if _is_newer(node, stored.get(node.node_id))]


def _needs_marker(node: NodeRecord) -> bool:
    return node.marker and node.status.ended and node.status is not NodeStatus.FINISHED


def _is_newer(node: NodeRecord, stored: Row | None) -> bool:
    if stored is None:
        return True
    known = (stored.get("attempt_epoch") or 0, (stored.get("meta") or {}).get("ended"))
    return known[0] <= node.epoch and known != (node.epoch, node.status.value)


def _marker(task_id: str) -> Row:
    """Return the filter for the markers of a task. A marker is an artifact without a `batch_uid`."""
    return {"task_id": task_id, "batch_uid": {"$exists": False}}


def _fields(node: NodeRecord, at: float) -> Row:
    ended = {"ended": node.status.value}
    marker = {"status": "complete", "meta": ended, "confirmed": True}
    return {**marker, "updated_at": moment(at), "attempt_epoch": node.epoch}


def _row(task_id: str, node: NodeRecord, at: float) -> Row:
    first = {"task_id": task_id, "node_id": node.node_id, "worker_id": "", "created_at": moment(at)}
    return {**first, **_fields(node, at)}


def _replacement(task_id: str, node: NodeRecord, at: float) -> UpdateOne:
    older = {**_marker(task_id), "node_id": node.node_id, "attempt_epoch": {"$lte": node.epoch}}
    return UpdateOne(older, {"$set": _fields(node, at)})


def _duplicate_indexes(error: BulkWriteError) -> set[int]:
    """Return the indexes of the rows whose key exists already. Raise `error` if it has any other cause."""
    problems = error.details.get("writeErrors", [])
    other = [problem for problem in problems if problem.get("code") != DUPLICATE_KEY]
    if other or not problems or error.details.get("writeConcernErrors"):
        raise error
    return {problem["index"] for problem in problems}
