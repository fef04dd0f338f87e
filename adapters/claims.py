"""Storage of claims: which batches of its sources a node has taken (spec: claims)."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from pymongo import ASCENDING
from pymongo.errors import BulkWriteError

from flowkit.adapters.mongo import DUPLICATE_KEY, Database, durable, ensure_index, moment, translate_errors
from flowkit.adapters.notifications import Claimed, ClaimNotifier
from flowkit.errors import Fenced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.models import AttemptInput

_CLAIM = [(name, ASCENDING) for name in ("task_id", "consumer_node", "from_node", "batch_uid")]


class Claims:
    """The collection `stream_progress` of one database."""

    def __init__(self, db: Database) -> None:
        self._claims = durable(db).stream_progress
        self.notifier = ClaimNotifier()
        """Notifies nodes in this process when another node in this process claims their batches."""

    @translate_errors
    async def prepare(self) -> None:
        """Create the index, under the name that external workers also use."""
        await ensure_index(self._claims, _CLAIM, "uniq_stream_claim_batch", unique=True)

    @translate_errors
    async def make(self, attempt: AttemptInput, from_node: str, batch_uids: Sequence[Any], at: float) -> None:
        """Record that this node received batches of `from_node`, and take over claims of its earlier attempts.

        Raise Fenced if a newer attempt has already claimed one of the batches.
        """
        if not batch_uids:
            return
        claims = [
            {
                "task_id": attempt.task_id,
                "consumer_node": attempt.node_id,
                "from_node": from_node,
                "batch_uid": batch_uid,
                "attempt_epoch": attempt.epoch,
                "claimed_at": moment(at),
            }
            for batch_uid in batch_uids
        ]
        refused: list[Any] = []
        began = time.monotonic()
        try:
            await self._claims.insert_many(claims, ordered=False)
        except BulkWriteError as error:
            refused = _refused_uids(error, claims)
            await self._claim_again(attempt, from_node, refused, at)
        claimed = Claimed(attempt.node_id, len(claims) - len(refused), began)
        self.notifier.notify(attempt.task_id, from_node, claimed)

    async def _claim_again(self, attempt: AttemptInput, from_node: str, uids: list[Any], at: float) -> None:
        """Take over claims of earlier attempts. Claims of external workers have no epoch and count as earlier."""
        taken = await self._claims.update_many(
            {
                "task_id": attempt.task_id,
                "consumer_node": attempt.node_id,
                "from_node": from_node,
                "batch_uid": {"$in": uids},
                "attempt_epoch": {"$not": {"$gt": attempt.epoch}},
            },
            {"$set": {"attempt_epoch": attempt.epoch, "claimed_at": moment(at)}},
        )
        if taken.matched_count < len(uids):
            raise Fenced(f"a newer attempt of node {attempt.node_id!r} has claimed batches of {from_node!r}")

    @translate_errors
    async def counts(self, task_id: str, from_node: str, consumers: Sequence[str]) -> dict[str, int]:
        """Return how many batches of `from_node` each of `consumers` has claimed."""
        keys = [
            {"task_id": task_id, "consumer_node": consumer, "from_node": from_node} for consumer in consumers
        ]
        found = await asyncio.gather(*(self._claims.count_documents(key) for key in keys))
        return dict(zip(consumers, found, strict=True))


def _refused_uids(error: BulkWriteError, claims: list[dict[str, Any]]) -> list[Any]:
    problems = error.details.get("writeErrors", [])
    unconfirmed = error.details.get("writeConcernErrors")
    if unconfirmed or any(problem.get("code") != DUPLICATE_KEY for problem in problems):
        raise error
    return [claims[problem["index"]]["batch_uid"] for problem in problems]
