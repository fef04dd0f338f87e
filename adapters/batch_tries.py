"""Which batch each attempt processes, of nodes that set batches aside: the collection `batch_tries`.

An attempt has one row, which names its present batch. It deletes the row when it ends, so a row that is
left names a batch that an attempt processed when its process was lost.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pymongo import ASCENDING

from flowkit.adapters.mongo import Database, durable, ensure_index, moment, translate_errors
from flowkit.core.utils import stable_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.models import AttemptInput


_UIDS_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class LostTries:
    """The tries of batches of a node that ended with the loss of their process."""

    counts: Counter[str] = field(default_factory=Counter)
    """Their number, by batch uid."""
    alone: frozenset[str] = frozenset()
    """The batches that no other batch of the process ran beside, when it was lost."""


class BatchTries:
    """The collection `batch_tries`. Raises StoreUnavailable if MongoDB does not respond."""

    def __init__(self, db: Database) -> None:
        self._rows = durable(db).batch_tries

    @translate_errors
    async def prepare(self) -> None:
        """Create the index by which attempts and `flowkit purge` find the rows of a task."""
        await ensure_index(
            self._rows, [("task_id", ASCENDING), ("node_id", ASCENDING)], "ix_batch_tries_node"
        )

    @translate_errors
    async def begin(
        self, attempt: AttemptInput, batch_uid: str, worker_id: str, at: float, *, alone: bool
    ) -> None:
        """Note that an attempt processes a batch now, and whether its process runs no other batch meanwhile."""
        row = {
            **_generation_filter(attempt),
            "attempt_epoch": attempt.epoch,
            "batch_uid": batch_uid,
            "alone": alone,
            "worker_id": worker_id,
            "began_at": moment(at),
        }
        await self._rows.update_one({"_id": _row_id(attempt)}, {"$set": row}, upsert=True)

    @translate_errors
    async def end(self, attempt: AttemptInput) -> None:
        """Note that an attempt processes no batch any more."""
        await self._rows.delete_one({"_id": _row_id(attempt)})

    @translate_errors
    async def lost(self, attempt: AttemptInput) -> LostTries:
        """Return the tries of the other attempts of the node, in its present generation.

        Those of shards that run are among them. Their batches are claimed, so the attempt does not process them.
        """
        others = {**_generation_filter(attempt), "attempt_epoch": {"$ne": attempt.epoch}}
        rows = [row async for row in self._rows.find(others, {"_id": 0, "batch_uid": 1, "alone": 1})]
        return LostTries(
            counts=Counter(row["batch_uid"] for row in rows),
            alone=frozenset(row["batch_uid"] for row in rows if row["alone"]),
        )

    @translate_errors
    async def forget(self, attempt: AttemptInput, batch_uids: Sequence[str]) -> None:
        """Forget the tries of these batches of a node, because they are tried anew."""
        for start in range(0, len(batch_uids), _UIDS_AT_ONCE):
            some = {"batch_uid": {"$in": [*batch_uids[start : start + _UIDS_AT_ONCE]]}}
            await self._rows.delete_many({**_generation_filter(attempt), **some})


def _generation_filter(attempt: AttemptInput) -> dict[str, Any]:
    return {"task_id": attempt.task_id, "node_id": attempt.node_id, "generation": attempt.generation}


def _row_id(attempt: AttemptInput) -> str:
    return stable_hash({"t": attempt.task_id, "n": attempt.node_id, "e": attempt.epoch})
