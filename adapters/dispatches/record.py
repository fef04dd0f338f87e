"""The dispatch record: what the bridges know about one attempt that an external worker runs. Pure.

All bridges share the records, so any bridge can continue an attempt that another one dispatched. A record stays small
however many batches its node has.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter
from pydantic import dataclasses as wire

from flowkit.graph.input_adapters import PullArgs
from flowkit.hashing import stable_hash
from flowkit.models import AttemptFailure, AttemptInput

Fields = dict[str, Any]

PAST_LEASES = 16
"""Maximum number of earlier leases that a record keeps, to recognize redelivered acceptances."""


class DispatchState(StrEnum):
    """State of a dispatch record."""

    OPEN = "open"
    """The command was or will be sent, and the attempt has no outcome yet."""
    FINISHING = "finishing"
    """The worker has finished, and a bridge checks whether it has read all of its inputs."""
    ENDED = "ended"
    """The record contains the outcome, which Temporal may not know yet."""
    REPORTED = "reported"
    """Temporal knows the outcome, or the attempt no longer exists there."""


ACTIVE_STATES = [DispatchState.OPEN.value, DispatchState.FINISHING.value]
"""States of attempts without a final outcome."""


class OutcomeKind(StrEnum):
    """How an attempt ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How an attempt ended, according to a terminal event of its worker or a decision of a bridge."""

    kind: OutcomeKind
    at: float
    worker_id: str = ""
    failure: AttemptFailure | None = None
    """Set if `kind` is `failed`."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Final metrics. The record drops them once the outcome is reported."""
    artifacts_ref: dict[str, Any] | None = None


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLease:
    """The worker that runs an attempt."""

    worker_id: str
    lease_id: str
    ttl_sec: float
    expires_at: float
    """Seconds since the Unix epoch, by the clock of the bridge that received the event. Clocks of bridges differ."""
    worker_ts_ms: int
    """Time of the worker's latest event, by the worker's clock."""
    ended: bool = False
    """Whether the worker has announced that it stopped or restarted. A later event of the worker revokes that."""

    def is_later(self, known: WorkerLease | None) -> bool:
        """Return whether this lease contains an event that `known` does not."""
        if known is None or known.lease_id != self.lease_id:
            return True
        return self.expires_at > known.expires_at or self.worker_ts_ms > known.worker_ts_ms


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class CancelRequest:
    """A request to stop an attempt."""

    reason: str
    at: float


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """One dispatch record. Records are unique for each task, node and epoch."""

    attempt: AttemptInput
    """The input of the attempt's activity, without `io`, which would make the record large."""
    run_id: str
    queue: str
    """Task queue of the engine."""
    topic: str
    partition: int
    end_offset: int
    """Lower bound for the end of the partition before the command was sent. A search for the command begins here."""
    dedup_id: str
    cancel_token: str
    owner: str
    """Id of the bridge that supervises the attempt."""
    created_at: float
    pull: PullArgs | None = None
    """Arguments of the pulling input adapter, if the node has one."""
    offset: int | None = None
    """Offset of the command; None while it is unknown."""
    state: DispatchState = DispatchState.OPEN
    lease: WorkerLease | None = None
    past_leases: tuple[str, ...] = ()
    accepted_at: float | None = None
    batches: int = 0
    cancel: CancelRequest | None = None
    outcome: Outcome | None = None

    @property
    def active(self) -> bool:
        """Whether the attempt has no final outcome yet."""
        return self.state in ACTIVE_STATES

    @property
    def key(self) -> str:
        """The `_id` of the record."""
        return key_of(self.attempt.task_id, self.attempt.node_id, self.attempt.epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedCommand:
    """The place of the command of an open attempt."""

    key: str
    """The `_id` of the dispatch record."""
    role: str
    partition: int
    accepted: bool
    """Whether a worker runs the attempt."""


_ADAPTER = TypeAdapter(Dispatch)
_ATTEMPT = TypeAdapter(AttemptInput)
_PULL = TypeAdapter(PullArgs)


@lru_cache(maxsize=10_000)
def key_of(task_id: str, node_id: str, epoch: int) -> str:
    """Return the `_id` of the record for one attempt."""
    return stable_hash({"t": task_id, "n": node_id, "e": epoch})


def to_document(record: Dispatch) -> Fields:
    """Return the document of a record.

    Attempt and pull arguments are JSON texts, because node ids may contain characters that MongoDB rejects in names.
    """
    attempt = record.attempt
    fields = {name: getattr(record, name) for name in _NAMES}
    return {
        "_id": record.key,
        "task_id": attempt.task_id,
        "node_id": attempt.node_id,
        "attempt_epoch": attempt.epoch,
        "role": attempt.role,
        **fields,
        "state": record.state.value,
        "past_leases": list(record.past_leases),
        "lease": None if record.lease is None else asdict(record.lease),
        "cancel": None if record.cancel is None else asdict(record.cancel),
        "outcome": None if record.outcome is None else outcome_fields(record.outcome),
        "attempt": _ATTEMPT.dump_json(attempt, exclude_defaults=True).decode(),
        "pull": None if record.pull is None else _PULL.dump_json(record.pull).decode(),
    }


def from_document(document: Fields) -> Dispatch:
    """Return the record of a document. Raise pydantic's ValidationError (a ValueError) if it is none."""
    known = {name: document[name] for name in _NAMES if name in document}
    attempt, pull = json.loads(document["attempt"]), document.get("pull")
    return _ADAPTER.validate_python({**known, "attempt": attempt, "pull": json.loads(pull) if pull else None})


_NAMES = tuple(name for name in Dispatch.__dataclass_fields__ if name not in ("attempt", "pull"))


def outcome_fields(outcome: Outcome) -> Fields:
    """Return an outcome as it is stored."""
    fields = asdict(outcome)
    failure = outcome.failure
    stored = None if failure is None else {**asdict(failure), "kind": failure.kind.value}
    return {**fields, "kind": outcome.kind.value, "failure": stored}
