"""Dispatch records and status events for tests of the bridge's decisions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from flowkit.adapters.dispatches import Dispatch, DispatchState, Outcome, OutcomeKind, WorkerLease
from flowkit.bridge.rules.messages import StatusEvent, read_status
from flowkit.models import AttemptInput, NodeIO

LEASE = WorkerLease(worker_id="w1", lease_id="l1", ttl_sec=10.0, expires_at=110.0, worker_ts_ms=1_000)


def attempt(*, epoch: int = 1, **io: Any) -> AttemptInput:
    """Return the input of an attempt of node `n`."""
    return AttemptInput(task_id="t", node_id="n", index=0, role="indexer", epoch=epoch, io=NodeIO(**io))


def dispatch(**fields: Any) -> Dispatch:
    """Return an open record without a lease, whose command is at offset 5."""
    made = Dispatch(
        attempt=attempt(),
        run_id="r",
        queue="q",
        topic="cmd",
        partition=0,
        end_offset=5,
        dedup_id="d",
        cancel_token="c",
        owner="b",
        created_at=100.0,
        offset=5,
    )
    return replace(made, **fields)


def ended(worker_id: str = "w1") -> Dispatch:
    """Return a record that ended with an event of `worker_id`, or with a verdict of the bridge if it is empty."""
    outcome = Outcome(kind=OutcomeKind.DONE, at=105.0, worker_id=worker_id)
    return dispatch(state=DispatchState.ENDED, lease=LEASE, outcome=outcome)


def event(kind: str, worker_id: str = "w1", *, ts_ms: int = 2_000, **payload: Any) -> StatusEvent:
    """Return an event about epoch 1 of node `n`, as if a worker had sent it."""
    fields = {**_DEFAULTS.get(kind, {}), **payload}
    envelope = {
        "msg_type": "event",
        "role": "worker",
        "dedup_id": f"{kind}-{ts_ms}",
        "task_id": "t",
        "node_id": "n",
        "step_type": "indexer",
        "attempt_epoch": 1,
        "ts_ms": ts_ms,
        "payload": {"kind": kind, "worker_id": worker_id, **fields},
    }
    read = read_status(json.dumps(envelope).encode(), "indexer")
    assert read is not None
    return read


_LEASED = {"lease_id": "l1", "lease_deadline_ts_ms": 12_000}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "TASK_ACCEPTED": _LEASED,
    "TASK_HEARTBEAT": _LEASED,
    "BATCH_OK": {"batch_uid": "b0", "metrics": {}},
    "BATCH_FAILED": {"batch_uid": "b0", "reason_code": "x", "permanent": False},
    "TASK_DONE": {"metrics": {}},
    "TASK_FAILED": {"reason_code": "x", "permanent": False},
    "CANCELLED": {"reason": "cancelled"},
}
KINDS = tuple(_DEFAULTS)
