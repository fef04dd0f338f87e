"""The attempts of shards: the collection `node_shards`, with one row for each attempt of a shard of a node.

The node in the task document has one entry, which shows the latest attempt that has begun. The lease and the end of
each attempt of a shard are in a row of their own, so that shards do not fence each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pymongo import ASCENDING
from pymongo.errors import DuplicateKeyError

from flowkit.adapters.entries import utc
from flowkit.adapters.mongo import Database, durable, ensure_index, moment, translate_errors
from flowkit.core.time import LeaseObserver
from flowkit.core.utils import stable_hash
from flowkit.errors import EpochTaken, Fenced

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowkit.models import AttemptInput


RUNNING, FINISHED, FAILED = "running", "finished", "failed"
"""The states of a row. The attempt of a shard has finished when all batches that it has claimed are stored."""

_OF_NODE = [("task_id", ASCENDING), ("node_id", ASCENDING)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardStates:
    """The attempts of the shards of a node, by their epochs."""

    live: frozenset[int] = frozenset()
    """Those that run, and whose leases this process has not seen unchanged for as long as a lease lasts."""
    finished: frozenset[int] = frozenset()
    failed: Mapping[int, int] = field(default_factory=dict)
    """The shards of those that have failed, and have not run again."""
    latest: int = 0
    """The highest epoch."""

    def list_lost(self, attempt: AttemptInput) -> list[int]:
        """Return the epochs of the attempts of this generation whose claims an attempt may take over.

        What a failed attempt has left is for the next attempt of its shard, which begins when its backoff has passed.
        """
        spared = {*self.live, *self.finished, attempt.epoch}
        spared |= {epoch for epoch, shard in self.failed.items() if shard != attempt.shard}
        return [epoch for epoch in range(attempt.first_epoch + 1, self.latest + 1) if epoch not in spared]


@dataclass(kw_only=True, slots=True)
class ShardProgress:
    """How far the shards of a node are."""

    generation: int
    started_at: float
    """When the first of them has begun since the latest reset of the node, as Unix time in seconds."""
    first_epoch: int = 0
    """The epoch of that one."""
    before: int = 0
    """The number of batches that the node had stored before, and that still count."""
    items: int = 0
    """The number of batches in all, of a node with `map`."""
    workers: dict[int, str] = field(default_factory=dict)
    """The worker that runs the latest attempt of each shard; empty for a shard that runs none."""

    @property
    def running(self) -> list[str]:
        """The workers of the shards that run, once for each shard."""
        return [worker for worker in self.workers.values() if worker]


class ShardStore:
    """The collection `node_shards`. Raises StoreUnavailable if MongoDB does not respond."""

    def __init__(self, db: Database) -> None:
        self._rows = durable(db).node_shards
        self._leases = LeaseObserver()

    @translate_errors
    async def prepare(self) -> None:
        """Create the index by which attempts and `flowkit purge` find the rows of a task."""
        await ensure_index(self._rows, _OF_NODE, "ix_node_shards_node")

    @translate_errors
    async def begin(self, attempt: AttemptInput, run_id: str, worker_id: str, at: float) -> None:
        """Insert the row of an attempt that has taken its epoch. Raise EpochTaken if there is one of another run."""
        row = {
            "_id": _row_id(attempt),
            "task_id": attempt.task_id,
            "node_id": attempt.node_id,
            "shard": attempt.shard,
            "attempt_epoch": attempt.epoch,
            "generation": attempt.generation,
            "run_id": run_id,
            "worker_id": worker_id,
            "version": attempt.version,
            "status": RUNNING,
            "batches": 0,
            "lease_until": moment(at + attempt.lease_ttl_sec),
            "started_at": moment(at),
        }
        try:
            await self._rows.insert_one(row)
        except DuplicateKeyError:
            own = {"_id": row["_id"], "run_id": run_id, "worker_id": worker_id}
            if await self._rows.find_one(own, {"_id": 1}) is None:
                raise EpochTaken(attempt.epoch) from None

    @translate_errors
    async def extend_lease(self, attempt: AttemptInput, run_id: str, until: float) -> None:
        """Extend the lease of a running attempt. Other processes see that it changes, whatever their clocks say."""
        running = {"_id": _row_id(attempt), "run_id": run_id, "status": RUNNING}
        await self._rows.update_one(running, {"$set": {"lease_until": moment(until)}})

    @translate_errors
    async def end(self, attempt: AttemptInput, run_id: str, status: str, batches: int, at: float) -> None:
        """Note how an attempt has ended, and how many batches it has stored. Raise Fenced if there is no row of it."""
        own = {"_id": _row_id(attempt), "run_id": run_id}
        ended = {"status": status, "batches": batches, "ended_at": moment(at)}
        if not (await self._rows.update_one(own, {"$set": ended})).matched_count:
            raise Fenced(
                f"attempt {attempt.epoch} of a shard of node {attempt.node_id!r} is not known any more"
            )

    @translate_errors
    async def states(self, attempt: AttemptInput) -> ShardStates:
        """Return the attempts of the shards of a node. An earlier attempt of the same shard is not live."""
        read_at = self._leases.now()
        wanted = {"task_id": attempt.task_id, "node_id": attempt.node_id, "generation": attempt.generation}
        shown = {"_id": 0, "shard": 1, "attempt_epoch": 1, "status": 1, "lease_until": 1}
        live, finished, failed, latest = set[int](), set[int](), dict[int, int](), dict[int, int]()
        async for row in self._rows.find(wanted, shown):
            epoch, shard = row["attempt_epoch"], row["shard"]
            latest[shard] = max(epoch, latest.get(shard, 0))
            if row["status"] == FINISHED:
                finished.add(epoch)
            elif row["status"] == FAILED:
                failed[epoch] = shard
            else:
                lease = (attempt.task_id, attempt.node_id, epoch)
                silent_sec = self._leases.unchanged_sec(lease, row["lease_until"], read_at)
                if silent_sec < attempt.lease_ttl_sec:
                    live.add(epoch)
        newest = {*latest.values()}
        return ShardStates(
            live=frozenset(live & newest),
            finished=frozenset(finished),
            failed={
                epoch: shard for epoch, shard in failed.items() if epoch in newest or shard == attempt.shard
            },
            latest=max(newest, default=0),
        )

    @translate_errors
    async def are_running(self, attempt: AttemptInput) -> bool:
        """Return whether an attempt of a shard of the node has not ended, as far as MongoDB knows."""
        of_node = {"task_id": attempt.task_id, "node_id": attempt.node_id, "generation": attempt.generation}
        return await self._rows.find_one({**of_node, "status": RUNNING}, {"_id": 1}) is not None

    @translate_errors
    async def progress(
        self, task_id: str, first_epochs: Mapping[str, int] | None = None
    ) -> dict[str, ShardProgress]:
        """Return how far the shards of a task's nodes are, by node id. Nodes without shards are absent.

        Shards that began before the latest reset of their node do not count. `first_epochs` are the epochs
        of the resets.
        """
        shards: dict[str, ShardProgress] = {}
        shown = {
            "_id": 0,
            "node_id": 1,
            "generation": 1,
            "shard": 1,
            "attempt_epoch": 1,
            "worker_id": 1,
            "status": 1,
            "started_at": 1,
        }
        first = first_epochs or {}
        async for row in self._rows.find({"task_id": task_id}, shown).sort("attempt_epoch", ASCENDING):
            if row["attempt_epoch"] <= first.get(row["node_id"], 0):
                continue
            seen = shards.get(row["node_id"])
            if seen is None or seen.generation < row["generation"]:
                seen = ShardProgress(
                    generation=row["generation"],
                    started_at=utc(row["started_at"]).timestamp(),
                    first_epoch=row["attempt_epoch"],
                )
                shards[row["node_id"]] = seen
            seen.workers[row["shard"]] = row["worker_id"] if row["status"] == RUNNING else ""
        return shards

    @translate_errors
    async def find_holder(self, attempt: AttemptInput) -> tuple[str, str] | None:
        """Return the worker that has begun an attempt of a shard, and the version of its handler; None if none has."""
        found = await self._rows.find_one({"_id": _row_id(attempt)}, {"worker_id": 1, "version": 1})
        return None if found is None else (found.get("worker_id", ""), found.get("version", ""))


def _row_id(attempt: AttemptInput) -> str:
    return stable_hash({"t": attempt.task_id, "n": attempt.node_id, "e": attempt.epoch})
