"""The MongoDB documents of a worker."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from bson.errors import BSONError
from pymongo.errors import OperationFailure, PyMongoError

if TYPE_CHECKING:
    from flowkit.testing.external.misbehavior import Misbehavior
    from flowkit.testing.external.runs import Run
    from flowkit.testing.external.settings import Clock

logger = logging.getLogger(__name__)

WriteFailed = (PyMongoError, BSONError, OverflowError)
"""What a write raises when MongoDB refuses it or cannot store a value."""
PATH_CONFLICT = 40
"""Error code of MongoDB: two operators of one update set the same path."""
SCAN_LIMIT = 200
_WEEK_SEC = 7 * 24 * 3600
_INDEXES: tuple[tuple[str, list[str], dict[str, Any]], ...] = (
    ("artifacts", ["task_id", "node_id"], {"name": "ix_artifacts_task_node"}),
    (
        "artifacts",
        ["task_id", "node_id", "batch_uid"],
        {"name": "uniq_artifact_batch_uid", "unique": True, "sparse": True},
    ),
    (
        "stream_progress",
        ["task_id", "consumer_node", "from_node", "batch_uid"],
        {"name": "uniq_stream_claim_batch", "unique": True},
    ),
    (
        "worker_state",
        ["updated_at"],
        {"name": "ttl_worker_state_updated_at", "expireAfterSeconds": _WEEK_SEC},
    ),
)


class Store:
    """Reads and writes the documents that the protocol gives to workers."""

    def __init__(self, db: Any, worker_id: str, clock: Clock, misbehavior: Misbehavior) -> None:
        self._db = db
        self._worker_id = worker_id
        self._clock = clock
        self._misbehavior = misbehavior

    async def ensure_indexes(self) -> None:
        """Create the worker's indexes. Failures are logged."""
        for collection, keys, options in _INDEXES:
            try:
                await self._db[collection].create_index([(key, 1) for key in keys], **options)
            except PyMongoError as error:
                logger.warning("Cannot create the index %s: %s", options["name"], error)

    async def stored_run(self) -> dict[str, Any] | None:
        """Return the `active_run` of this worker's id, or None."""
        document = await self._db["worker_state"].find_one({"_id": self._worker_id})
        return document.get("active_run") if document else None

    async def store_run(self, run: Run | None) -> None:
        """Write the worker's state. None means that the worker has no run."""
        state = {"active_run": run.stored() if run else None, "updated_at": self._clock.now()}
        await self._db["worker_state"].update_one({"_id": self._worker_id}, {"$set": state}, upsert=True)

    async def write_partial(self, run: Run, batch_uid: str, metrics: dict[str, Any]) -> dict[str, Any]:
        """Write the artifact of a batch and return its reference."""
        if self._misbehavior.partial_refused:
            raise OperationFailure("Updating the path 'status' would create a conflict", PATH_CONFLICT)
        now, key = self._clock.now(), {**_node(run), "batch_uid": batch_uid}
        first = {
            **_node(run),
            "attempt_epoch": run.attempt_epoch,
            "worker_id": self._worker_id,
            "payload": None,
            "batch_uid": batch_uid,
            "created_at": now,
        }
        always = {"status": "partial", "meta": metrics, "updated_at": now}
        await self._db["artifacts"].update_one(key, {"$setOnInsert": first, "$set": always}, upsert=True)
        return key

    def log_refusal(self, batch_uid: str, error: Exception) -> None:
        """Log that the artifact of a batch was not written."""
        text = "Cannot write the artifact of batch %s: %s. The bridge stores the batch anyway (H18)."
        logger.warning(text, batch_uid, error)

    async def write_complete(self, run: Run, metrics: dict[str, Any]) -> dict[str, Any]:
        """Write the complete marker of a node and return its reference."""
        now, key = self._clock.now(), _node(run)
        first = {
            **key,
            "attempt_epoch": run.attempt_epoch,
            "worker_id": self._worker_id,
            "created_at": now,
        }
        always = {"status": "complete", "meta": metrics, "updated_at": now}
        await self._db["artifacts"].update_one(
            {**key, "batch_uid": {"$exists": False}}, {"$setOnInsert": first, "$set": always}, upsert=True
        )
        return key

    async def is_complete(self, task_id: str, node_id: str) -> bool:
        """Return whether a node has a complete marker."""
        marker = {"task_id": task_id, "node_id": node_id, "status": "complete"}
        return await self._db["artifacts"].find_one(marker) is not None

    async def partials(self, task_id: str, node_id: str) -> list[dict[str, Any]]:
        """Return the oldest partial artifacts of a node, at most 200 (H20)."""
        partial = {"task_id": task_id, "node_id": node_id, "status": "partial"}
        found = self._db["artifacts"].find(partial).sort("created_at", 1).limit(SCAN_LIMIT)
        return [document async for document in found]

    async def claim(self, run: Run, from_node: str, batch_uid: str) -> bool:
        """Claim a batch of another node. Any failure means that the batch is not available."""
        claim = {
            "task_id": run.task_id,
            "consumer_node": run.node_id,
            "from_node": from_node,
            "batch_uid": batch_uid,
            "claimed_at": self._clock.now(),
        }
        try:
            await self._db["stream_progress"].insert_one(claim)
        except WriteFailed:
            return False
        return True

    async def cancel_requested(self, run: Run) -> bool:
        """Return whether the task document requests a cancel of the task or of the run's node."""
        fields = {"id": 1, "coordinator": 1, "graph": 1}
        document = await self._db["tasks"].find_one({"id": run.task_id}, fields)
        return document is not None and cancel_flag(document, run.node_id)


def cancel_flag(document: dict[str, Any], node_id: str) -> bool:
    """Return whether a task document requests that a node stops. Only boolean true counts as a flag."""
    if _flagged(document):
        return True
    nodes = (document.get("graph") or {}).get("nodes") or []
    own = [node for node in nodes if node.get("node_id") == node_id]
    return any(_flagged(node) or node.get("status") == "cancelling" for node in own)


def _flagged(document: dict[str, Any]) -> bool:
    return (document.get("coordinator") or {}).get("cancelled") is True


def _node(run: Run) -> dict[str, Any]:
    return {"task_id": run.task_id, "node_id": run.node_id}
