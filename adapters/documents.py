"""Shapes of the documents in `tasks`, as pure functions (spec: task document).

A node is addressed by its place, `graph.nodes.<i>`, and every filter names its `node_id` as well. No path stands in
two operators of one update: MongoDB refuses that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.adapters.mongo import iso, moment
from flowkit.models import OPEN_NODE_STATUSES, RUNTIME_KEYS, NodeStatus, StatusChange, TaskStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from flowkit.models import AttemptInput, CloseTask, NodeRecord, RecordTask

Fields = dict[str, Any]

NEW_NODE: Fields = {"status": NodeStatus.QUEUED.value, "attempt_epoch": 0, "stats": {}, "lease": {}}
"""Runtime fields of a node that has not begun; the others appear when there is something to say.

Kept small: a database writes the whole document again for every change of one node.
"""

NODE_STATES: Fields = {
    "_id": 0,
    "graph.nodes.node_id": 1,
    "graph.nodes.status": 1,
    "graph.nodes.attempt_epoch": 1,
}
"""Projection: what tells how far each node is."""

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
"""Projection: what says which node depends on which."""


def new_task(task_id: str, params: Fields, graph: Fields, at: float) -> Fields:
    """A task document as it is first written."""
    kept = {key: value for key, value in graph.items() if key not in {"nodes", "edges", "edges_ex"}}
    return {
        "id": task_id,
        "pipeline_id": task_id,
        "status": TaskStatus.QUEUED.value,
        "params": params,
        "graph": {
            **kept,
            "nodes": [_fresh(node) for node in graph["nodes"]],
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
    }


def _fresh(node: Fields) -> Fields:
    own = {key: value for key, value in node.items() if key not in RUNTIME_KEYS}
    given = {"depends_on": node.get("depends_on") or [], "fan_in": node.get("fan_in") or "all"}
    return {**own, **given, **NEW_NODE}


def beyond(epochs: Mapping[str, int], unfinished: Collection[str]) -> Fields:
    """Filter: one of these nodes is past its epoch, or one of `unfinished` is not failed, skipped or cancelled."""
    later: list[Fields] = [
        {"node_id": node_id, "attempt_epoch": {"$gt": epoch}} for node_id, epoch in epochs.items()
    ]
    if unfinished:
        ended = [status.value for status in NodeStatus if status.ended and status is not NodeStatus.FINISHED]
        later.append({"node_id": {"$in": list(unfinished)}, "status": {"$nin": ended}})
    return {"graph.nodes": {"$elemMatch": {"$or": later}}}


def unchanged_nodes(stored: Fields) -> Fields:
    """Filter: every open node still has the status in which it was read."""
    return {
        f"graph.nodes.{index}.status": node["status"]
        for index, node in enumerate(stored["graph"]["nodes"])
        if node["status"] in OPEN_NODE_STATUSES
    }


def history(changes: Iterable[StatusChange]) -> list[Fields]:
    """`status_history` as documents hold it."""
    return [{"from": change.from_, "to": change.to, "at": iso(change.at)} for change in changes]


def opened_history(at: float) -> list[Fields]:
    """`status_history` of a task that has just been opened."""
    queued, running = TaskStatus.QUEUED.value, TaskStatus.RUNNING.value
    return history(
        [StatusChange(from_=None, to=queued, at=at), StatusChange(from_=queued, to=running, at=at)]
    )


def attempt_filter(attempt: AttemptInput, run_id: str) -> Fields:
    """Documents in which `attempt` may begin: its epoch is new, or this run's own."""
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


def open_attempt_filter(attempt: AttemptInput, run_id: str) -> Fields:
    """The same, in documents that nobody has closed: nearly all, and the quickest to find and write."""
    return attempt_filter(attempt, run_id) | {"closed_run_id": {"$exists": False}}


def fresh_attempt_filter(attempt: AttemptInput) -> Fields:
    """Documents that nobody has closed and in which this epoch is new: the narrower, but nearly always true."""
    node = f"graph.nodes.{attempt.index}"
    return {
        "id": attempt.task_id,
        "closed_run_id": {"$exists": False},
        f"{node}.node_id": attempt.node_id,
        f"{node}.attempt_epoch": {"$lt": attempt.epoch},
    }


def attempt_begun(attempt: AttemptInput, run_id: str, lease: Fields, at: float) -> Fields:
    """The `$set` of an attempt's first write."""
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


def attempt_forgets(attempt: AttemptInput) -> Fields:
    """The `$unset` of an attempt's first write: what an earlier end of the node has left."""
    left = ("finished_at", "skip_reason", "coordinator", "cancel_requested_at")
    return {f"graph.nodes.{attempt.index}.{name}": "" for name in left}


def own_attempt(attempt: AttemptInput, run_id: str) -> Fields:
    """Filter of a node that is still in `attempt`'s hands."""
    node = f"graph.nodes.{attempt.index}"
    return {
        "id": attempt.task_id,
        f"{node}.node_id": attempt.node_id,
        f"{node}.attempt_epoch": attempt.epoch,
        f"{node}.run_id": run_id,
        f"{node}.status": NodeStatus.RUNNING.value,
    }


def attempt_finished(attempt: AttemptInput, at: float) -> Fields:
    """The `$set` of an attempt's last write."""
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
    """Condition under which a transition of the workflow may be written: not behind the document, still open."""
    path = f"graph.nodes.{node.index}"
    return {
        f"{path}.node_id": node.node_id,
        f"{path}.attempt_epoch": {"$lte": node.epoch},
        f"{path}.status": {"$in": OPEN_NODE_STATUSES},
    }


def node_fields(node: NodeRecord, at: float) -> Fields:
    """The `$set` of a transition that only the workflow knows."""
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
    """Condition under which a run may write its task's own fields."""
    return {
        "id": record.task_id,
        "run_seq": {"$lte": record.run_seq},
        "finished_at": None,
    }


def task_fields(record: RecordTask) -> Fields:
    """The `$set` of a task's own fields during its run."""
    fields: Fields = {
        "status": record.status.value,
        "status_history": history(record.status_history),
        "updated_at": moment(record.at),
    }
    if record.cancel_reason is not None:
        fields |= cancel_flags(record.cancel_reason, record.at)
    return fields


def cancel_flags(reason: str, at: float) -> Fields:
    """The flags that external workers poll."""
    return {
        "coordinator.cancelled": True,
        "coordinator.cancel_reason": reason,
        "coordinator.cancelled_at": moment(at),
    }


def closed_fields(close: CloseTask, stored_nodes: list[Fields]) -> Fields:
    """The `$set` of a task's end: its own fields, and the nodes whose documents missed something."""
    fields: Fields = {
        "status": close.status.value,
        "status_history": history(close.status_history),
        "closed_run_id": close.run_id,
        "reason": close.reason,
        "finished_at": moment(close.at),
        "next_retry_at_ms": None,
        "updated_at": moment(close.at),
    }
    if close.status is TaskStatus.FINISHED:
        fields["result"] = result(close.handled_failures, stored_nodes)
    if close.status is TaskStatus.CANCELLED:
        fields |= cancel_flags(close.reason or "", close.at)
    if close.truncated:
        fields["coordinator.truncated"] = True
    for node in close.nodes:
        if _differs(node, stored_nodes[node.index]):
            fields |= node_fields(node, close.at)
    return fields | _missed_finishes(close, stored_nodes)


def _missed_finishes(close: CloseTask, stored_nodes: list[Fields]) -> Fields:
    """Nodes that finished although their documents do not say so."""
    otherwise = {node.index for node in close.nodes}
    finished = NodeStatus.FINISHED.value
    fields: Fields = {}
    for index, node in enumerate(stored_nodes):
        if index not in otherwise and node.get("status") != finished:
            fields[f"graph.nodes.{index}.status"] = finished
            fields[f"graph.nodes.{index}.finished_at"] = moment(close.at)
    return fields


def result(handled_failures: list[str], stored_nodes: list[Fields]) -> Fields:
    """`result` of a finished task: each node's stats in graph order, and the failures that were tolerated."""
    nodes = [{"node_id": node["node_id"], "stats": node.get("stats") or {}} for node in stored_nodes]
    return {"nodes": nodes, **({"handled_failures": handled_failures} if handled_failures else {})}


def _differs(node: NodeRecord, stored: Fields) -> bool:
    return (stored.get("status"), stored.get("attempt_epoch")) != (node.status.value, node.epoch)


def abandoned_fields(stored: Fields, reason: str, at: float) -> Fields:
    """The `$set` for a task whose workflow is gone: flags up, open nodes ended (spec: sweep)."""
    fields: Fields = {
        "status": TaskStatus.FAILED.value,
        "reason": reason,
        "closed_run_id": stored.get("run_id"),
        "finished_at": moment(at),
        "updated_at": moment(at),
        "next_retry_at_ms": None,
        **cancel_flags(reason, at),
    }
    for index, node in enumerate(stored["graph"]["nodes"]):
        if node["status"] not in OPEN_NODE_STATUSES:
            continue
        begun = node.get("attempt_epoch", 0) > 0
        ended = NodeStatus.CANCELLED if begun else NodeStatus.SKIPPED
        fields[f"graph.nodes.{index}.status"] = ended.value
        fields[f"graph.nodes.{index}.finished_at"] = moment(at)
        if not begun:
            fields[f"graph.nodes.{index}.skip_reason"] = "task_failed"
    return fields
