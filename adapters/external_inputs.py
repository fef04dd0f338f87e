"""The inputs of external nodes that pull from other nodes (docs/protocol.md: "Inputs that a node pulls", H19 to H22).

An external worker claims a batch before it processes it, reads at most the 200 oldest batches of a source, and stops
when all its sources have complete markers. These methods find out what it missed, and let its next run read the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from pymongo import ASCENDING

from flowkit.adapters.batch_uids import uid_text
from flowkit.adapters.entries import generation_filter, scan_filter
from flowkit.adapters.mongo import Database, durable, moment, translate_errors
from flowkit.core.utils import stable_hash

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flowkit.graph.input_adapters import PullArgs
    from flowkit.models import AttemptInput


Uids = set[str]

SCAN_WINDOW = 200
"""An external worker reads only this number of a source's batches, the oldest ones."""

_AT_ONCE = 1_000


class ExternalInputs:
    """Claims and source batches of external nodes in one database."""

    def __init__(self, db: Database) -> None:
        stored = durable(db)
        self._artifacts = stored.artifacts
        self._claims = stored.stream_progress
        self._metrics = stored.metrics_raw

    @translate_errors
    async def find_unfinished(self, attempt: AttemptInput, pull: PullArgs) -> dict[str, Uids]:
        """Return the uids of stored source batches that the node has not finished, by source; only non-empty sets.

        A claim alone does not count: a worker that runs an outdated attempt may claim a batch, and its
        result is ignored.
        """
        stored = await self._read_stored(attempt.task_id, pull.from_nodes, attempt.source_first_epochs)
        claimed, finished = await self._read_claimed(attempt), await self._read_finished(attempt)
        missing: dict[str, Uids] = {}
        for source in pull.from_nodes:
            known = stored[source] & claimed.get(source, set())
            unfinished = await self._find_unfinished_claims(attempt, source, known, finished, pull)
            missing[source] = (stored[source] - known) | set(unfinished)
        return {source: uids for source, uids in missing.items() if uids}

    @translate_errors
    async def find_clashing_uid(
        self, attempt: AttemptInput, sources: Sequence[str]
    ) -> tuple[str, list[str]] | None:
        """Return a batch uid that several of `sources` use, and these sources; None if there is none."""
        stored = await self._read_stored(attempt.task_id, sources, attempt.source_first_epochs)
        counts = Counter(uid for uids in stored.values() for uid in uids)
        shared = next((uid for uid, count in counts.items() if count > 1), None)
        return None if shared is None else (shared, [name for name in stored if shared in stored[name]])

    @translate_errors
    async def release_claims(self, attempt: AttemptInput, pull: PullArgs) -> int:
        """Delete claims of batches that earlier attempts of the node did not finish. Return their number (H21)."""
        claimed = await self._read_claimed(attempt)
        finished = await self._read_finished(attempt)
        released = 0
        for source, uids in claimed.items():
            unfinished = await self._find_unfinished_claims(attempt, source, uids, finished, pull)
            released += await self._delete_claims(attempt, source, unfinished)
        return released

    @translate_errors
    async def show_unclaimed_first(self, attempt: AttemptInput, pull: PullArgs, at: float) -> int:
        """Move claimed batches of large sources behind the others, which the worker then sees. Return how many (H20).

        The worker reads the SCAN_WINDOW oldest batches by `created_at`. Those of them that are claimed get the time
        `at`, until the worker sees one that it has not claimed.
        """
        return sum([await self._show_unclaimed(attempt, source, at) for source in pull.from_nodes])

    async def _show_unclaimed(self, attempt: AttemptInput, source: str, at: float) -> int:
        generation = generation_filter(attempt.source_first_epochs.get(source, 0))
        batches = {"task_id": attempt.task_id, "node_id": source, "status": "partial", **generation}
        stored = await self._artifacts.count_documents(batches)
        claims = {"task_id": attempt.task_id, "consumer_node": attempt.node_id, "from_node": source}
        if stored <= SCAN_WINDOW or stored <= await self._claims.count_documents(claims):
            return 0
        moved = 0
        while True:
            seen = await self._read_oldest(attempt.task_id, source)
            found = self._claims.find({**claims, "batch_uid": {"$in": seen}}, {"_id": 0, "batch_uid": 1})
            claimed = [claim["batch_uid"] async for claim in found]
            now_moved = await self._restamp(attempt.task_id, source, claimed, at)
            moved += now_moved
            if not now_moved or len(claimed) < len(seen):
                return moved

    @translate_errors
    async def delete_marker(self, attempt: AttemptInput) -> None:
        """Delete the complete marker that the node's worker wrote, because the node has to continue.

        Keep the one of a later epoch: an operator has completed the node meanwhile.
        """
        marker = {"task_id": attempt.task_id, "node_id": attempt.node_id, "batch_uid": {"$exists": False}}
        own = {"attempt_epoch": {"$not": {"$gt": attempt.epoch}}}
        await self._artifacts.delete_one({**marker, **own})

    async def _read_stored(
        self, task_id: str, sources: Iterable[str], first_epochs: Mapping[str, int]
    ) -> dict[str, Uids]:
        found: dict[str, Uids] = {source: set() for source in sources}
        wanted = {**scan_filter(task_id, list(found), {}, first_epochs), "status": "partial"}
        cursor = self._artifacts.find(wanted, {"_id": 0, "node_id": 1, "batch_uid": 1})
        async for batch in cursor:
            found[batch["node_id"]].add(uid_text(batch.get("batch_uid")))
        return found

    async def _read_finished(self, attempt: AttemptInput) -> Uids:
        """Return the uids of the node's own batches whose results are stored: the artifact, and the metrics
        if it has any.

        A worker writes the artifact itself, while the bridge writes the metrics when it receives the event about the
        batch. The events of an attempt that has ended, for example because it was cancelled, are ignored.
        The metrics row of a batch that failed before then still says so.
        """
        generation = generation_filter(attempt.first_epoch)
        own = {"task_id": attempt.task_id, "node_id": attempt.node_id, **generation}
        first_epochs = {attempt.node_id: attempt.first_epoch}
        stored = (await self._read_stored(attempt.task_id, [attempt.node_id], first_epochs))[attempt.node_id]
        rows = self._metrics.find(own, {"_id": 0, "batch_uid": 1, "failed": 1})
        failed = {uid_text(row.get("batch_uid")): bool(row.get("failed")) async for row in rows}
        unmeasured = sorted(stored - failed.keys())
        lost = {uid for uid in stored if failed.get(uid)}
        for start in range(0, len(unmeasured), _AT_ONCE):
            wanted = {
                "batch_uid": {"$in": unmeasured[start : start + _AT_ONCE]},
                "meta": {"$nin": [{}, None]},
            }
            found = self._artifacts.find({**own, **wanted}, {"_id": 0, "batch_uid": 1})
            lost |= {uid_text(row.get("batch_uid")) async for row in found}
        return stored - lost

    async def _read_claimed(self, attempt: AttemptInput) -> dict[str, Uids]:
        claimed: dict[str, Uids] = {}
        cursor = self._claims.find(
            {"task_id": attempt.task_id, "consumer_node": attempt.node_id},
            {"_id": 0, "from_node": 1, "batch_uid": 1},
        )
        async for claim in cursor:
            claimed.setdefault(claim["from_node"], set()).add(uid_text(claim.get("batch_uid")))
        return claimed

    async def _find_unfinished_claims(
        self, attempt: AttemptInput, source: str, claimed: Uids, finished: Uids, pull: PullArgs
    ) -> list[str]:
        """Return those claimed batches whose results are not all stored."""
        if pull.size is None:
            return sorted(claimed - finished)
        expected = await self._chunk_uids(attempt, source, sorted(claimed), pull)
        return [uid for uid in sorted(claimed) if not expected.get(uid, {uid}) <= finished]

    async def _chunk_uids(
        self, attempt: AttemptInput, source: str, parents: Sequence[str], pull: PullArgs
    ) -> dict[str, Uids]:
        """Return the uids of the chunks into which the worker splits each of the batches `parents`."""
        chunks: dict[str, Uids] = {}
        for start in range(0, len(parents), _AT_ONCE):
            wanted = {"node_id": source, "batch_uid": {"$in": list(parents[start : start + _AT_ONCE])}}
            generation = generation_filter(attempt.source_first_epochs.get(source, 0))
            cursor = self._artifacts.find(
                {"task_id": attempt.task_id, **wanted, **generation}, {"_id": 0, "batch_uid": 1, "meta": 1}
            )
            async for batch in cursor:
                uid = uid_text(batch.get("batch_uid"))
                chunks[uid] = chunk_uids(source, uid, batch.get("meta") or {}, pull)
        return chunks

    async def _delete_claims(self, attempt: AttemptInput, source: str, uids: Sequence[str]) -> int:
        deleted = 0
        for start in range(0, len(uids), _AT_ONCE):
            done = await self._claims.delete_many(
                {
                    "task_id": attempt.task_id,
                    "consumer_node": attempt.node_id,
                    "from_node": source,
                    "batch_uid": {"$in": list(uids[start : start + _AT_ONCE])},
                }
            )
            deleted += int(done.deleted_count)
        return deleted

    async def _read_oldest(self, task_id: str, source: str) -> list[Any]:
        """Return the uids of the batches of a source that an external worker sees."""
        wanted = {"task_id": task_id, "node_id": source, "status": "partial"}
        found = self._artifacts.find(wanted, {"_id": 0, "batch_uid": 1})
        return [
            batch.get("batch_uid") async for batch in found.sort("created_at", ASCENDING).limit(SCAN_WINDOW)
        ]

    async def _restamp(self, task_id: str, source: str, uids: Sequence[Any], at: float) -> int:
        """Give batches the time `at`, unless they have a later one."""
        if not uids:
            return 0
        wanted = {"task_id": task_id, "node_id": source, "batch_uid": {"$in": uids}, "status": "partial"}
        done = await self._artifacts.update_many(
            {**wanted, "created_at": {"$lt": moment(at)}}, {"$set": {"created_at": moment(at)}}
        )
        return int(done.modified_count)


def chunk_uids(source: str, parent_uid: str, meta: Mapping[str, Any], pull: PullArgs) -> Uids:
    """Return the uids of the chunks of one source batch, as workers compute them. An empty list yields no chunk."""
    items = meta.get(pull.meta_list_key) if pull.meta_list_key else None
    count = math.ceil(len(items) / (pull.size or 1)) if isinstance(items, list) else 1
    return {stable_hash({"src": source, "parent": parent_uid, "idx": index}) for index in range(count)}
