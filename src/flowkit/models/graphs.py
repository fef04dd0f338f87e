"""The graph of a task, as parsed and validated, and the statuses of its nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pydantic import dataclasses as wire

from flowkit import reason_codes
from flowkit.models import temporal_names

if TYPE_CHECKING:
    from collections.abc import Sequence

FAILED_NODES_KEY = "failed_nodes"
"""The key of `input_inline`, and the argument of a function, with the failures that started a node."""


class OnNodeFailure(StrEnum):
    """How the permanent failure of a node affects the rest of its task."""

    FAIL = "fail"
    """Stop the task: cancel running nodes and skip the others."""
    CONTINUE = "continue"
    """Let branches that do not depend on the node finish. The task still ends as `failed`."""
    HOLD = "hold"
    """Hold the node until an operator decides, or until its `hold_sec` ends; then as `fail`."""
    FINISH_RUNNING = "finish_running"
    """Start no further node, let those that have started finish, then fail the task."""


class VersionPolicy(StrEnum):
    """Which versions of a handler may run the attempts of a task."""

    ANY = "any"
    """Every worker of the role."""
    PIN = "pin"
    """Only workers with the version that ran the first attempt of the role in the task."""


class NodeStatus(StrEnum):
    """Status of one node."""

    QUEUED = "queued"
    RUNNING = "running"
    DEFERRED = "deferred"
    """The node waits for its retry."""
    CANCELLING = "cancelling"
    """FlowKit has requested a cancel, and the attempt has not ended yet."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"
    """The node will not run; `skip_reason` says why."""

    @property
    def ended(self) -> bool:
        """Whether the node has ended."""
        return self in _ENDED

    @property
    def begun(self) -> bool:
        """Whether the node has started, in its generation, and has not ended."""
        return self in _BEGUN

    @property
    def in_flight(self) -> bool:
        """Whether an attempt of the node runs, or is being cancelled."""
        return self in _IN_FLIGHT


_IN_FLIGHT = frozenset({NodeStatus.RUNNING, NodeStatus.CANCELLING})
_BEGUN = _IN_FLIGHT | {NodeStatus.DEFERRED}
_ENDED = frozenset({NodeStatus.FINISHED, NodeStatus.FAILED, NodeStatus.CANCELLED, NodeStatus.SKIPPED})


class SkipReason(StrEnum):
    """Why a node was skipped."""

    ROUTING = "routing"
    CONDITION = "condition"
    UPSTREAM_FAILED = "upstream_failed"
    TASK_FAILED = "task_failed"
    TASK_CANCELLED = "task_cancelled"
    USER = "user"


INHERITED = (SkipReason.UPSTREAM_FAILED, SkipReason.CONDITION, SkipReason.ROUTING, SkipReason.USER)
"""Skip reasons that a child inherits from its parents, in order of precedence."""


class StartWhen(StrEnum):
    """When a node's gate may open."""

    READY = "ready"
    """When enough parents have finished."""
    FIRST_BATCH = "first_batch"
    """Also when any parent has stored its first batch, unless the fan-in is `count:n`."""


ALL_DONE = "all_done"
"""The mode of a fan-in whose gate opens when all parents have ended, in whatever way, and never closes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FanIn:
    """How many parents must finish before a node starts: mode `all`, `any`, or `count` with a number.

    With the mode `all_done`, all parents must end, in whatever way.
    """

    mode: str = "all"
    count: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """Whether and when FlowKit retries a failed attempt of a node."""

    max: int = 2
    """Retry budget; a node that only fails has `max` + 1 attempts."""
    backoff_sec: float = 300.0
    backoff_coefficient: float = 1.0
    """Factor by which the backoff grows with each retry."""
    max_backoff_sec: float | None = None
    jitter: float = 0.0
    """Largest part of the backoff, from 0 to 1, that FlowKit subtracts at random."""
    permanent_on: tuple[str, ...] = (reason_codes.BAD_INPUT, reason_codes.SCHEMA_MISMATCH)
    """Reason codes that FlowKit never retries."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Quarantine:
    """When a node sets a batch aside, and continues, instead of failing."""

    attempts: int = 3
    """Tries of a batch."""
    most: int | None = 10
    """How many batches the node may set aside; None if `share` limits them."""
    share: float | None = None
    """Which part of the batches the node may set aside, above 0 and up to 1."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class NodeIO:
    """The input of a node and, for coordinator functions, the function and its arguments."""

    input_ref: dict[str, Any] | None = None
    input_inline: dict[str, Any] | None = None
    batching: dict[str, Any] | None = None
    start_when: StartWhen = StartWhen.READY
    fn: str = temporal_names.NOOP
    fn_args: dict[str, Any] = field(default_factory=dict)

    def inline_with(self, failed_nodes: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Return `input_inline` for an attempt. If failures started the node, the key `failed_nodes` lists them."""
        if not failed_nodes:
            return self.input_inline
        return {**(self.input_inline or {}), FAILED_NODES_KEY: failed_nodes}


@dataclass(frozen=True, kw_only=True, slots=True)
class Approval:
    """What a node of the type `approval` waits for."""

    text: str = ""
    default: str = "reject"
    """The decision if the deadline of the node passes: `approve` or `reject`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delay:
    """How long a node of the type `delay` waits: a number of seconds, or until a Unix timestamp."""

    sec: float | None = None
    until: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemMap:
    """The items that a node processes instead of batches of other nodes."""

    over: str
    """The expression that gives the list of items, in CEL."""
    batch_size: int = 1
    """Items of a batch; the last batch may have fewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One normalized node of a graph."""

    node_id: str
    index: int
    """Position in `graph.nodes`, by which the task document addresses the node."""
    type: str
    depends_on: tuple[str, ...] = ()
    """Ids of the parents, without those that route to this node."""
    streams_from: tuple[str, ...] = ()
    """Ids of the parents whose first stored batch satisfies their edge to this node."""
    max_ahead: int = 0
    """How many batches the node may be ahead of its slowest streaming child that runs; 0 means without a limit."""
    fan_in: FanIn = field(default_factory=FanIn)
    io: NodeIO = field(default_factory=NodeIO)
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    allow_failure: bool = False
    timeout_sec: float | None = None
    deadline_sec: float | None = None
    """Seconds from the opening of the node's gate to its end, over all attempts and waits."""
    io_bytes: int = 2
    on_success: tuple[str, ...] = ()
    on_failure: tuple[str, ...] = ()
    conditional: bool = False
    """Whether the node starts only if a route leads to it. `on_success` is empty if FlowKit ignores the list."""
    when: str | None = None
    """The condition under which the node starts once its gate has opened, in CEL."""
    edge_when: dict[str, str] = field(default_factory=dict)
    """The conditions of the edges from these parents, in CEL."""
    expressions: tuple[tuple[str, str], ...] = ()
    """The values by expression in `io`, and the list in `map.over`: path and text, in CEL."""
    map: ItemMap | None = None
    hold_sec: float | None = None
    """For how long a failure of the node waits for a decision of an operator; None if it does not."""
    parallel: int = 1
    """Largest number of shards that process the batches of the node at the same time; 1 for a node without shards."""
    quarantine: Quarantine | None = None
    """What happens to batches that fail (`on_batch_failure`); None if they fail their attempt."""
    prerequisites: tuple[str, ...] = ()
    """External prerequisites that must be satisfied before the node starts."""
    approval: Approval | None = None
    delay: Delay | None = None

    @property
    def is_function(self) -> bool:
        """Whether the engine runs the node as a coordinator function."""
        return self.type == COORDINATOR_FN

    @property
    def is_engine_node(self) -> bool:
        """Whether the workflow itself runs the node, without any attempt: an approval or a delay."""
        return self.type in ENGINE_NODES

    @property
    def pulls(self) -> bool:
        """Whether the node reads artifacts of other nodes."""
        return _is_pulling(self.io)

    @property
    def pulls_from(self) -> tuple[str, ...]:
        """Ids of the nodes whose artifacts the node reads."""
        return pulled_sources(self.io)


def _is_pulling(io: NodeIO) -> bool:
    given = io.input_inline
    return given is not None and str(given.get("input_adapter", "")).startswith("pull.")


def pulled_sources(io: NodeIO) -> tuple[str, ...]:
    """Return the ids of the nodes whose artifacts a node with this input reads."""
    args = (io.input_inline or {}).get("input_args") or {}
    return tuple(args.get("from_nodes") or ()) if _is_pulling(io) else ()


COORDINATOR_FN = "coordinator_fn"
APPROVAL, DELAY = "approval", "delay"
ENGINE_NODES = frozenset({APPROVAL, DELAY})
"""Types of nodes that the workflow runs itself, without any attempt."""
ENGINE_TYPES = ENGINE_NODES | {COORDINATOR_FN}
"""Types of nodes that need no worker."""
RESERVED_TYPES = ENGINE_TYPES | {"prerequisite"}
"""Names that roles must not have."""

APPROVE, REJECT = "approve", "reject"
"""The decisions about an approval."""

DEFAULT_HOLD_SEC = 7 * 24 * 3600.0
"""How long the failure of a node is held if neither the node nor the graph has `hold_sec`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """A graph that passed validation."""

    nodes: Sequence[Node]
    name: str | None = None
    on_node_failure: OnNodeFailure = OnNodeFailure.FAIL
    deadline_sec: float | None = None
    """Seconds from the opening of the task to its end."""
    hold_sec: float = DEFAULT_HOLD_SEC
    """For how long failures of nodes are held that have no `hold_sec` of their own."""
    version_policy: VersionPolicy = VersionPolicy.ANY
    warnings: tuple[str, ...] = ()


def inherited_reason(node: Node, status: NodeStatus, reason: SkipReason | None) -> SkipReason | None:
    """Return the skip reason that a node passes on that has ended so, for this reason; None if it finished.

    A failure that starts other nodes passes on `routing`, because the branches below the node were not taken.
    """
    if status is NodeStatus.FINISHED:
        return None
    if status is NodeStatus.FAILED and node.on_failure:
        return SkipReason.ROUTING
    if status is NodeStatus.SKIPPED and reason in INHERITED:
        return reason
    return SkipReason.UPSTREAM_FAILED
