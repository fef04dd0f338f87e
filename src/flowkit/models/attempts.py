"""Records of attempts: their input and results, their slots, and reports that they are silent."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import Any

from pydantic import dataclasses as wire

from flowkit.models.graphs import NodeIO, Quarantine


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class AttemptInput:
    """Input of one attempt. Never change its default values, because they are not sent (see `without_defaults`)."""

    task_id: str
    node_id: str
    index: int
    role: str
    epoch: int
    generation: int = 0
    io: NodeIO = field(default_factory=NodeIO)
    sources: dict[str, int] = field(default_factory=dict)
    """Epochs of the sources that have ended, by node id."""
    lease_ttl_sec: float = 45.0
    cancel_grace_sec: float = 30.0
    deployment: str = ""
    document_bytes: int = 0
    """Size of the task document, as an estimate; 0 if it is small (LARGE_DOCUMENT_BYTES)."""
    timeout_sec: float | None = None
    """Seconds after which the executor ends the attempt. Time spent waiting for MongoDB does not count."""
    failed_nodes: list[dict[str, Any]] = field(default_factory=list)
    """The nodes whose failure started this node: `node_id`, `attempt_epoch`, `reason_code`, `error`."""
    signal_first_batch: bool = False
    """Whether the executor signals the workflow when it has stored the first batch of this attempt."""
    max_ahead: int = 0
    """How many batches the attempt may be ahead of the slowest of `followers` that runs; 0 means without a limit."""
    followers: tuple[str, ...] = ()
    """Nodes that pull from this one while it runs, if `max_ahead` is set."""
    by_expression: bool = False
    """Whether `io` contains expressions, whose values are stored for the generation of the node."""
    begin_by: float = 0.0
    """Time after which an inline attempt must not begin, because another engine may run the workflow; 0 for never."""
    version: str = ""
    """Version of the handler that runs the attempt. The workflow does not know it; the worker sets it."""
    pin: bool = False
    """Whether the task runs all attempts of a role with one version, which the first of them fixes."""
    first_epoch: int = 0
    """The epoch that the latest reset of the node has reserved. Rows of the node with lower epochs do not count."""
    shard: int = 0
    """Number of the shard that the attempt runs, from 1; 0 for an attempt that runs the whole node, or ends it."""
    parallel: int = 1
    """Largest number of shards of the node."""
    quarantine: Quarantine | None = None
    """When the executor sets a batch aside; None if a failed batch fails the attempt."""
    maps: bool = False
    """Whether the attempt processes stored items (`map` of a node)."""
    streams: bool = False
    """Whether the node starts on batches of its parents, so that it must read some."""
    failures: int = 0
    """Number of failed attempts of the node in its generation."""
    kept: bool = False
    """Whether the node runs again in its generation, so that its shards also look for claims that were released."""
    source_first_epochs: dict[str, int] = field(default_factory=dict)
    """The same of the nodes whose rows the attempt reads, by node id, without those that were never reset."""
    ready_at: float = 0.0
    """When the node could have begun the attempt, in seconds since the Unix epoch; 0 for an attempt that was scheduled
    at that moment, because it did not wait for a slot."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class FirstBatch:
    """Signal to the workflow: an attempt has stored its first batch, so nodes that stream from it may start."""

    node_id: str
    run_id: str
    epoch: int


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class ShardStarted:
    """Signal to the workflow: the attempt of a shard has begun, so the next shard of the node may be scheduled."""

    node_id: str
    epoch: int


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class AttemptResult:
    """Result of a finished attempt."""

    worker_id: str = ""
    batches: int = 0
    """Number of stored batches; of an external worker, as its events say. The dispatch record has the exact number."""
    version: str = ""
    """Version of the handler that ran it; empty for functions and external workers."""
    failed_batches: int = 0
    """Number of batches that the node has set aside, if the attempt has finished it."""
    more: bool = False
    """Whether a shard has ended although batches may be left, because it hands over from time to time."""


class FailureKind(StrEnum):
    """How an attempt ended early, which determines how the workflow continues."""

    FAILURE = "failure"
    """The attempt failed. It uses one retry of the retry budget."""
    LOSS = "loss"
    """The executor disappeared. The loss counts against the budget of losses."""
    HANDOVER = "handover"
    """The worker shuts down. Another worker continues the node immediately, without using any budget."""
    EPOCH_TAKEN = "epoch_taken"
    """Another run has used the epoch. The node continues with a higher epoch, without using any budget."""
    YIELDED = "yielded"
    """The attempt waits for a source or a service. The node is retried later, without using any budget."""
    FENCED = "fenced"
    """A newer attempt has replaced this one, which ends permanently."""

    @property
    def outcome(self) -> str:
        """The outcome of the attempt in metrics: failed, lost, handed_over or fenced."""
        return _OUTCOMES.get(self, "handed_over")


_OUTCOMES = {
    FailureKind.FAILURE: "failed",
    FailureKind.LOSS: "lost",
    FailureKind.EPOCH_TAKEN: "fenced",
    FailureKind.FENCED: "fenced",
}


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class AttemptFailure:
    """Why an attempt failed."""

    kind: FailureKind
    code: str
    message: str = ""
    permanent: bool = False
    current_epoch: int = 0
    worker: str = ""
    """The worker whose handler failed, and `version`, that of the handler; empty if no handler failed."""
    version: str = ""
    pinned: str = ""
    """The version that the task has fixed for the role, if the worker of a hand-over has another one."""
    settled: int = 0
    """How many batches the generation has stored or set aside, as far as known. Losses report it, and runs of external
    workers that end before they have read all batches."""
    lost_at: float = 0.0
    """When Temporal noticed the loss of a worker, in seconds since the epoch by Temporal's clock; 0 if unknown."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The slot of one attempt."""

    node_id: str
    epoch: int
    role: str
    withdrawn: bool = False
    """Whether the attempt may still wait for the slot, so that its request must be removed."""
    wanted_at: float = 0.0
    """Since when the attempt has waited for the slot, in seconds since the Unix epoch; 0 if it has not waited."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class SlotRequest:
    """Input of `await_slot`. A task has at most one waiting request for each role."""

    task_id: str
    node_id: str
    epoch: int
    role: str
    run_id: str = ""
    """The run that asks. The activity sets it, because Reset copies the input of an earlier run."""
    priority: int = 0
    asked_at: float = 0.0
    """When the workflow began to wait for the slot. 0 if it does not wait."""
    wanted_at: float = 0.0
    """The same of the attempt, which may have waited in the workflow before."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class AcquireSlots:
    """Input of `acquire_slots`: all slots that a task wants at once."""

    task_id: str
    slots: list[Slot]
    release: list[Slot] = field(default_factory=list)
    """Slots of the task that become free first, which saves an activity."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class SlotReply:
    """Result of `await_slot`, and for one slot of `acquire_slots`."""

    granted: bool
    reason: str = ""
    """Why the slot was not granted, such as `12 of 12`."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class SlotReplies:
    """Result of `acquire_slots`: one reply for each slot, in the order of the input."""

    replies: list[SlotReply]


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseSlots:
    """Input of `release_slots`."""

    task_id: str
    slots: list[Slot] = field(default_factory=list)
    whole_task: bool = False
    """Whether the task ends, so that all of its slots and requests become free."""


def slot_wait_id(node_id: str, epoch: int) -> str:
    """Return the id of the activity `await_slot`. Ids of attempts end in a number, so it is never one of them."""
    return f"{node_id}.{epoch} slot"


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class SilentAttempt:
    """A running attempt that has sent no heartbeat for a while."""

    node_id: str
    epoch: int
    silent_sec: float = 0.0
    """Seconds since its last heartbeat."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class SilenceReport:
    """Update of the workflow: all of its attempts that are silent now. An empty list means that none is."""

    run_id: str
    silent: list[SilentAttempt] = field(default_factory=list)
    """Attempts without a heartbeat for `heartbeat_soft_sec`, in the order of their nodes' ids."""
    hard_sec: float = 0.0
    """The engine's `heartbeat_hard_sec`: attempts that are silent for longer fail. 0 means never."""
