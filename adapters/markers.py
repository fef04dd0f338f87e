"""Complete markers of nodes that ended without one, for those who pull from them: thousands at a time.

The rule is that of all rows: a higher epoch replaces, a lower one changes nothing. What is there already is not
written again, so that a repetition goes on where the one before was interrupted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pymongo import UpdateOne
from pymongo.errors import BulkWriteError

from flowkit.adapters.mongo import Database, moment, translate_errors
from flowkit.adapters.tasks.recording import chunks
from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.adapters.notifications import ArtifactNotifier
    from flowkit.models import NodeRecord

Row = dict[str, Any]

_AT_ONCE = 500
_DUPLICATE = 11000


class Markers:
    """Complete markers in the `artifacts` of one database. Tells `news` of those that it has written."""

    def __init__(self, db: Database, news: ArtifactNotifier) -> None:
        self._artifacts = db.artifacts
        self._news = news

    async def write(self, task_id: str, nodes: Sequence[NodeRecord], at: float) -> None:
        """Mark those of `nodes` that ended without finishing although somebody pulls from them."""
        for some in chunks([node for node in nodes if _needs_marker(node)], _AT_ONCE):
            for node in await self._put(task_id, some, at):
                self._news.tell(task_id, node.node_id)

    @translate_errors
    async def _put(self, task_id: str, nodes: Sequence[NodeRecord], at: float) -> Sequence[NodeRecord]:
        """Insert markers, the quickest there is; replace those that are older. Answers what was written."""
        try:
            await self._artifacts.insert_many([_row(task_id, node, at) for node in nodes], ordered=False)
        except BulkWriteError as error:
            taken = _taken_places(error)
            older = await self._older(task_id, [nodes[place] for place in sorted(taken)])
            if older:
                replacements = [_replacement(task_id, node, at) for node in older]
                await self._artifacts.bulk_write(replacements, ordered=False)
            return [node for place, node in enumerate(nodes) if place not in taken] + older
        return nodes

    async def _older(self, task_id: str, nodes: Sequence[NodeRecord]) -> list[NodeRecord]:
        """Those of which the marker that is there says something older."""
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
    """A marker is the artifact without a batch, as external workers write it."""
    return {"task_id": task_id, "batch_uid": {"$exists": False}}


def _fields(node: NodeRecord, at: float) -> Row:
    ended = {"ended": node.status.value}
    return {"status": "complete", "meta": ended, "updated_at": moment(at), "attempt_epoch": node.epoch}


def _row(task_id: str, node: NodeRecord, at: float) -> Row:
    first = {"task_id": task_id, "node_id": node.node_id, "worker_id": "", "created_at": moment(at)}
    return {**first, **_fields(node, at)}


def _replacement(task_id: str, node: NodeRecord, at: float) -> UpdateOne:
    older = {**_marker(task_id), "node_id": node.node_id, "attempt_epoch": {"$lte": node.epoch}}
    return UpdateOne(older, {"$set": _fields(node, at)})


def _taken_places(error: BulkWriteError) -> set[int]:
    """Places of the rows whose key is taken; any other problem is raised."""
    problems = error.details.get("writeErrors", [])
    other = [problem for problem in problems if problem.get("code") != _DUPLICATE]
    if other or not problems or error.details.get("writeConcernErrors"):
        raise error
    return {problem["index"] for problem in problems}
