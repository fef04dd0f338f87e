"""When the external workers of a task's running attempts sent their last events, according to the dispatch records."""

from __future__ import annotations

from typing import Any

from flowkit.adapters.dispatches.record import DispatchState
from flowkit.adapters.durability import durable
from flowkit.adapters.mongo import Database, translate_errors

_WANTED = {
    "_id": 0,
    "node_id": 1,
    "attempt_epoch": 1,
    "accepted_at": 1,
    "lease.expires_at": 1,
    "lease.ttl_sec": 1,
}


@translate_errors
async def last_heard(db: Database, task_id: str) -> dict[tuple[str, int], float]:
    """Return the time of the last event by node id and epoch, for the attempts that a worker has accepted.

    Every event extends a lease by its duration and a margin. The result may be too late by this margin, a tenth of the
    duration, but is never too early, because a bridge stores every extension that exceeds the margin.
    """
    running = {"task_id": task_id, "state": DispatchState.OPEN.value, "accepted_at": {"$ne": None}}
    return {
        (row["node_id"], row["attempt_epoch"]): _heard_at(row)
        async for row in durable(db).dispatches.find(running, _WANTED)
    }


def _heard_at(row: dict[str, Any]) -> float:
    lease = row.get("lease") or {}
    granted_at = float(lease.get("expires_at") or 0.0) - float(lease.get("ttl_sec") or 0.0)
    return max(float(row["accepted_at"]), granted_at)
