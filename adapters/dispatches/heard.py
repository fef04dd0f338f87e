"""What the dispatch records say about the running attempts of a task: whether their workers run them, and their last events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.adapters.dispatches.record import ACTIVE_STATES, DispatchState
from flowkit.adapters.durability import durable
from flowkit.adapters.mongo import Database, translate_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

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


@translate_errors
async def external_runs(db: Database, task_id: str, node_ids: Sequence[str], at: float) -> dict[str, bool]:
    """Return whether a worker runs the current attempt at `at`, for those of these nodes that a bridge has dispatched.

    A worker runs it from its acceptance until it has finished or its lease expires.
    """
    active = {"task_id": task_id, "node_id": {"$in": list(node_ids)}, "state": {"$in": ACTIVE_STATES}}
    found = durable(db).dispatches.find(active, {"_id": 0, "node_id": 1, "state": 1, "lease": 1})
    return {row["node_id"]: _is_run(row, at) async for row in found}


def _is_run(row: dict[str, Any], at: float) -> bool:
    lease = row.get("lease") or {}
    lasts = not lease.get("ended") and float(lease.get("expires_at") or 0.0) >= at
    return row["state"] == DispatchState.OPEN.value and lasts


def _heard_at(row: dict[str, Any]) -> float:
    lease = row.get("lease") or {}
    granted_at = float(lease.get("expires_at") or 0.0) - float(lease.get("ttl_sec") or 0.0)
    return max(float(row["accepted_at"]), granted_at)
