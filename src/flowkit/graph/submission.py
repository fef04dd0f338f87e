"""Parse the input of a new task, and check it before its workflow starts. Pure.

Malformed input fails with a message, because an error while decoding would be retried forever.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticSerializationError

from flowkit import limits
from flowkit.errors import BadInput, GraphError
from flowkit.graph.conditions import condition_problems
from flowkit.graph.encoding import json_bytes
from flowkit.graph.field_checks import wrong_graph
from flowkit.graph.input_adapters import PULL, parse_pull
from flowkit.graph.streams import unread_warnings
from flowkit.graph.validation import parse_graph, raise_if, shards_of
from flowkit.limits import EXTERNAL_NODES, ID_CHARS, NODE_STATE_BYTES, TASK_DOCUMENT_BYTES
from flowkit.models import RUNTIME_KEYS, VersionPolicy
from flowkit.text import clean, did_you_mean, printed, shorten, truncate
from flowkit.validation.json_keys import TOO_DEEP, EqualKeys, is_too_deep, to_json_types
from flowkit.validation.storable import storage_problems, stored_bytes
from flowkit.validation.values import is_task_id

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from flowkit.models import Graph, Node, Rerun, StoredGraph


_REASON_CHARS = 300
_KEYS = ("params", "graph")
_SHOWN_CHARS = 80
_REMEDIES = {
    "params": "put data into a store and pass a reference",
    "graph": f"split the task, or put data into a store and pass a reference; each node counts {NODE_STATE_BYTES} "
    "bytes for its state",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTask:
    """The input with which a client starts a task."""

    params: dict[str, Any] = field(default_factory=dict)
    graph: dict[str, Any] = field(default_factory=dict)
    stored: StoredGraph | None = None
    """Where both are stored, if `create_task` stored them."""
    rerun: Rerun | None = None
    """Set if the task has ended before and starts again."""


def parse_input(task_id: str, given: object) -> NewTask:
    """Return the input of a new task. The content of the graph is not checked here.

    Raise GraphError if the task id or the top-level structure of `given` is not valid.
    """
    problems = [*_id_problems(task_id), *_outer_problems(given)]
    if problems or not isinstance(given, dict):
        raise GraphError(problems)
    return NewTask(params=given.get("params") or {}, graph=given["graph"])


def _id_problems(task_id: str) -> list[str]:
    if is_task_id(task_id):
        return []
    return [f"task id {truncate(task_id, _SHOWN_CHARS)!r} must be 1 to {ID_CHARS} characters and not '*'"]


def _outer_problems(given: object) -> list[str]:
    if not isinstance(given, dict):
        shown = given if isinstance(given, str) else printed(given)
        return [
            f'the input of a task is {{"params": {{...}}, "graph": {{...}}}}, not {truncate(shown, _SHOWN_CHARS)!r}'
        ]
    problems = [_explain_key(key) for key in given if key not in _KEYS]
    if "graph" not in given:
        problems.append("the input of a task has no 'graph'")
    elif not isinstance(given["graph"], dict):
        problems.append(wrong_graph(given["graph"]))
    if not isinstance(given.get("params"), (dict, type(None))):
        problems.append(f"params must be an object, not {printed(given['params'])}")
    return problems


def _explain_key(key: object) -> str:
    hint = did_you_mean(key, _KEYS, otherwise="it takes 'params' and 'graph'")
    return f"the input of a task has the unknown key {printed(key)}; {hint}"


def validate_input(
    task_id: str,
    given: object,
    *,
    max_nodes: int | None = limits.MAX_NODES,
    external_roles: Collection[str] = (),
) -> Graph:
    """Return the validated graph of a new task.

    Its warnings include those about `external_roles` and `unread_warnings`.

    The `params_schema` of the graph is not checked here, because a schema can make its check endless; see ParamsChecks.

    Raise GraphError if the input is not valid or contains something that MongoDB cannot store, or if the task document
    would become too large.
    """
    new = parse_input(task_id, given)
    graph = parse_graph(new.graph, params=new.params, max_nodes=max_nodes, max_bytes=None)
    problem = external_problem(new.graph, external_roles)
    raise_if([problem] if problem else condition_problems(new.graph, graph))
    raise_if(storage_problems({"params": new.params, "graph": new.graph}))
    raise_if(_document_problems(new, graph))
    more = (*external_warnings(graph, external_roles), *unread_warnings(graph.nodes))
    return replace(graph, warnings=(*graph.warnings, *more))


def _document_problems(new: NewTask, graph: Graph) -> list[str]:
    problem = document_problem(new.params, new.graph, [node.depends_on for node in graph.nodes])
    return [problem] if problem else []


def is_large(task: Mapping[str, Any]) -> bool:
    """Return whether graph and params of a task are stored in MongoDB, because they are too large for a workflow."""
    graph, params = json_bytes(task["graph"]), json_bytes(task["params"])
    if len(task["graph"]["nodes"]) > limits.INPUT_NODES or params > limits.INPUT_PARAMS_BYTES:
        return True
    return graph + params > limits.TASK_INPUT_BYTES


def convert_to_json(name: str, value: Any) -> Any:
    """Return a copy of `value` in JSON types: tuples become lists, and datetimes become ISO text.

    Raise GraphError, which contains `name`, if JSON cannot represent the value, or would drop a part of it.
    """
    try:
        return to_json_types(value)
    except EqualKeys as error:
        raise GraphError([f"{name}: {error}"]) from None
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        text = TOO_DEEP if is_too_deep(error) else shorten(clean(str(error)), _REASON_CHARS)
        raise GraphError([f"{name} cannot be written as JSON: {text}"]) from None


def document_problem(
    params: Mapping[str, Any], graph: Mapping[str, Any], parents: Iterable[Sequence[str]]
) -> str | None:
    """Return the problem of a task whose document would become too large, or None.

    `parents` are the parents of each node, which the document holds even if the graph gives them as edges. The given
    values must be storable (see `storage_problems`).
    """
    nodes = [_make_stored_node(raw, own) for raw, own in zip(graph["nodes"], parents, strict=True)]
    sizes = {
        "params": stored_bytes(params),
        "graph": stored_bytes({**graph, "nodes": nodes}) + NODE_STATE_BYTES * len(nodes),
    }
    total = sum(sizes.values())
    if total <= TASK_DOCUMENT_BYTES:
        return None
    field = max(sizes, key=lambda name: sizes[name])
    return (
        f"{field} has {sizes[field]:,} bytes of BSON, so that the task document would have {total:,}, more than "
        f"{TASK_DOCUMENT_BYTES:,}: {_REMEDIES[field]}"
    )


def _make_stored_node(raw: Mapping[str, Any], parents: Sequence[str]) -> dict[str, Any]:
    given = {key: value for key, value in raw.items() if key not in RUNTIME_KEYS}
    return {**given, "depends_on": list(parents)}


def may_not_be_external(graph: Mapping[str, Any]) -> bool:
    """Return whether nodes of a graph must not have an external role: it is too large, pins versions, or has shards."""
    return _excludes_external(graph) or any(map(_is_native, graph["nodes"]))


def _is_native(node: Mapping[str, Any]) -> bool:
    """Return whether only native workers can run a node."""
    return _native_key(node) is not None


def _native_key(node: Mapping[str, Any]) -> str | None:
    """Return the key of a node that only native workers know; None if any worker can run it."""
    if node.get("map") or node.get("on_batch_failure") is not None:
        return "map" if node.get("map") else "on_batch_failure"
    return "parallel" if shards_of(node) > 1 else None


def _excludes_external(graph: Mapping[str, Any]) -> bool:
    return len(graph["nodes"]) > EXTERNAL_NODES or graph.get("version_policy") == VersionPolicy.PIN


def external_problem(graph: Mapping[str, Any], roles: Collection[str]) -> str | None:
    """Return the problem of a graph with an external role that it may not have (`may_not_be_external`), or None."""
    if not roles or not may_not_be_external(graph):
        return None
    nodes = graph["nodes"]
    wide = next((node for node in nodes if node["type"] in roles and _is_native(node)), None)
    if wide is not None:
        key = _native_key(wide)
        shown = f"parallel is {wide['parallel']}" if key == "parallel" else f"{key} is set"
        return (
            f"node {wide['node_id']!r}: {shown}, but type is the external role {wide['type']!r}, "
            f"whose workers run a node as a whole: remove {key}, or run the role with native workers"
        )
    external = next((node for node in nodes if node["type"] in roles), None)
    if external is None or not _excludes_external(graph):
        return None
    if graph.get("version_policy") == VersionPolicy.PIN:
        return pin_problem(external["node_id"], external["type"])
    return (
        f"node {external['node_id']!r}: type is the external role {external['type']!r}, and graph.nodes has "
        f"{len(nodes):,} entries, more than {EXTERNAL_NODES:,}: external workers read the whole "
        "task document twice a second; split the task, or run the role with native workers"
    )


def pin_problem(node_id: str, role: str) -> str:
    """Return the problem of a node with an external role in a graph that pins versions."""
    return (
        f"node {node_id!r}: type is the external role {role!r}, and graph.version_policy is 'pin', but FlowKit cannot "
        "choose the version of an external worker: remove version_policy, or run the role with native workers"
    )


def external_warnings(graph: Graph, roles: Collection[str]) -> Iterator[str]:
    """Yield a warning for each node of an external role that pulls unchanged batches from several nodes."""
    for node in graph.nodes:
        if node.max_ahead and node.type in roles:
            yield (
                f"node {node.node_id!r}: io.max_ahead has no effect, because FlowKit cannot hold the workers of the "
                f"external role {node.type!r}"
            )
        sources = _find_sources(node) if node.type in roles else ()
        if len(sources) > 1:
            yield (
                f"node {node.node_id!r} has the external role {node.type!r} and pulls from {len(sources)} nodes "
                f"({', '.join(map(repr, sources))}): their batch uids must differ, because external "
                "workers treat equal "
                "ones as one batch; the attempt fails as batch_uid_clash if they do not"
            )


def _find_sources(node: Node) -> tuple[str, ...]:
    """Return the nodes from which a node pulls unchanged batches. Rechunking makes uids unique."""
    inline = node.io.input_inline or {}
    if inline.get("input_adapter") != PULL:
        return ()
    try:
        return tuple(dict.fromkeys(parse_pull(inline, parents=node.depends_on).from_nodes))
    except BadInput:
        return ()
