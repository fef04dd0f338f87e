"""The task document: its initial content, its parts that several modules read, and its graph (spec: task document).

Pure functions. Paths address a node by its index, `graph.nodes.<i>`, and every filter also contains its `node_id`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import bson

from flowkit.adapters.entries import utc
from flowkit.adapters.mongo import iso, moment
from flowkit.graph.params import PARAMS_SCHEMA
from flowkit.graph.validation import parents_by_node
from flowkit.limits import LARGE_DOCUMENT_BYTES, NODE_STATE_BYTES
from flowkit.masks import secret_paths
from flowkit.models import RUNTIME_KEYS, NodeStatus, StatusChange, TaskStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from flowkit.core.utils import Fields


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

FAILURES = "failures"
"""The field of a node's entry with how many attempts of its generation had failed before the latest one began. Absent
before an attempt has followed another one."""

ATTEMPT_ENDED_AT = "attempt_ended_at"
"""The field of a node's entry with when its latest attempt ended, if that has not finished the node: `finished_at` is
when the node ended, such as after a decision about its failure."""

PAUSED = "paused"
"""Field of a node that is paused and runs no attempt, if it follows a node with `max_ahead`."""

PAUSED_SCOPES = "coordinator.paused"
"""Field with the paused scopes of a task."""

RECORDED_AT = "coordinator.recorded_at"
"""Field with the time of the latest record that the workflow has written, by which older ones are recognised."""

SCHEDULED_AT = "scheduled_at"
"""Field with the nominal time of a task that a schedule has started, as RFC 3339 text in UTC; absent for others."""

RUN_STARTED_AT = "run_started_at"
"""Field with the time when the latest run of a task began, as ISO 8601 text in UTC. Absent before the first rerun: the
first run began when the task was created, at `started_at`."""

TIMES: Fields = {"_id": 0, "started_at": 1, RUN_STARTED_AT: 1, "finished_at": 1}
"""Projection with the fields that `read_times` reads."""

SATISFIED = "coordinator.satisfied"
"""Field with the prerequisites of a task that are satisfied; absent without any."""

TRUNCATED = "coordinator.truncated"
"""Field of a document from which FlowKit has cut errors or other texts, because it would have become too large."""

COUNTED = "coordinator.counted"
"""Field with the `revision` and the number of `nodes` of a task when its latest rerun began; absent before. The ends of
the nodes that no later action has started again have been counted before."""

PINNED = "coordinator.pinned"
"""Field with the version of each role that a task has fixed (`version_policy`). `/` replaces the dots in a role."""

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


def read_satisfied(stored: Mapping[str, Any]) -> list[str]:
    """Return the satisfied prerequisites that a document lists."""
    listed = (stored.get("coordinator") or {}).get("satisfied")
    return [each for each in listed if isinstance(each, str)] if isinstance(listed, list) else []


def has_ended_since(index: int, node: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Return whether the end of a node has not been counted before the latest rerun of its task."""
    before = (stored.get("coordinator") or {}).get("counted")
    if not isinstance(before, dict):
        return True
    revision = str(node.get("reset_by") or "").rpartition("/")[2]
    started_again = revision.isdecimal() and int(revision) > int(before["revision"])
    return started_again or index >= int(before["nodes"])


def new_task(
    task_id: str,
    params: Fields,
    graph: Fields,
    at: float,
    *,
    scheduled_at: str | None = None,
    namespace_id: str = "",
    database_id: str = "",
) -> Fields:
    """Return the initial document of a task."""
    kept = {
        key: value for key, value in graph.items() if key not in {"nodes", "edges", "edges_ex", PARAMS_SCHEMA}
    }
    parents = parents_by_node(graph)
    return {
        "id": task_id,
        "pipeline_id": task_id,
        "status": TaskStatus.QUEUED.value,
        **params_fields(params, graph),
        "graph": {
            **kept,
            "nodes": [new_node(node, parents[node["node_id"]]) for node in graph["nodes"]],
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
        INPUT_DIGEST: input_digest(params, graph),
        **({SCHEDULED_AT: scheduled_at} if scheduled_at else {}),
        **owner(namespace_id, database_id),
    }


SECRET_PARAMS = "secret_params"
"""The field that lists where the params are secret, as their schema says: paths of keys and indexes. None without a
schema."""


def params_fields(params: Fields, graph: Fields) -> Fields:
    """Return the fields of a document that hold the params of a task."""
    schema = graph.get(PARAMS_SCHEMA)
    return {"params": params, SECRET_PARAMS: None if schema is None else secret_paths(params, schema)}


def estimate_bytes(params: Fields, graph: Fields) -> int:
    """Return the BSON size that the document of a task will have, as an estimate; 0 if it is small.

    MongoDB has stored both.
    """
    size = len(bson.encode({"params": params, "graph": graph})) + NODE_STATE_BYTES * len(graph["nodes"])
    return size if size >= LARGE_DOCUMENT_BYTES else 0


INPUT_DIGEST = "input_digest"
"""The field with the hashes of the params and of the graph with which a task started. Actions and reruns
change neither."""


def input_digest(params: Fields, graph: Fields) -> dict[str, str]:
    """Return the hashes of params and graph. The order of keys, and 1 or 1.0, make no difference."""
    return {"params": _hash(params), "graph": _hash(graph)}


def _hash(value: Any) -> str:
    text = json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=20).hexdigest()


def _canonical(value: Any) -> Any:
    """Return a value of JSON with whole numbers as integers, which converters may write as `1` or `1.0`."""
    if isinstance(value, dict):
        return {key: _canonical(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(held) for held in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def pin_path(role: str) -> str:
    """Return the path of the version that a task has fixed for a role."""
    return f"{PINNED}.{role.replace('.', '/')}"


def read_pins(stored: Fields) -> dict[str, str]:
    """Return the versions that a task has fixed, by role. Tolerate invalid content from direct writes."""
    coordinator = stored.get("coordinator")
    pinned = coordinator.get("pinned") if isinstance(coordinator, dict) else None
    found = pinned.items() if isinstance(pinned, dict) else ()
    return {role.replace("/", "."): version for role, version in found if isinstance(version, str)}


def owner(namespace_id: str, database_id: str) -> Fields:
    """Return the fields for the namespace id and the database id of a task. Omit an empty id."""
    ids = {"namespace_id": namespace_id, "database_id": database_id}
    return {name: value for name, value in ids.items() if value}


def new_node(node: Fields, parents: list[str]) -> Fields:
    """Return the initial entry of a node, in the form in which a graph contains it, with these parents."""
    own = {key: value for key, value in node.items() if key not in RUNTIME_KEYS}
    given = {"depends_on": parents, "fan_in": node.get("fan_in") or "all"}
    return {**own, **given, **NEW_NODE}


def graph_of(stored: Fields) -> Fields:
    """Return the graph of a document as a user writes it, without what the engine has added to its nodes."""
    nodes = [
        {key: value for key, value in node.items() if key not in RUNTIME_KEYS} for node in nodes_of(stored)
    ]
    return {**stored["graph"], "nodes": nodes}


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


def history(changes: Iterable[StatusChange]) -> list[Fields]:
    """Return `status_history` in the form that documents contain."""
    return [{"from": change.from_, "to": change.to, "at": iso(change.at)} for change in changes]


def opened_history(at: float) -> list[Fields]:
    """Return the `status_history` of a task that was just opened."""
    queued, running = TaskStatus.QUEUED.value, TaskStatus.RUNNING.value
    return history(
        [StatusChange(from_=None, to=queued, at=at), StatusChange(from_=queued, to=running, at=at)]
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskTimes:
    """When a task was created, and when its latest run began and ended, in seconds since the epoch."""

    created_at: float
    began_at: float
    """When its latest run began: the creation of the task, or its latest rerun."""
    ended_at: float | None
    """None while the task has not ended."""

    def run_seconds(self, now: float) -> float:
        """Return how long the latest run took, or has been open."""
        return self._until_end(self.began_at, now)

    def total_seconds(self, now: float) -> float:
        """Return how long all runs took, with the time between them: from the creation of the task."""
        return self._until_end(self.created_at, now)

    def _until_end(self, since: float, now: float) -> float:
        return elapsed(since, now if self.ended_at is None else self.ended_at)


def elapsed(since: float, until: float) -> float:
    """Return the seconds between two times. All durations of tasks and attempts that people see come from here.

    It is 0 if the clocks of two processes contradict each other, and has the milliseconds of stored dates.
    """
    return round(max(0.0, until - since), 3)


def read_times(document: Mapping[str, Any]) -> TaskTimes | None:
    """Return the times of a task from its document; None if it does not say when the task was created."""
    created_at, ended_at = _timestamp(document.get("started_at")), document.get("finished_at")
    if created_at is None:
        return None
    began_at = _timestamp(document.get(RUN_STARTED_AT))
    return TaskTimes(
        created_at=created_at,
        began_at=created_at if began_at is None else began_at,
        ended_at=utc(ended_at).timestamp() if isinstance(ended_at, datetime) else None,
    )


def end_of_attempt(node: Mapping[str, Any]) -> datetime | None:
    """Return when the latest attempt of a node ended: with its node, or before it."""
    ended_at: datetime | None = node.get(ATTEMPT_ENDED_AT)
    return node.get("finished_at") if ended_at is None else ended_at


def _timestamp(text: Any) -> float | None:
    """Return a time that a document holds as text; None for anything else, which other programs may have written."""
    try:
        return utc(datetime.fromisoformat(text)).timestamp()
    except (TypeError, ValueError):
        return None
