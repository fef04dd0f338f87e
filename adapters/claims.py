"""Claims: which batches of a parent a node has received (protocol: MongoDB contract).

An attempt takes over the claims of earlier attempts. It raises Fenced if a newer attempt has made one, which ends an
outdated attempt that is still running. Shards fence each claim by its number.
"""

from __future__ import annotations

import asyncio
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from pymongo import ASCENDING
from pymongo.errors import BulkWriteError

from flowkit.adapters.batch_uids import uid_filters, uid_text
from flowkit.adapters.mongo import (
    CURSOR_DOCUMENTS,
    Database,
    duplicate_indexes,
    durable,
    ensure_index,
    moment,
    translate_errors,
)
from flowkit.adapters.notifier import Claimed, ClaimNotifier
from flowkit.errors import Fenced

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flowkit.models import AttemptInput

_CLAIM = [(name, ASCENDING) for name in ("task_id", "consumer_node", "from_node", "batch_uid")]
_GENERATION_BITS = 32


def first_fence(attempt: AttemptInput) -> int:
    """Return the fencing number of a new claim: those of a later generation are higher, whatever was taken
    over before.
    """
    return (attempt.generation << _GENERATION_BITS) + 1


def sealed_fence(attempt: AttemptInput) -> int:
    """Return the fencing number that is higher than all of the attempt's generation, and lower than those
    of the next.
    """
    return (attempt.generation + 1) << _GENERATION_BITS


class Claim(NamedTuple):
    """The claim of a batch by a node with shards."""

    from_node: str
    batch_uid: Any
    """The uid as stored."""
    epoch: int
    """The epoch of the attempt that has it."""
    fence: int
    """Its fencing number, which each take-over raises; 0 for a claim that no shard has made."""


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
                **_claim_key(attempt, from_node, batch_uid),
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
            refused = [batch_uids[place] for place in sorted(duplicate_indexes(error))]
            await self._claim_again(attempt, from_node, refused, at)
        claimed = Claimed(attempt.node_id, len(claims) - len(refused), began)
        self.notifier.notify(attempt.task_id, from_node, claimed)

    @translate_errors
    async def make_new(
        self, attempt: AttemptInput, from_node: str, batch_uids: Sequence[Any], at: float
    ) -> set[int]:
        """Claim those of these batches for a shard that are not claimed yet. Return their places in the list."""
        claims = [
            {**_claim_key(attempt, from_node, uid), **_owner_set(attempt, first_fence(attempt), at)}
            for uid in batch_uids
        ]
        won, began = {*range(len(claims))}, time.monotonic()
        try:
            await self._claims.insert_many(claims, ordered=False)
        except BulkWriteError as error:
            won -= duplicate_indexes(error)
        self.notifier.notify(attempt.task_id, from_node, Claimed(attempt.node_id, len(won), began))
        return won

    @translate_errors
    async def release(self, attempt: AttemptInput, batch_uids: Sequence[str]) -> None:
        """Let shards take over the claims of batches of these uids, whose results are forgotten.

        They still count as claims.

        The uid of a result may not be that of the batch (`qualified`, chunks). Then release all claims of
        the node: shards take over only those of batches without a result. Claims that no shard has made
        need no release.
        """
        made = {"fence": {"$exists": True}, "attempt_epoch": {"$not": {"$gt": attempt.epoch}}}
        own = {"task_id": attempt.task_id, "consumer_node": attempt.node_id, **made}
        known: set[str] = set()
        for some in uid_filters(batch_uids):
            known |= {row["batch_uid"] async for row in self._claims.find(own | some, {"batch_uid": 1})}
        is_exact = known.issuperset(batch_uids) and not any("@" in uid for uid in batch_uids)
        for some in uid_filters(batch_uids) if is_exact else [{}]:
            await self._claims.update_many(own | some, {"$set": {"released": True}})

    @translate_errors
    async def of_attempts(
        self, attempt: AttemptInput, epochs: Sequence[int], *, released: bool = False
    ) -> list[Claim]:
        """Return the claims that attempts of a node with these epochs have, and also those that are `released`."""
        own = {"task_id": attempt.task_id, "consumer_node": attempt.node_id}
        shown = {"_id": 0, "from_node": 1, "batch_uid": 1, "attempt_epoch": 1, "fence": 1}
        wanted: list[dict[str, Any]] = [{"attempt_epoch": {"$in": [*epochs]}}]
        wanted += [{"released": True}] if released else []
        found = self._claims.find({**own, "$or": wanted}, shown)
        return [
            Claim(each["from_node"], each["batch_uid"], each["attempt_epoch"], each.get("fence") or 0)
            async for each in found
        ]

    @translate_errors
    async def of_others(
        self, attempt: AttemptInput, from_node: str, between: tuple[str, str] | None = None
    ) -> set[str]:
        """Return the uids of the batches of `from_node` that other attempts of the node have claimed, as text.

        `between` is the first and the last uid of those that the caller needs.
        """
        claims: dict[str, Any] = {
            "task_id": attempt.task_id,
            "consumer_node": attempt.node_id,
            "from_node": from_node,
            "attempt_epoch": {"$ne": attempt.epoch},
        }
        if between is not None:
            claims["batch_uid"] = {"$gte": between[0], "$lte": between[1]}
        found = self._claims.find(claims, {"_id": 0, "batch_uid": 1}).batch_size(CURSOR_DOCUMENTS)
        return {uid_text(each["batch_uid"]) async for each in found}

    @translate_errors
    async def take_over(self, attempt: AttemptInput, claim: Claim, at: float) -> int | None:
        """Take over a claim for a shard.

        Return its fencing number; None if another attempt has taken it over before.
        """
        fence = max(claim.fence + 1, first_fence(attempt))
        unchanged = {"attempt_epoch": claim.epoch, "fence": claim.fence or None}
        done = await self._claims.update_one(
            {**_claim_key(attempt, claim.from_node, claim.batch_uid), **unchanged},
            {"$set": _owner_set(attempt, fence, at), "$unset": {"released": ""}},
        )
        if done.matched_count:
            return fence
        mine = {**_claim_key(attempt, claim.from_node, claim.batch_uid), "attempt_epoch": attempt.epoch}
        return fence if await self._claims.find_one({**mine, "fence": fence}, {"_id": 1}) else None

    async def _claim_again(self, attempt: AttemptInput, from_node: str, uids: list[Any], at: float) -> None:
        """Take over claims of earlier attempts. Claims of external workers have no epoch and count as earlier."""
        taken = await self._claims.update_many(
            {
                **_claim_key(attempt, from_node, {"$in": uids}),
                "attempt_epoch": {"$not": {"$gt": attempt.epoch}},
            },
            {"$set": {"attempt_epoch": attempt.epoch, "claimed_at": moment(at)}},
        )
        if taken.matched_count < len(uids):
            raise Fenced(f"a newer attempt of node {attempt.node_id!r} has claimed batches of {from_node!r}")

    @translate_errors
    async def delete(self, task_id: str, claims: Sequence[dict[str, Any]]) -> None:
        """Delete the claims that match one of these filters."""
        await self._claims.delete_many({"task_id": task_id, "$or": [*claims]})

    @translate_errors
    async def counts(
        self,
        task_id: str,
        from_node: str,
        consumers: Sequence[str],
        first_epochs: Mapping[str, int] = MappingProxyType({}),
    ) -> dict[str, int]:
        """Return how many batches of `from_node` each of `consumers` has claimed.

        Claims of earlier generations of a consumer do not count. External workers write no epoch into theirs.
        """
        keys: list[dict[str, Any]] = [
            {"task_id": task_id, "consumer_node": consumer, "from_node": from_node} for consumer in consumers
        ]
        for key in keys:
            if first := first_epochs.get(key["consumer_node"]):
                key["attempt_epoch"] = {"$not": {"$lt": first}}
        found = await asyncio.gather(*(self._claims.count_documents(key) for key in keys))
        return dict(zip(consumers, found, strict=True))


def _claim_key(attempt: AttemptInput, from_node: str, batch_uid: Any) -> dict[str, Any]:
    return {
        "task_id": attempt.task_id,
        "consumer_node": attempt.node_id,
        "from_node": from_node,
        "batch_uid": batch_uid,
    }


def _owner_set(attempt: AttemptInput, fence: int, at: float) -> dict[str, Any]:
    return {"attempt_epoch": attempt.epoch, "fence": fence, "claimed_at": moment(at)}
