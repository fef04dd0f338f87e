"""The registry of worker processes: `worker_registry` (spec: collections; protocol: announces).

FlowKit decides nothing by it; it is for people and monitoring.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pymongo.errors import DuplicateKeyError

from flowkit.adapters.mongo import Database, ensure_index, moment, translate_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

_SILENT_SEC = 180.0
"""Three times the usual interval, for workers that do not say theirs."""


class WorkerStatus(StrEnum):
    """Whether a worker runs, as far as the registry knows."""

    ONLINE = "online"
    OFFLINE = "offline"


class WorkerRegistry:
    """The `worker_registry` collection: one row for each worker id.

    A row shows the process that came online last. `session` tells processes of one id apart: the end of an old one
    does not hide a new one. What comes without a session (external workers have none) is one session to us.
    """

    def __init__(self, db: Database) -> None:
        self._workers = db.worker_registry

    @translate_errors
    async def prepare(self) -> None:
        """Create the index. StoreRefused names it when duplicate ids prevent it."""
        await ensure_index(self._workers, "worker_id", "uniq_worker", unique=True)

    @translate_errors
    async def online(
        self,
        worker_id: str,
        roles: Sequence[str],
        version: str,
        capacity: int,
        at: float,
        *,
        session: str = "",
        leaked_threads: int | None = None,
        announce_interval_sec: float | None = None,
    ) -> None:
        """Show a process that has started. Several roles are one `type`, joined by commas, as in announces."""
        shown = {
            "type": ",".join(roles),
            "capabilities": {"roles": list(roles)},
            "version": version,
            "capacity": {"tasks": capacity},
            "announce_interval_sec": announce_interval_sec,
            **_alive(at, session, leaked_threads),
        }
        try:
            await self._workers.update_one({"worker_id": worker_id}, {"$set": shown}, upsert=True)
        except DuplicateKeyError:
            await self._workers.update_one({"worker_id": worker_id}, {"$set": shown})

    @translate_errors
    async def seen(
        self, worker_id: str, at: float, *, session: str = "", leaked_threads: int | None = None
    ) -> bool:
        """Show that a process is still there; False when there is no row, so that it must come online again.

        A newer process of the same id keeps the row as long as it is online.
        """
        own = {"worker_id": worker_id, "$or": [{"session": session}, {"status": WorkerStatus.OFFLINE.value}]}
        done = await self._workers.update_one(own, {"$set": _alive(at, session, leaked_threads)})
        if done.matched_count:
            return True
        return await self._workers.find_one({"worker_id": worker_id}, {"_id": 1}) is not None

    @translate_errors
    async def offline(self, worker_id: str, at: float, *, session: str = "") -> bool:
        """Show that a process has stopped; False when the row shows another one, which stays."""
        gone = {"status": WorkerStatus.OFFLINE.value, "last_seen": moment(at)}
        done = await self._workers.update_one({"worker_id": worker_id, "session": session}, {"$set": gone})
        return bool(done.matched_count)

    @translate_errors
    async def expire(self, at: float) -> int:
        """Show as offline who missed three announces; answers how many. Being seen brings them back."""
        online = {"status": WorkerStatus.ONLINE.value}
        expired = 0
        for interval in {*await self._workers.distinct("announce_interval_sec", online), None}:
            silent_sec = 3 * interval if isinstance(interval, (int, float)) else _SILENT_SEC
            silent = {"announce_interval_sec": interval, "last_seen": {"$lt": moment(at - silent_sec)}}
            done = await self._workers.update_many(
                {**online, **silent}, {"$set": {"status": WorkerStatus.OFFLINE.value}}
            )
            expired += int(done.modified_count)
        return expired


def _alive(at: float, session: str, leaked_threads: int | None) -> dict[str, Any]:
    """`leaked_threads` is None where the worker does not count them, as external workers do not."""
    leaked = {} if leaked_threads is None else {"leaked_threads": leaked_threads}
    return {"status": WorkerStatus.ONLINE.value, "last_seen": moment(at), "session": session, **leaked}
