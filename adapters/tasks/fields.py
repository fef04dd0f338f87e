"""Pure functions that build documents, filters and updates for the collection `tasks` (spec: task document).

Paths address a node by its index, `graph.nodes.<i>`, and every filter also contains its `node_id`. No path is part of
two operators of one update, because MongoDB rejects such updates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.adapters.mongo import iso, moment
from flowkit.graph.validation import parents_by_node
from flowkit.models import OPEN_NODE_STATUSES, RUNTIME_KEYS, NodeStatus, StatusChange, TaskStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from flowkit.models import AttemptInput, CloseTask, NodeRecord, RecordTask

Fields = dict[str, Any]

NEW_NODE: Fields = {"status": NodeStatus.QUEUED.value, "attempt_epoch": 0, "stats": {}, "lease": {}}
"""Runtime fields of a node that has not begun. FlowKit adds the others when they have a value.

This keeps the document small, because MongoDB rewrites the whole document for every change of a node.
"""

NODE_STATES: Fields = {
    "_id": 0,
    "graph.nodes.node_id": 1,
    "graph.nodes.status": 1,
    "graph.nodes.attempt_epoch": 1,
}
"""Projection with the status and epoch of each node."""

WIRING: Fields = {
    "_id": 0,
    "graph.nodes.node_id": 1,
    "graph.nodes.depends_on": 1,
    "graph.nodes.fan_in": 1,
    "graph.nodes.io.input_inline.input_adapter": 1,
    "graph.nodes.io.input_inline.input_args": 1,
    "graph.edges": 1,
    "graph.edges_ex": 1,
}
"""Projection with the fields that define the dependencies between nodes."""


def new_task(
    task_id: str,
    params: Fields,
    graph: Fields,
    at: float,
    *,
    namespace_id: str = "",
    database_id: str = "",
) -> Fields:
    """Return the initial document of a task."""
    kept = {key: value for key, value in graph.items() if key not in {"nodes", "edges", "edges_ex"}}
    parents = parents_by_node(graph)
    return {
        "id": task_id,
        "pipeline_id": task_id,
        "status": TaskStatus.QUEUED.value,
        "params": params,
        "graph": {
            **kept,
            "nodes": [_fresh(node, parents[node["node_id"]]) for node in graph["nodes"]],
            "edges": graph.get("edges") or [],
            "edges_ex": graph.get("edges_ex") or [],
        },
        "result": None,
        "reason": None,
        "status_history": [{"from": None, "to": TaskStatus.QUEUED.value, "at": iso(at)}],
        "coordinator": {"liveness": {"state": "ok"}},
        "next_retry_at_ms": None,
        "started_at": iso(at),
        "finished_at": None,
        "last_event_recv_ms": int(at * 1000),
        "updated_at": moment(at),
        "run_seq": 0,
        **owner(namespace_id, database_id),
    }


def owner(namespace_id: str, database_id: str) -> Fields:
    """Return the fields for the namespace id and the database id of a task. Omit an empty id."""
    ids = {"namespace_id": namespace_id, "database_id": database_id}
    return {name: value for name, value in ids.items() if value}


def _fresh(node: Fields, parents: list[str]) -> Fields:
    own = {key: value for key, value in node.items() if key not in RUNTIME_KEYS}
    given = {"depends_on": parents, "fan_in": node.get("fan_in") or "all"}
    return {**own, **given, **NEW_NODE}


def graph_difference(stored: Fields, given: Fields) -> str | None:
    """Describe the first difference between the graph of a document and a given one; None if they are equal."""
    try:
        ours, theirs = _outline(given), _outline(stored)
    except (AttributeError, KeyError, TypeError, ValueError):
        return "its document contains no graph"
    if len(ours) != len(theirs):
        return f"its document has {len(theirs)} nodes, not {len(ours)}"
    pairs = zip(ours, theirs, strict=True)
    return next((_difference(*pair, index) for index, pair in enumerate(pairs) if pair[0] != pair[1]), None)


_Outline = tuple[str, str | None, frozenset[str]]


def _outline(graph: Fields) -> list[_Outline]:
    parents = parents_by_node(graph)
    return [(n["node_id"], n.get("type"), frozenset(parents[n["node_id"]])) for n in graph["nodes"]]


def _difference(ours: _Outline, theirs: _Outline, index: int) -> str:
    for name, own, other in zip(("node_id", "type", "depends_on"), ours, theirs, strict=True):
        if own != other:
            shown = [sorted(each) if isinstance(each, frozenset) else each for each in (other, own)]
            return f"its document has {name} {shown[0]!r} at graph.nodes[{index}], not {shown[1]!r}"
    return ""


def nodes_of(stored: Fields) -> list[Fields]:
    """Return the nodes of a document. Tolerate invalid content from direct writes."""
    graph = stored.get("graph")
    nodes = graph.get("nodes") if isinstance(graph, dict) else None
    return [node if isinstance(node, dict) else {} for node in nodes] if isinstance(nodes, list) else []


def beyond(epochs: Mapping[str, int], unfinished: Collection[str]) -> Fields:
    """Return the filter for a document that is more recent than the given state.

    It matches if a node in `epochs` has a later epoch or a node in `unfinished` is not failed, skipped or cancelled.
    """
    later: list[Fields] = [
        {"node_id": node_id, "attempt_epoch": {"$gt": epoch}} for node_id, epoch in epochs.items()
    ]
    if unfinished:
        ended = [status.value for status in NodeStatus if status.ended and status is not NodeStatus.FINISHED]
        later.append({"node_id": {"$in": list(unfinished)}, "status": {"$nin": ended}})
    return {"graph.nodes": {"$elemMatch": {"$or": later}}}


def history(changes: Iterable[StatusChange]) -> list[Fields]:
    """Return `status_history` in the form that documents contain."""
    return [{"from": change.from_, "to": change.to, "at": iso(change.at)} for change in changes]


def opened_history(at: float) -> list[Fields]:
    """Return the `status_history` of a task that was just opened."""
    queued, running = TaskStatus.QUEUED.value, TaskStatus.RUNNING.value
    return history(
        [StatusChange(from_=None, to=queued, at=at), StatusChange(from_=queued, to=running, at=at)]
    )


def attempt_filter(attempt: AttemptInput, run_id: str) -> Fields:
    """Return the filter for documents in which `attempt` may begin: its epoch is new or belongs to this run."""
    node = f"graph.nodes.{attempt.index}"
    return {
        "id": attempt.task_id,
        f"{node}.node_id": attempt.node_id,
        "closed_run_id": {"$ne": run_id},
        "$or": [
            {f"{node}.attempt_epoch": {"$lt": attempt.epoch}},
            {
                f"{node}.attempt_epoch": attempt.epoch,
                f"{node}.run_id": run_id,
                f"{node}.status": {"$in": OPEN_NODE_STATUSES},
            },
        ],
    }


NOT_FLAGGED: Fields = {"coordinator.cancelled": {"$ne": True}}
"""Filter for documents without a cancel flag for the whole task."""


def open_attempt_filter(attempt: AttemptInput, run_id: str) -> Fields:
    """Return the filter of `attempt_filter`, limited to documents that are neither closed nor flagged.

    Nearly all documents match this filter, and it makes the fastest query.
    """
    return attempt_filter(attempt, run_id) | {"closed_run_id": {"$exists": False}} | NOT_FLAGGED


def fresh_attempt_filter(attempt: AttemptInput) -> Fields:
    """Return the filter for documents that are neither closed nor flagged and in which this epoch is new.

    It is narrower than `open_attempt_filter` but still matches nearly always.
    """
    node = f"graph.nodes.{attempt.index}"
    return {
        "id": attempt.task_id,
        "closed_run_id": {"$exists": False},
        **NOT_FLAGGED,
        f"{node}.node_id": attempt.node_id,
        f"{node}.attempt_epoch": {"$lt": attempt.epoch},
    }


def own_attempt_filter(attempt: AttemptInput, lease: Fields) -> Fields:
    """Return the filter of `fresh_attempt_filter`, which also matches if the epoch was taken with this lease."""
    node = f"graph.nodes.{attempt.index}"
    fresh = fresh_attempt_filter(attempt)
    epoch = fresh.pop(f"{node}.attempt_epoch")
    own = {f"{node}.attempt_epoch": attempt.epoch, f"{node}.lease.lease_id": lease["lease_id"]}
    return {**fresh, "$or": [{f"{node}.attempt_epoch": epoch}, own]}


def attempt_begun(attempt: AttemptInput, run_id: str, lease: Fields, at: float) -> Fields:
    """Return the `$set` of an attempt's first write."""
    node = f"graph.nodes.{attempt.index}"
    fields: Fields = {
        f"{node}.status": NodeStatus.RUNNING.value,
        f"{node}.attempt_epoch": attempt.epoch,
        f"{node}.run_id": run_id,
        f"{node}.lease": lease,
        f"{node}.started_at": moment(at),
        "last_event_recv_ms": int(at * 1000),
        "updated_at": moment(at),
    }
    if attempt.epoch > 1:
        fields[f"{node}.next_retry_at_ms"] = None
    return fields


NODE_FLAGS = ("coordinator", "cancel_requested_at")
"""Fields of a node that request it to stop."""


WAITS_FOR = "waits_for"
"""Field of a node with a text about what its attempt waits for; only while no external worker has accepted it."""


def attempt_unset(attempt: AttemptInput) -> Fields:
    """Return the `$unset` of an attempt's first write: fields that an earlier end of the node has left."""
    left = ("finished_at", "skip_reason", WAITS_FOR, *NODE_FLAGS)
    return {f"graph.nodes.{attempt.index}.{name}": "" for name in left}


def fence_filter(attempt: AttemptInput, run_id: str) -> Fields:
    """Return the fence of an attempt: the filter for a document in which `attempt` is still running the node."""
    node = f"graph.nodes.{attempt.index}"
    return {
        "id": attempt.task_id,
        f"{node}.node_id": attempt.node_id,
        f"{node}.attempt_epoch": attempt.epoch,
        f"{node}.run_id": run_id,
        f"{node}.status": NodeStatus.RUNNING.value,
    }


def lease_extended(attempt: AttemptInput, deadline_ms: int, at: float) -> Fields:
    """Return the `$max` of a write that extends the lease of an attempt."""
    path = f"graph.nodes.{attempt.index}.lease.deadline_ts_ms"
    return {path: deadline_ms, "last_event_recv_ms": int(at * 1000)}


def attempt_finished(attempt: AttemptInput, at: float) -> Fields:
    """Return the `$set` of an attempt's last write."""
    node = f"graph.nodes.{attempt.index}"
    fields: Fields = {
        f"{node}.status": NodeStatus.FINISHED.value,
        f"{node}.finished_at": moment(at),
        f"{node}.last_event_recv_ms": int(at * 1000),
        "last_event_recv_ms": int(at * 1000),
        "updated_at": moment(at),
    }
    if attempt.epoch > 1:
        fields[f"{node}.last_error"] = None
    return fields


def node_filter(node: NodeRecord) -> Fields:
    """Return the filter for a transition of the workflow: the node is open and has no later epoch.

    A node whose parents failed later fails although its attempt has finished it.
    """
    path = f"graph.nodes.{node.index}"
    return {
        f"{path}.node_id": node.node_id,
        f"{path}.attempt_epoch": {"$lte": node.epoch},
        f"{path}.status": {"$in": _statuses_before(node)},
    }


def _statuses_before(node: NodeRecord) -> list[str]:
    return [*OPEN_NODE_STATUSES, NodeStatus.FINISHED.value] if node.after_finish else OPEN_NODE_STATUSES


def may_follow(node: NodeRecord, stored_nodes: list[Fields]) -> bool:
    """Return True if the nodes of a document meet the condition of `node_filter`."""
    if node.index >= len(stored_nodes):
        return False
    stored = stored_nodes[node.index]
    known = stored.get("node_id") == node.node_id and stored.get("status") in _statuses_before(node)
    return known and stored.get("attempt_epoch", 0) <= node.epoch


def node_fields(node: NodeRecord, at: float) -> Fields:
    """Return the `$set` of a transition that only the workflow knows."""
    path = f"graph.nodes.{node.index}"
    retry_ms = None if node.next_retry_at is None else int(node.next_retry_at * 1000)
    fields: Fields = {
        f"{path}.status": node.status.value,
        f"{path}.attempt_epoch": node.epoch,
        f"{path}.next_retry_at_ms": retry_ms,
    }
    if node.last_error is not None:
        fields[f"{path}.last_error"] = node.last_error
    if node.skip_reason is not None:
        fields[f"{path}.skip_reason"] = node.skip_reason.value
    if node.status.ended:
        fields[f"{path}.finished_at"] = moment(at)
    if node.status is NodeStatus.CANCELLING:
        fields[f"{path}.coordinator.cancelled"] = True
        fields[f"{path}.cancel_requested_at"] = moment(at)
    return fields


def task_filter(record: RecordTask) -> Fields:
    """Return the filter for the task's own fields: the task is open and no newer run has opened it."""
    return {
        "id": record.task_id,
        "run_seq": {"$lte": record.run_seq},
        "finished_at": None,
    }


def task_fields(record: RecordTask) -> Fields:
    """Return the `$set` of a task's own fields during its run."""
    fields: Fields = {
        "status": record.status.value,
        "status_history": history(record.status_history),
        "updated_at": moment(record.at),
        **omitted(record),
    }
    if record.cancel_reason is not None:
        fields |= cancel_flags(record.cancel_reason, record.at, record.run_id)
    return fields


def omitted(record: RecordTask | CloseTask) -> Fields:
    """Return the field with the number of entries omitted from `status_history`; `{}` if none are omitted."""
    count = record.status_history_omitted
    return {"status_history_omitted": count} if count else {}


def cancel_flags(reason: str, at: float, run_id: str | None) -> Fields:
    """Return the cancel flags that external workers poll. The run id distinguishes them from a direct write."""
    return {
        "coordinator.cancelled": True,
        "coordinator.cancel_reason": reason,
        "coordinator.cancelled_at": moment(at),
        "coordinator.cancel_run_id": run_id or "",
    }


TASK_FLAGS: Fields = dict.fromkeys(
    (f"coordinator.{name}" for name in ("cancelled", "cancel_reason", "cancelled_at", "cancel_run_id")), ""
)
"""`$unset` for the task's own cancel flags."""


def flags_of(nodes: list[Fields]) -> Fields:
    """Return the `$unset` for all cancel flags of a task with these nodes."""
    flagged = (index for index, node in enumerate(nodes) if node)
    paths = (f"graph.nodes.{index}.{name}" for index in flagged for name in NODE_FLAGS)
    return {**TASK_FLAGS, **dict.fromkeys(paths, "")}
