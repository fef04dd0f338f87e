"""Starts nodes again in a task document, in new generations, as an action or a rerun of the task asks for.

A reset reserves an epoch of each node by a compare-and-set. Attempts of the earlier generation have lower
epochs, so their later writes to the entry do not match. Readers ignore rows with lower epochs
(`entries.generation_filter`). Deleting these rows is clean-up, except for external workers, which read all
rows that there are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pymongo import UpdateOne

from flowkit.adapters.mongo import moment
from flowkit.adapters.tasks.cancel_flags import NODE_FLAGS
from flowkit.adapters.tasks.fields import ATTEMPT_ENDED_AT, FAILURES, PAUSED, nodes_of
from flowkit.errors import Fenced
from flowkit.models import AttemptInput, NodeStatus, waits

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.core.utils import Fields
    from flowkit.models import NodeReset, ResetNodes


_NODES_OF_ONE_UPDATE = 100
_ENTRIES: Fields = {
    "_id": 0,
    **{f"graph.nodes.{name}": 1 for name in ("node_id", "attempt_epoch", "first_epoch", "reset_by")},
}
_LEFT_OVER = (
    *("finished_at", "started_at", "run_id", "skip_reason", "reason_code", "liveness"),
    *("failed_batches", FAILURES, *waits.FIELDS, PAUSED, "held_until_ms", ATTEMPT_ENDED_AT, *NODE_FLAGS),
)
"""Fields of a node that its earlier generation has left."""


async def read_first_epochs(
    tasks: Any, task_id: str, node_ids: Collection[str] | None = None
) -> dict[str, int]:
    """Return the first epochs of the generations of nodes, or of all nodes, without those with one generation."""
    wanted = {"_id": 0, "graph.nodes.node_id": 1, "graph.nodes.first_epoch": 1}
    stored = await tasks.find_one({"id": task_id, "graph.nodes.first_epoch": {"$gt": 0}}, wanted)
    return {
        node["node_id"]: node["first_epoch"]
        for node in nodes_of(stored or {})
        if node.get("first_epoch") and (node_ids is None or node["node_id"] in node_ids)
    }


class Resetting:
    """Writes new generations of nodes to the collection `tasks`."""

    def __init__(self, tasks: Any, artifacts: ArtifactStore) -> None:
        self._tasks = tasks
        self._artifacts = artifacts

    async def write(self, record: ResetNodes) -> list[int]:
        """Write that nodes start again, in new generations or in theirs. Return the epochs that they have reserved.

        A repetition returns the same.

        Raise Fenced if the task has ended or belongs to a newer run, and BadMetrics, BatchTooLarge or BadBatchUid,
        before the first write, for an outcome that cannot be stored.
        """
        for node in record.nodes:
            if node.outcome is not None:
                self._artifacts.check_outcome(node.outcome)
        epochs = await self._reserve(record)
        reserved = zip(record.nodes, epochs, strict=True)
        by_node = {node.node_id: epoch for node, epoch in reserved if not node.keeps}
        await self._artifacts.delete_earlier_generations(record.task_id, by_node, record.at)
        for node, epoch in zip(record.nodes, epochs, strict=True):
            if node.outcome is not None:
                await self._complete(record, node, epoch)
        return epochs

    async def _reserve(self, record: ResetNodes) -> list[int]:
        """Reserve an epoch of each node. Attempts may take epochs at the same time, so read and try again."""
        while True:
            entries = await self._read(record)
            record = await self._with_whole_io(record)
            epochs = [_reserved(node, entries[node.index], record) for node in record.nodes]
            missing = [
                (node, epoch)
                for node, epoch in zip(record.nodes, epochs, strict=True)
                if entries[node.index].get("reset_by") != _identity(record)
            ]
            if not missing:
                return epochs
            for start in range(0, len(missing), _NODES_OF_ONE_UPDATE):
                some = missing[start : start + _NODES_OF_ONE_UPDATE]
                await self._write_some(record, some, entries)

    async def _with_whole_io(self, record: ResetNodes) -> ResetNodes:
        """Return the record with the whole `io` of nodes whose entry has none: MongoDB adds no field to null."""
        changed = [node for node in record.nodes if node.io is not None]
        if not changed:
            return record
        found = await self._tasks.find_one(_open_filter(record), {"_id": 0, "graph.nodes.io": 1}) or {}
        stored = [node.get("io") for node in nodes_of(found)]
        return replace(
            record,
            nodes=[
                replace(node, io=None, fields={**node.fields, "io": node.io})
                if node.io is not None and not isinstance(stored[node.index], dict)
                else node
                for node in record.nodes
            ],
        )

    async def _read(self, record: ResetNodes) -> list[Fields]:
        stored = await self._tasks.find_one(_open_filter(record), _ENTRIES)
        entries = nodes_of(stored or {})
        fits = all(
            node.index < len(entries) and entries[node.index].get("node_id") == node.node_id
            for node in record.nodes
        )
        if stored is None or not fits:
            raise Fenced(f"task {record.task_id!r} has ended, or a newer run has opened it")
        return entries

    async def _write_some(
        self, record: ResetNodes, some: Sequence[tuple[NodeReset, int]], entries: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write the nodes whose entries have not changed since they were read: in one update, or else one by one."""
        fence, sets, unsets = _open_filter(record), dict[str, Any](), dict[str, Any]()
        for node, epoch in some:
            fence |= _unchanged_filter(node, entries[node.index])
            sets |= _reset_set(record, node, epoch)
            unsets |= _reset_unset(node)
        done = await self._tasks.update_one(fence, {"$set": sets, "$unset": unsets})
        if done.matched_count or len(some) == 1:
            return
        await self._tasks.bulk_write(
            [
                UpdateOne(
                    _open_filter(record) | _unchanged_filter(node, entries[node.index]),
                    {"$set": _reset_set(record, node, epoch), "$unset": _reset_unset(node)},
                )
                for node, epoch in some
            ],
            ordered=False,
        )

    async def _complete(self, record: ResetNodes, node: NodeReset, epoch: int) -> None:
        """Store the outcome of a node, and then its end, so that a child that sees the end finds everything."""
        assert node.outcome is not None
        attempt = AttemptInput(
            task_id=record.task_id, node_id=node.node_id, index=node.index, role="", epoch=epoch
        )
        await self._artifacts.store_outcome(attempt, node.outcome, record.at)
        path = f"graph.nodes.{node.index}"
        own = {f"{path}.node_id": node.node_id, f"{path}.attempt_epoch": epoch}
        ended = {f"{path}.status": NodeStatus.FINISHED.value, f"{path}.finished_at": moment(record.at)}
        await self._tasks.update_one(_open_filter(record) | own, {"$set": ended})


def _open_filter(record: ResetNodes) -> Fields:
    return {"id": record.task_id, "run_seq": {"$lte": record.run_seq}, "finished_at": None}


def _identity(record: ResetNodes) -> str:
    """Return the identity of a reset among those of its task.

    A *Reset* of the workflow repeats its actions in another run.
    """
    return f"{record.run_id}/{record.revision}"


def _reserved(node: NodeReset, entry: Mapping[str, Any], record: ResetNodes) -> int:
    if entry.get("reset_by") == _identity(record):
        return int(entry["attempt_epoch" if node.keeps else "first_epoch"])
    return max(node.epoch, (entry.get("attempt_epoch") or 0) + 1)


def _unchanged_filter(node: NodeReset, entry: Mapping[str, Any]) -> Fields:
    path = f"graph.nodes.{node.index}"
    return {f"{path}.node_id": node.node_id, f"{path}.attempt_epoch": entry.get("attempt_epoch") or 0}


def _reset_set(record: ResetNodes, node: NodeReset, epoch: int) -> Fields:
    fields: Fields = {
        "status": NodeStatus.QUEUED.value,
        "attempt_epoch": epoch,
        **({} if node.keeps else {"first_epoch": epoch}),
        "generation": node.generation,
        "reset_by": _identity(record),
        "lease": {},
        "last_error": None,
        "next_retry_at_ms": None,
        **{f"io.{name}": value for name, value in (node.io or {}).items()},
        **node.fields,
    }
    return {f"graph.nodes.{node.index}.{name}": value for name, value in fields.items()}


def _reset_unset(node: NodeReset) -> Fields:
    return {f"graph.nodes.{node.index}.{name}": "" for name in _LEFT_OVER}
