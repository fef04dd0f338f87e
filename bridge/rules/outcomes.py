"""The outcome of an attempt: from the terminal event of its worker, or from a decision of the bridge. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flowkit import reason_codes
from flowkit.adapters.dispatches import Outcome, OutcomeKind
from flowkit.adapters.metrics import UNSTORABLE, storable
from flowkit.attempt.failures import failure, from_error, lost, timed_out, unexpected, yielded
from flowkit.errors import FlowKitError
from flowkit.protocol.messages import EvTaskDone, EvTaskFailed

if TYPE_CHECKING:
    from flowkit.adapters.dispatches import Dispatch
    from flowkit.bridge.rules.messages import StatusEvent
    from flowkit.models import AttemptFailure


def outcome_of(record: Dispatch, event: StatusEvent, at: float) -> Outcome:
    """Return the outcome that a terminal event reports. After a cancel request, every end counts as cancelled (H11)."""
    payload, worker_id = event.event, event.worker_id
    if record.cancel is None and isinstance(payload, EvTaskFailed):
        code, text = payload.reason_code or reason_codes.ERROR, payload.error or ""
        return _fail(failure(code, text, permanent=payload.permanent), at, worker_id)
    if record.cancel is None and isinstance(payload, EvTaskDone):
        return _done(payload, at, worker_id)
    return Outcome(kind=OutcomeKind.CANCELLED, at=at, worker_id=worker_id)


def _done(payload: EvTaskDone, at: float, worker_id: str) -> Outcome:
    try:
        metrics, _ = storable("metrics of TASK_DONE", payload.metrics)
        ref, _ = storable("artifacts_ref of TASK_DONE", payload.artifacts_ref or {})
    except UNSTORABLE as error:
        return outcome_of_error(error, at, worker_id)
    return Outcome(
        kind=OutcomeKind.DONE, at=at, worker_id=worker_id, metrics=metrics, artifacts_ref=ref or None
    )


def outcome_of_error(error: Exception, at: float, worker_id: str = "") -> Outcome:
    """Return the outcome of an attempt that ended with an error in the bridge. An unexpected one uses a retry."""
    cause = from_error(error) if isinstance(error, FlowKitError) else unexpected(error)
    return _fail(cause, at, worker_id)


def cancelled(at: float) -> Outcome:
    """Return the outcome of an attempt that a bridge ended because of a cancel request."""
    return Outcome(kind=OutcomeKind.CANCELLED, at=at)


def lease_lost(record: Dispatch, at: float, settled: int = 0) -> Outcome:
    """Return the outcome of an attempt whose worker no longer sends events, and whose node has `settled` batches."""
    lease = record.lease
    worker = f"worker {lease.worker_id!r}" if lease else "the worker"
    ttl = f" for {lease.ttl_sec:g} s" if lease else ""
    text = f"{worker} sent no event{ttl}, or has stopped or restarted"
    return _fail(lost(reason_codes.LEASE_LOST, text, settled=settled), at)


def dispatch_lost(why: str, at: float) -> Outcome:
    """Return the outcome of an attempt whose command no worker runs. Its redispatch uses no budget."""
    return _fail(yielded(reason_codes.DISPATCH_LOST, why), at)


def not_in_topic() -> AttemptFailure:
    """Return the failure of an attempt whose command is not in its topic."""
    return yielded(reason_codes.DISPATCH_LOST, "Kafka has not stored the command")


def timeout(limit_sec: float, at: float) -> Outcome:
    """Return the outcome of an attempt that exceeded its `timeout_sec`."""
    return _fail(timed_out(limit_sec), at)


def unclaimed(count: int, source: str, at: float, *, settled: int) -> Outcome:
    """Return the outcome of a run that ended before it read all batches of its sources (H19).

    `settled` is the number of batches that the node has stored.
    """
    text = (
        f"the worker finished without {count} batches, for example of node {source!r}; another run reads them"
    )
    return _fail(replace(yielded(reason_codes.UNCLAIMED_BATCHES, text), settled=settled), at)


def idle_sources(at: float) -> Outcome:
    """Return the outcome of a run that has read all batches so far, and none of whose sources is running."""
    text = "no node that it pulls from is running; it continues when one runs"
    return _fail(yielded(reason_codes.YIELDED, text), at)


def uid_clash(uid: str, sources: list[str], at: float) -> Outcome:
    """Return the outcome of a node whose sources share a batch uid, which its worker cannot distinguish (H22)."""
    text = (
        f"batch uid {uid!r} occurs in the sources {', '.join(sources)}; an external worker cannot distinguish them: "
        "make batch uids unique within the task, or use pull.from_artifacts.rechunk:size"
    )
    return _fail(failure(reason_codes.BATCH_UID_CLASH, text, permanent=True), at)


def not_requested(at: float, worker_id: str) -> Outcome:
    """Return the outcome of a run that its worker cancelled on its own (H13). It uses one retry."""
    text = f"worker {worker_id!r} cancelled the run although no cancel was requested"
    return _fail(failure(reason_codes.CANCELLED_BY_WORKER, text, permanent=False), at, worker_id)


def withdrawn() -> AttemptFailure:
    """Return the yield of a run that was stopped because of a cancel flag that is no longer set."""
    text = "the run was stopped by a cancel flag, which was unset before Temporal cancelled the attempt"
    return yielded(reason_codes.CANCEL_PENDING, text)


def _fail(cause: AttemptFailure, at: float, worker_id: str = "") -> Outcome:
    return Outcome(kind=OutcomeKind.FAILED, at=at, worker_id=worker_id, failure=cause)
