"""The actions by which an operator steers a running task: their names, and what each takes."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Final

from pydantic import dataclasses as wire

from flowkit.actions import inputs
from flowkit.models import temporal_names
from flowkit.validation.values import SWITCH

PAUSE: Final = "pause"
RESUME: Final = "resume"
RETRY_NODE: Final = "retry_node"
SKIP_NODE: Final = "skip_node"
COMPLETE_NODE: Final = "complete_node"
FAIL_NODE: Final = "fail_node"
RETRY_BATCHES: Final = "retry_batches"
SKIP_BATCHES: Final = "skip_batches"
DECIDE: Final = "decide"
SATISFY: Final = "satisfy"
CHANGE_GRAPH: Final = temporal_names.CHANGE_GRAPH

PREVIEW_QUERY: Final = "preview"
"""Query that returns what an action would affect."""

TASK_SCOPE: Final = "task"
"""The scope of a pause that covers the whole task."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class ActionInput:
    """What the inputs of all actions have in common."""

    reason: Annotated[str, inputs.TEXT] = ""
    by: Annotated[str, inputs.TEXT] = ""
    """Who requests the action."""
    if_revision: Annotated[int | None, inputs.REVISION] = None
    """Reject the action unless the task has this revision."""
    if_state: Annotated[str | None, inputs.STATE] = None
    """Reject the action unless the nodes that it affects are in the `state` that a preview has returned."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Pause(ActionInput):
    """Input of `pause`: start nothing new in these scopes. Running attempts finish."""

    scopes: Annotated[tuple[str, ...], inputs.SCOPES] = (TASK_SCOPE,)
    """What to pause: `task`, `node:ID`, `below:ID` (all nodes below a node) or `role:NAME`."""
    interrupt: Annotated[bool, SWITCH] = False
    """Whether running attempts are stopped. They run again after the pause, which uses no retry."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Resume(ActionInput):
    """Input of `resume`: end the pause of these scopes, or of all if none is given."""

    scopes: Annotated[tuple[str, ...], inputs.SCOPES] = ()


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class RetryNode(ActionInput):
    """Input of `retry_node`: start a new generation of a node and of what depends on it, or end its wait
    for a retry.
    """

    node_id: Annotated[str, inputs.NODE_ID] = ""
    input_inline: Annotated[dict[str, Any] | None, inputs.OBJECT] = None
    """Keys of the node's `input_inline` to replace. None as the value of a key removes it."""
    input_ref: Annotated[dict[str, Any] | None, inputs.OBJECT] = None
    timeout_sec: Annotated[float | None, inputs.TIMEOUT] = None
    retry_policy: Annotated[dict[str, Any] | None, inputs.RETRY_POLICY] = None
    """Keys of the node's `retry_policy` to replace."""
    interrupt: Annotated[bool, SWITCH] = False
    """Whether attempts are stopped, of the node and of descendants, and a wait for a retry gives way to a
    new generation."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class SkipNode(ActionInput):
    """Input of `skip_node`: end a node as skipped by the user."""

    node_id: Annotated[str, inputs.NODE_ID] = ""
    interrupt: Annotated[bool, SWITCH] = False
    """Whether attempts are stopped: of the node, and of descendants that have to start again."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class CompleteNode(ActionInput):
    """Input of `complete_node`: end a node as finished, with these results."""

    node_id: Annotated[str, inputs.NODE_ID] = ""
    metrics: Annotated[dict[str, Any], inputs.OBJECT] = field(default_factory=dict)
    """The final metrics of the node."""
    artifacts_ref: Annotated[dict[str, Any] | None, inputs.OBJECT] = None
    batches: Annotated[tuple[dict[str, Any], ...], inputs.BATCHES] = ()
    """What nodes that pull from the node find: objects with `batch_uid`, `metrics` and optionally `artifacts_ref`."""
    interrupt: Annotated[bool, SWITCH] = False


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class FailNode(ActionInput):
    """Input of `fail_node`: end a node as failed. Routes and `allow_failure` apply as to any failure."""

    node_id: Annotated[str, inputs.NODE_ID] = ""
    interrupt: Annotated[bool, SWITCH] = False


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class RetryBatches(ActionInput):
    """Input of `retry_batches`: run a node again that has ended or is held, to try batches again that it has set aside.

    The node keeps its other batches. What depends on it starts a new generation.
    """

    node_id: Annotated[str, inputs.NODE_ID] = ""
    batch_uids: Annotated[tuple[str, ...], inputs.BATCH_UIDS] = ()
    """Batches to try again. Empty for all that are set aside and not skipped."""
    interrupt: Annotated[bool, SWITCH] = False
    """Whether descendants that run are stopped."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class SkipBatches(ActionInput):
    """Input of `skip_batches`: accept that batches are missing that a node has set aside.

    They no longer count as failed. A node that has failed, or is held, runs again without them.
    """

    node_id: Annotated[str, inputs.NODE_ID] = ""
    batch_uids: Annotated[tuple[str, ...], inputs.BATCH_UIDS] = ()
    """Batches to skip. Empty for all that are set aside."""
    interrupt: Annotated[bool, SWITCH] = False
    """Whether descendants that run are stopped, if the node runs again."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Decide(ActionInput):
    """Input of `decide`: approve or reject at a node of the type `approval`."""

    node_id: Annotated[str, inputs.NODE_ID] = ""
    decision: Annotated[str, inputs.DECISION] = ""
    """`approve` or `reject`."""
    comment: Annotated[str, inputs.TEXT] = ""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Satisfy(ActionInput):
    """Input of `satisfy`: fulfil a prerequisite, for all nodes of the task that name it."""

    prerequisite: Annotated[str, inputs.PREREQUISITE] = ""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class ChangeGraph(ActionInput):
    """Input of `change_graph`: add nodes to the graph, and change nodes that have not started."""

    nodes: Annotated[tuple[dict[str, Any], ...], inputs.NODES] = ()
    """New nodes, in the form in which a graph contains them."""
    edges: Annotated[tuple[Any, ...], inputs.EDGES] = ()
    """Pairs `[from, to]`. They lead to new nodes."""
    edges_ex: Annotated[tuple[dict[str, Any], ...], inputs.EDGES_EX] = ()
    """Edges with conditions, which lead to new nodes too."""
    changes: Annotated[dict[str, dict[str, Any]], inputs.CHANGES] = field(default_factory=dict)
    """By node id, a JSON merge patch (RFC 7396) of the node: new values of `io`, `retry_policy`, `timeout_sec`,
    `deadline_sec` and `when`. Nested objects are merged, and null removes a key."""


Action = (
    Pause
    | Resume
    | RetryNode
    | SkipNode
    | CompleteNode
    | FailNode
    | RetryBatches
    | SkipBatches
    | Decide
    | Satisfy
    | ChangeGraph
)
