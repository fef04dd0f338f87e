"""The fields of nodes that actions change: in a node, as JSON, and in a graph. Pure."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from flowkit.graph.encoding import encode_json
from flowkit.graph.expressions import expressions_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowkit.models import Graph, Node, RetryPolicy


def change_policy(policy: RetryPolicy, given: Mapping[str, Any]) -> RetryPolicy:
    """Return a retry policy with other values for these keys, which are valid."""
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in given.items()
        if value is not None and not key.startswith("x-")
    }
    return replace(policy, **values)


def rebuild_node(node: Node, **changed: Any) -> Node:
    """Return a node with changed fields, and with what follows from its input."""
    new = replace(node, **changed)
    given = {name: value for name, value in asdict(new.io).items() if value}
    encoded = encode_json(given)
    expressions = expressions_of(given, encoded, new.map.over if new.map else None)
    return replace(new, io_bytes=len(encoded), expressions=expressions)


def changes_of(node: Node) -> dict[str, Any]:
    """Return the fields of a node that actions can change, as JSON."""
    policy = {**asdict(node.retry_policy), "permanent_on": [*node.retry_policy.permanent_on]}
    return {
        "input_inline": node.io.input_inline,
        "input_ref": node.io.input_ref,
        "timeout_sec": node.timeout_sec,
        "retry_policy": policy,
    }


def with_changes(node: Node, changed: Mapping[str, Any]) -> Node:
    """Return a node with the fields that `changes_of` has returned."""
    return rebuild_node(
        node,
        io=replace(node.io, input_inline=changed["input_inline"], input_ref=changed["input_ref"]),
        timeout_sec=changed["timeout_sec"],
        retry_policy=change_policy(node.retry_policy, changed["retry_policy"]),
    )


def with_raw_changes(raw: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node, in the form in which a graph contains it, with the fields that `changes_of` has returned."""
    io = {name: changed[name] for name in ("input_inline", "input_ref")}
    fields = {
        "io": {**(raw.get("io") or {}), **io},
        "timeout_sec": changed["timeout_sec"],
        "retry_policy": changed["retry_policy"],
    }
    return {**raw, **fields}


def changeable(graph: Graph, changed: Mapping[str, Mapping[str, Any]]) -> Graph:
    """Return a graph whose nodes can be replaced, with the fields that actions have changed."""
    nodes = [
        with_changes(node, changed[node.node_id]) if node.node_id in changed else node for node in graph.nodes
    ]
    return replace(graph, nodes=nodes)
