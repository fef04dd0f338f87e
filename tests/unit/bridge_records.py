"""Builders of status events and dispatch records for the tests of the bridge's rules."""

from __future__ import annotations

import json
from typing import Any

from flowkit.adapters.dispatches import Dispatch, WorkerLease
from flowkit.bridge.rules.messages import StatusEvent, read_status
from flowkit.models import AttemptInput

TASK = "7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90"
NODE = "extract"
NOW_MS = 1_764_000_000_000
NOW = NOW_MS / 1000

PAYLOADS: dict[str, dict[str, Any]] = {
    "TASK_ACCEPTED": {"lease_id": "l1", "lease_deadline_ts_ms": NOW_MS + 60_000},
    "TASK_HEARTBEAT": {"lease_id": "l1", "lease_deadline_ts_ms": NOW_MS + 60_000},
    "TASK_RESUMED": {"lease_id": "l1", "lease_deadline_ts_ms": NOW_MS + 60_000},
    "BATCH_OK": {"batch_uid": "b1", "metrics": {"count": 2}, "artifacts_ref": None},
    "BATCH_FAILED": {"batch_uid": "b2", "reason_code": "error", "permanent": False, "error": None},
    "TASK_DONE": {"metrics": {"total": 2}, "artifacts_ref": None, "final_uid": "__final__"},
    "TASK_FAILED": {"reason_code": "error", "permanent": False, "error": None},
    "CANCELLED": {"reason": "cancelled"},
}
"""A valid payload for each kind of event about an attempt, without `kind` and `worker_id`."""


def message(
    kind: str = "TASK_HEARTBEAT", payload: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """Return an event as a worker sends it, with changes in its payload and its envelope."""
    fields = {"kind": kind, "worker_id": "w1", **PAYLOADS.get(kind, {}), **(payload or {})}
    envelope = {
        "v": 1,
        "msg_type": "event",
        "role": "worker",
        "corr_id": "c",
        "dedup_id": "d",
        "task_id": TASK,
        "node_id": NODE,
        "step_type": "indexer",
        "attempt_epoch": 1,
        "ts_ms": NOW_MS,
        "payload": fields,
        "target_worker_id": None,
    }
    return {**envelope, **changes}


def value(kind: str = "TASK_HEARTBEAT", payload: dict[str, Any] | None = None, **changes: Any) -> bytes:
    """Return the value of an event's record."""
    return json.dumps(message(kind, payload, **changes)).encode()


def event(
    kind: str = "TASK_HEARTBEAT",
    payload: dict[str, Any] | None = None,
    *,
    role: str = "indexer",
    **changes: Any,
) -> StatusEvent:
    """Return an event as the bridge reads it from the status topic of a role."""
    found = read_status(value(kind, payload, **changes), role)
    assert found is not None
    return found


def attempt(**changes: Any) -> AttemptInput:
    """Return the input of an attempt."""
    fields: dict[str, Any] = {
        "task_id": TASK,
        "node_id": NODE,
        "index": 0,
        "role": "indexer",
        "epoch": 1,
    }
    return AttemptInput(**{**fields, **changes})


def lease(worker_id: str = "w1", lease_id: str = "l1", **changes: Any) -> WorkerLease:
    """Return the lease of a worker."""
    fields: dict[str, Any] = {"ttl_sec": 60.0, "expires_at": NOW + 66, "worker_ts_ms": NOW_MS}
    return WorkerLease(**{"worker_id": worker_id, "lease_id": lease_id, **fields, **changes})


def record(**changes: Any) -> Dispatch:
    """Return the dispatch record of an attempt that no worker has accepted."""
    fields: dict[str, Any] = {
        "attempt": attempt(),
        "run_id": "run",
        "queue": "flowkit",
        "topic": "cmd.indexer.v1",
        "partition": 3,
        "end_offset": 10,
        "dedup_id": "d",
        "cancel_token": "c",
        "owner": "bridge",
        "created_at": NOW,
        "offset": 10,
    }
    return Dispatch(**{**fields, **changes})
