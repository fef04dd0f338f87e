"""Storage access of `merge.generic` and `metrics.aggregate`, which summarize the results of nodes.

Both are idempotent: they replace what they wrote before.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pymongo.errors import DuplicateKeyError

from flowkit.adapters.entries import generation_filter, scan_filter
from flowkit.adapters.mongo import Database, durable, iso, moment, translate_errors
from flowkit.adapters.tasks.reset import read_first_epochs
from flowkit.errors import AdapterError, Fenced
from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
    from datetime import datetime

    from flowkit.adapters.tasks.attempts import NodeWrite

_NODE_IDS = {"_id": 0, "graph.nodes.node_id": 1}


class Aggregates:
    """Summaries of artifacts and metrics of the tasks in one database."""

    def __init__(self, db: Database) -> None:
        self._db = durable(db)

    @translate_errors
    async def place_of(self, task_id: str, node_id: str | None = None) -> int:
        """Return the index of a node in its graph, or 0 without a `node_id`.

        Raise AdapterError if the task does not exist or has no such node.
        """
        found = await self._db.tasks.find_one({"id": task_id}, _NODE_IDS)
        if found is None:
            raise AdapterError(f"there is no task {task_id!r}")
        nodes = [node.get("node_id") for node in found.get("graph", {}).get("nodes", [])]
        if node_id is not None and node_id not in nodes:
            raise AdapterError(f"task {task_id!r} has no node {node_id!r}")
        return 0 if node_id is None else nodes.index(node_id)

    @translate_errors
    async def merged(
        self,
        task_id: str,
        from_nodes: Sequence[str],
        at: float,
        first_epochs: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        """Return the meta of a merge: which of these nodes are complete, and how many batches they have.

        `first_epochs` are those of the generations of nodes, if the caller knows them.
        """
        if first_epochs is None:
            first_epochs = await read_first_epochs(self._db.tasks, task_id, from_nodes)
        cursor = self._db.artifacts.find(
            scan_filter(task_id, list(from_nodes), {}, first_epochs),
            {"_id": 0, "node_id": 1, "status": 1, "batch_uid": 1},
        )
        complete, partials, uids = set(), 0, set()
        async for artifact in cursor:
            if artifact.get("status") == "complete":
                complete.add(artifact["node_id"])
            elif artifact.get("status") == "partial":
                partials += 1
                uids.add(artifact.get("batch_uid"))
        return {
            "merged_from": list(from_nodes),
            "complete_nodes": sorted(complete),
            "partial_batches": partials,
            "distinct_batch_uids": len(uids - {None}),
            "merged_at": iso(at),
        }

    @translate_errors
    async def store_merged(self, task_id: str, node_id: str, meta: dict[str, Any], at: float) -> None:
        """Store `meta` in the complete marker of `node_id`. Artifacts of batches stay unchanged."""
        key = {"task_id": task_id, "node_id": node_id, "batch_uid": {"$exists": False}}
        update = {
            "$set": {"status": "complete", "meta": meta, "updated_at": moment(at)},
            "$setOnInsert": {"attempt_epoch": 0, "created_at": moment(at)},
        }
        try:
            await self._db.artifacts.update_one(key, update, upsert=True)
        except DuplicateKeyError:
            await self._db.artifacts.update_one(key, update, upsert=True)

    @translate_errors
    async def aggregated(
        self, task_id: str, node_id: str, mode: str, first_epochs: Mapping[str, int] | None = None
    ) -> dict[str, float]:
        """Return the sum or mean of each of a node's metrics, by key, over all batches that did not fail.

        `first_epochs` are those of the generations of nodes, if the caller knows them.
        """
        if first_epochs is None:
            first_epochs = await read_first_epochs(self._db.tasks, task_id, [node_id])
        own = {"task_id": task_id, "node_id": node_id, **generation_filter(first_epochs.get(node_id, 0))}
        cursor = self._db.metrics_raw.find({**own, "failed": {"$ne": True}}, {"_id": 0, "metrics": 1})
        return await _folded((row.get("metrics") or {} async for row in cursor), mode)

    @translate_errors
    async def store_stats(
        self, task_id: str, node_id: str, stats: dict[str, float], at: datetime, write: NodeWrite | None
    ) -> None:
        """Replace the stats of a node. Raise AdapterError if the task or the node does not exist.

        `write` is the attempt of the function node that aggregates, if any. Raise Fenced if a newer attempt has
        replaced it. If an earlier try of the same attempt has finished its node, the stats are stored already.
        """
        path = f"graph.nodes.{await self.place_of(task_id, node_id)}"
        held = {"id": task_id} if write is None else write.entry.running_filter(write.run_id)
        fields = {f"{path}.stats": stats, f"{path}.stats_cached_at": at, "updated_at": at}
        same_node: dict[str, Any] = {f"{path}.node_id": node_id}
        done = await self._db.tasks.update_one({**held, **same_node}, {"$set": fields})
        if not done.matched_count and not await self._finished(write):
            raise Fenced(f"a newer attempt of the node that aggregates {node_id!r} has replaced this one")

    async def _finished(self, write: NodeWrite | None) -> bool:
        """Return True if this attempt has already finished its node."""
        if write is None:
            return False
        own = {
            **write.entry.taken_filter(write.run_id),
            write.entry.path_of("status"): NodeStatus.FINISHED.value,
        }
        return await self._db.tasks.find_one(own, {"_id": 1}) is not None


async def _folded(rows: AsyncIterator[dict[str, Any]], mode: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    async for metrics in rows:
        for key, value in _numbers(metrics.items()):
            sums[key] = sums.get(key, 0.0) + value
            counts[key] = counts.get(key, 0) + 1
    return {key: total / counts[key] for key, total in sums.items()} if mode == "mean" else sums


def _numbers(items: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, float]]:
    """Yield the items whose value is a finite number, a boolean or a text that represents a finite number."""
    for key, value in items:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
        if math.isfinite(number):
            yield key, number
