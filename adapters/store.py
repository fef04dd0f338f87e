"""Task documents: opening, the writes of an attempt, transitions of the workflow, the end.

Every write is idempotent and carries its fence in its own filter: the epoch and open status of a node, the `run_seq`
of a task. What matched nothing is looked into afterwards.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from pymongo import ASCENDING, ReturnDocument
from pymongo.errors import DuplicateKeyError

from flowkit.adapters import documents
from flowkit.adapters.attempt_writes import AttemptWrites
from flowkit.adapters.catalog import Catalog
from flowkit.adapters.mongo import Database, ensure_index, iso, moment, shortened
from flowkit.errors import TaskIdTaken
from flowkit.models import OPEN_TASK_STATUSES, NodeStatus, TaskStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.models import AttemptInput, CloseTask, NodeRecord, OpenTask, RecordTask

DB_FLAG = "db_flag"
"""Cancel reason of a flag that was raised by a direct write to the document."""

_NODES_OF_ONE_UPDATE = 100
_EPOCHS = {"_id": 0, "run_seq": 1, "graph.nodes.node_id": 1, "graph.nodes.attempt_epoch": 1}


class TaskStore:
    """The `tasks` collection of one database.

    Raises StoreUnavailable when MongoDB does not answer (try again) and StoreRefused when it never will.
    """

    def __init__(self, db: Database) -> None:
        self._db = db
        self._tasks = db.tasks
        self._deployment: str | None = None
        self._attempts = AttemptWrites(self._tasks, reopen=self.reopen)

    @property
    def database(self) -> Database:
        """The database that holds the collection."""
        return self._db

    @shortened
    async def prepare(self) -> None:
        """Create the indexes. StoreRefused names the index that duplicate ids prevent."""
        await ensure_index(self._tasks, "id", "uniq_task_id", unique=True)
        by_status = [("status", ASCENDING), ("updated_at", ASCENDING)]
        await ensure_index(self._tasks, by_status, "ix_task_status_updated")
        await Catalog(self._db).prepare()

    @shortened
    async def deployment(self) -> str:
        """Id of this database, made by whoever asks first; tells engines and workers of two databases apart."""
        if self._deployment is None:
            await self._meta().update_one(
                {"_id": "deployment"}, {"$setOnInsert": {"value": str(uuid.uuid4())}}, upsert=True
            )
            stored = await self._meta().find_one({"_id": "deployment"})
            self._deployment = str(stored["value"])
        return self._deployment

    def _meta(self) -> Any:
        return self._db.flowkit_meta

    @shortened
    async def insert_task(self, document: dict[str, Any]) -> None:
        """Write a new task document unless its id is there already."""
        try:
            await self._tasks.update_one({"id": document["id"]}, {"$setOnInsert": document}, upsert=True)
        except DuplicateKeyError:
            return

    @shortened
    async def open_task(self, opening: OpenTask) -> tuple[int, dict[str, int]]:
        """Take the document over for a run of its workflow; answers `run_seq` and the epochs used before.

        Inserts it when there is none. TaskIdTaken when it belongs to another task.
        """
        stored = await self._adopt(opening)
        if stored is None:
            await self.insert_task(
                documents.new_task(opening.task_id, opening.params, opening.graph, opening.at)
            )
            stored = await self._adopt(opening)
        if stored is None:
            raise TaskIdTaken(f"task id {opening.task_id!r} belongs to an earlier task; choose another id")
        nodes = stored["graph"]["nodes"]
        return stored["run_seq"], {
            node["node_id"]: node["attempt_epoch"] for node in nodes if node.get("attempt_epoch")
        }

    async def _adopt(self, opening: OpenTask) -> dict[str, Any] | None:
        unclaimed = {"first_run_id": None, "status": TaskStatus.QUEUED.value}
        taken: dict[str, Any] | None = await self._tasks.find_one_and_update(
            {
                "id": opening.task_id,
                "run_id": {"$ne": opening.run_id},
                "$or": [{"first_run_id": opening.first_run_id}, unclaimed],
            },
            {
                "$set": {
                    "status": TaskStatus.RUNNING.value,
                    "first_run_id": opening.first_run_id,
                    "run_id": opening.run_id,
                    "status_history": documents.opened_history(opening.at),
                    "updated_at": moment(opening.at),
                    **_NOT_ENDED,
                },
                "$unset": _REOPENED,
                "$inc": {"run_seq": 1},
            },
            projection=_EPOCHS,
            return_document=ReturnDocument.AFTER,
        )
        return taken or await self._opened_before(opening)

    async def _opened_before(self, opening: OpenTask) -> dict[str, Any] | None:
        """The document as this very run has opened it: a repeated opening must neither fence nor reopen its own run.

        A try that the workflow has given up may reach the database after another one, even after the close.
        """
        own = {"first_run_id": opening.first_run_id, "run_id": opening.run_id}
        found: dict[str, Any] | None = await self._tasks.find_one({"id": opening.task_id, **own}, _EPOCHS)
        return found

    @shortened
    async def begin_attempt(
        self, attempt: AttemptInput, run_id: str, lease: dict[str, Any], at: float
    ) -> None:
        """An attempt's first write: takes the node's epoch.

        EpochTaken when another run has used it, Fenced when the task was closed by this very run.
        """
        await self._attempts.begin(attempt, run_id, lease, at)

    @shortened
    async def reopen(self, task_id: str, run_id: str) -> None:
        """A newer run goes on with a task that was closed in between (Temporal's Reset after a sweep)."""
        await self._tasks.update_one(
            {"id": task_id, "closed_run_id": {"$ne": run_id}},
            {
                "$set": {
                    "status": TaskStatus.RUNNING.value,
                    "run_id": run_id,
                    **_NOT_ENDED,
                },
                "$unset": _REOPENED,
            },
        )

    @shortened
    async def extend_lease(self, attempt: AttemptInput, run_id: str, deadline_ms: int, at: float) -> None:
        """Move the lease's deadline forward; it never goes back."""
        await self._tasks.update_one(
            documents.own_attempt(attempt, run_id),
            {
                "$max": {
                    f"graph.nodes.{attempt.index}.lease.deadline_ts_ms": deadline_ms,
                    "last_event_recv_ms": int(at * 1000),
                }
            },
        )

    @shortened
    async def finish_attempt(self, attempt: AttemptInput, run_id: str, at: float) -> None:
        """An attempt's last write. Fenced when a newer attempt has the node; a node being cancelled is left alone."""
        await self._attempts.finish(attempt, run_id, at)

    @shortened
    async def check_hold(self, attempt: AttemptInput, run_id: str) -> None:
        """Fenced unless the node is still at this attempt's epoch and run."""
        await self._attempts.check_hold(attempt, run_id)

    @shortened
    async def cancel_flag(self, attempt: AttemptInput) -> str | None:
        """Why this node is to stop, as the documented flags say; None while none is up.

        DB_FLAG means that somebody raised a flag by hand, without telling Temporal.
        """
        node = f"graph.nodes.{attempt.index}"
        flags = [
            {"coordinator.cancelled": True},
            {f"{node}.coordinator.cancelled": True},
            {f"{node}.status": NodeStatus.CANCELLING.value},
        ]
        flagged = await self._tasks.find_one(
            {"id": attempt.task_id, "$or": flags},
            {"_id": 0, "coordinator.cancel_reason": 1},
        )
        if flagged is None:
            return None
        return flagged.get("coordinator", {}).get("cancel_reason") or DB_FLAG

    @shortened
    async def flagged(self, task_ids: Sequence[str]) -> set[str]:
        """Those of these tasks of which any cancel flag is up: their own, or one of a node."""
        flags = [
            {"coordinator.cancelled": True},
            {"graph.nodes.coordinator.cancelled": True},
            {"graph.nodes.status": NodeStatus.CANCELLING.value},
        ]
        found = self._tasks.find({"id": {"$in": list(task_ids)}, "$or": flags}, {"_id": 0, "id": 1})
        return {task["id"] async for task in found}

    @shortened
    async def flagged_by_hand(self, attempt: AttemptInput) -> bool:
        """Whether somebody raised a cancel flag without telling Temporal; our own writes always say when."""
        by_hand = {"id": attempt.task_id, "coordinator.cancelled_at": {"$exists": False}}
        return await self._tasks.find_one(by_hand, {"_id": 1}) is not None

    @shortened
    async def variables(self, task_id: str) -> dict[str, Any]:
        """`coordinator.vars` of a task, `{}` while there are none."""
        stored = await self._tasks.find_one({"id": task_id}, {"_id": 0, "coordinator.vars": 1}) or {}
        found: dict[str, Any] = stored.get("coordinator", {}).get("vars") or {}
        return found

    @shortened
    async def parents(self, attempt: AttemptInput) -> list[str]:
        """`depends_on` of an attempt's node."""
        path = f"graph.nodes.{attempt.index}"
        stored = await self._tasks.find_one(
            {"id": attempt.task_id, f"{path}.node_id": attempt.node_id},
            {"_id": 0, "graph.nodes.node_id": 1, "graph.nodes.depends_on": 1, "graph.edges": 1},
        )
        return documents.parents_of(attempt.node_id, stored) if stored else []

    @shortened
    async def node_states(self, task_id: str) -> dict[str, tuple[NodeStatus, int]]:
        """Status and epoch of every node."""
        stored = await self._tasks.find_one({"id": task_id}, documents.NODE_STATES)
        nodes = stored["graph"]["nodes"] if stored else []
        return {n["node_id"]: (NodeStatus(n["status"]), n.get("attempt_epoch", 0)) for n in nodes}

    @shortened
    async def record(self, record: RecordTask) -> None:
        """Write transitions that only the workflow knows; those behind the document change nothing."""
        failed_first = sorted(record.nodes, key=lambda node: node.status is not NodeStatus.FAILED)
        chunks = _chunks(failed_first, _NODES_OF_ONE_UPDATE) or [[]]
        for number, nodes in enumerate(chunks):
            task_fields = documents.task_fields(record) if number == 0 else {}
            if not await self._record_together(record, nodes, task_fields):
                await self._record_one_by_one(record, nodes, task_fields)

    async def _record_together(
        self, record: RecordTask, nodes: Sequence[NodeRecord], fields: dict[str, Any]
    ) -> bool:
        condition = documents.task_filter(record)
        for node in nodes:
            condition |= documents.node_filter(node)
            fields = fields | documents.node_fields(node, record.at)
        done = await self._tasks.update_one(condition, {"$set": fields})
        return bool(done.matched_count)

    async def _record_one_by_one(
        self, record: RecordTask, nodes: Sequence[NodeRecord], fields: dict[str, Any]
    ) -> None:
        if fields:
            await self._tasks.update_one(documents.task_filter(record), {"$set": fields})
        for node in nodes:
            await self._record_together(record, [node], {})

    @shortened
    async def close_task(self, close: CloseTask) -> bool:
        """Write the end of a task and whatever its document missed; False when there is no document.

        A document that a newer run has opened is left alone.
        """
        stored = await self._tasks.find_one(
            {"id": close.task_id}, {**documents.NODE_STATES, "graph.nodes.stats": 1, "run_seq": 1}
        )
        if stored is None:
            return False
        await self._tasks.update_one(
            {"id": close.task_id, "run_seq": {"$lte": close.run_seq}},
            {"$set": documents.closed_fields(close, stored["graph"]["nodes"])},
        )
        return True

    @shortened
    async def open_documents(self) -> list[dict[str, Any]]:
        """`id`, `run_id` and `updated_at` of every task that has not ended, as far as its document knows."""
        cursor = self._tasks.find(_NOT_CLOSED, {"_id": 0, "id": 1, "run_id": 1, "updated_at": 1})
        return [document async for document in cursor]

    @shortened
    async def abandon(self, task_id: str, run_id: str | None, reason: str, at: float) -> bool:
        """End a task whose workflow is gone; False when the document has moved on meanwhile."""
        unchanged = {"id": task_id, "run_id": run_id, **_NOT_CLOSED}
        stored = await self._tasks.find_one(unchanged, {**documents.NODE_STATES, "run_id": 1, "status": 1})
        if stored is None:
            return False
        change = {"from": stored["status"], "to": TaskStatus.FAILED.value, "at": iso(at)}
        done = await self._tasks.update_one(
            unchanged | documents.unchanged_nodes(stored),
            {
                "$set": documents.abandoned_fields(stored, reason, at),
                "$push": {"status_history": change},
            },
        )
        return bool(done.matched_count)


_NOT_CLOSED = {"status": {"$in": [*OPEN_TASK_STATUSES, TaskStatus.FAILED.value]}, "finished_at": None}
"""Tasks that may still change; one that has just failed shows it before its last attempts have ended."""

_NOT_ENDED = {"finished_at": None, "reason": None, "result": None}

_REOPENED = {
    "closed_run_id": "",
    "coordinator.cancelled": "",
    "coordinator.cancel_reason": "",
    "coordinator.cancelled_at": "",
}
"""What a task that goes on must not keep from an earlier end."""


def _chunks(nodes: Sequence[NodeRecord], size: int) -> list[Sequence[NodeRecord]]:
    return [nodes[start : start + size] for start in range(0, len(nodes), size)]
