"""Storage of graphs and params that are too large for the input of a workflow, in parts that fit into a payload."""

from __future__ import annotations

import hashlib
import json
import zlib
from datetime import UTC, datetime
from typing import Any

from pymongo import ASCENDING

from flowkit.adapters.mongo import Database, durable, ensure_index, translate_errors
from flowkit.limits import STORED_PART_BYTES
from flowkit.models import StoredGraph


def pack_task(task: dict[str, Any]) -> bytes:
    """Return graph and params of a task as compressed JSON. Takes time for large graphs."""
    return zlib.compress(json.dumps(task, ensure_ascii=False, separators=(",", ":")).encode())


def unpack_task(content: bytes) -> dict[str, Any]:
    """Return the graph and params that `pack_task` received."""
    task: dict[str, Any] = json.loads(zlib.decompress(content))
    return task


class StoredGraphs:
    """The collection `stored_graphs`. Rows never change, so a task reads the same graph in each of its runs.

    Raises StoreUnavailable if MongoDB does not respond.
    """

    def __init__(self, db: Database) -> None:
        self._rows = durable(db).stored_graphs

    @translate_errors
    async def prepare(self) -> None:
        """Create the index by which `flowkit purge` finds the rows of a task."""
        await ensure_index(self._rows, [("task_id", ASCENDING)], "ix_stored_graphs_task")

    @translate_errors
    async def put(
        self,
        task_id: str,
        content: bytes,
        *,
        namespace_id: str,
        database_id: str,
        schedule_id: str = "",
    ) -> StoredGraph:
        """Store the content of `pack_task` for a task or, with `schedule_id`, for all tasks of a schedule.

        Storing equal content again for the same owner changes only its time, so that `flowkit purge` takes it as new.
        A schedule of the same name in another namespace of Temporal has its own rows.
        """
        digest = hashlib.sha256(content + (namespace_id.encode() if schedule_id else b"")).hexdigest()
        offsets = range(0, len(content), STORED_PART_BYTES)
        for part, offset in enumerate(offsets):
            row = {
                **({"schedule_id": schedule_id} if schedule_id else {"task_id": task_id}),
                "graph_id": digest,
                "part": part,
                "data": content[offset : offset + STORED_PART_BYTES],
                "namespace_id": namespace_id,
            }
            key = {"_id": _row_id(_owner(task_id, schedule_id), digest, part)}
            update = {"$setOnInsert": row, "$set": {"created_at": datetime.now(UTC)}}
            await self._rows.update_one(key, update, upsert=True)
        return StoredGraph(
            graph_id=digest,
            parts=len(offsets),
            size=len(content),
            deployment=database_id,
            schedule_id=schedule_id,
        )

    @translate_errors
    async def part(self, task_id: str, stored: StoredGraph, part: int) -> bytes | None:
        """Return one part of the stored graph of a task, or None if MongoDB does not have it."""
        row_id = _row_id(_owner(task_id, stored.schedule_id), stored.graph_id, part)
        found = await self._rows.find_one({"_id": row_id}, {"data": 1})
        return None if found is None else bytes(found["data"])


def _owner(task_id: str, schedule_id: str) -> str:
    """Return the end of the ids of rows. The line break, which no task id contains, marks a schedule."""
    return f"\n{schedule_id}" if schedule_id else task_id


def _row_id(owner: str, graph_id: str, part: int) -> str:
    return f"{graph_id}.{part}.{owner}"
