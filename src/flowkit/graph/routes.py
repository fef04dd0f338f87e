"""Parse and check the routing of a graph: which nodes start only if another node succeeds or fails. Pure.

A node (the router) names the nodes that its success or its permanent failure starts (its targets).
docs/graphs/branches.md defines the rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowkit.text import printed, suggestion

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

ON_SUCCESS, ON_FAILURE = "on_success", "on_failure"
ROUTING_KEYS = frozenset([ON_SUCCESS, ON_FAILURE])

_Lists = dict[str, tuple[str, ...]]
_Parents = dict[str, list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """The routes of a graph by node id, without the lists that FlowKit ignores."""

    on_success: _Lists = field(default_factory=dict)
    on_failure: _Lists = field(default_factory=dict)
    conditional: frozenset[str] = frozenset()
    """Nodes that start only if a route leads to them."""
    parents: _Parents
    """The parents for the gate of each node: those that do not route to the node."""
    warnings: tuple[str, ...] = ()


def list_targets(raw: dict[str, Any], key: str) -> tuple[str, ...]:
    """Return the targets in one list of a node's `routing`, each once."""
    return tuple(dict.fromkeys((raw.get("routing") or {}).get(key) or ()))


def find_routers(graph: dict[str, Any]) -> _Parents:
    """Return the nodes that name each node in one of their lists, including lists that FlowKit ignores."""
    found: dict[str, dict[str, None]] = {}
    for raw in graph["nodes"]:
        for key in (ON_SUCCESS, ON_FAILURE):
            for target in list_targets(raw, key):
                found.setdefault(target, {})[raw["node_id"]] = None
    return {target: list(routers) for target, routers in found.items()}


def resolve_routes(graph: dict[str, Any], parents: _Parents, edges: Collection[tuple[str, str]]) -> Routes:
    """Return the routes of `graph`. `parents` are the parents of each node, and `edges` the pairs in its edge lists."""
    routers = find_routers(graph)
    if not routers:
        return Routes(parents=parents)
    on_success = {raw["node_id"]: list_targets(raw, ON_SUCCESS) for raw in graph["nodes"]}
    on_failure = {raw["node_id"]: list_targets(raw, ON_FAILURE) for raw in graph["nodes"]}
    wired = _find_explicit_edges(parents, on_success, on_failure, set(edges))
    ignored = {node_id: wired[node_id] for node_id, named in on_success.items() if named and node_id in wired}
    on_success = {node_id: () if node_id in ignored else named for node_id, named in on_success.items()}
    active = _find_active_routers(on_success, on_failure)
    reached = {child for children in wired.values() for child in children}
    conditional = frozenset(target for target in routers if target in active or target not in reached)
    return Routes(
        on_success=on_success,
        on_failure=on_failure,
        conditional=conditional,
        parents={node: [p for p in own if p not in active.get(node, ())] for node, own in parents.items()},
        warnings=(
            *_warn_of_ignored_lists(ignored),
            *_warn_of_unreachable(routers, conditional - active.keys()),
        ),
    )


def _find_explicit_edges(
    parents: _Parents, on_success: _Lists, on_failure: _Lists, edges: set[tuple[str, str]]
) -> _Parents:
    """Return the children of each node by explicit edges.

    A `depends_on` that names a router of the node only repeats the route. So does any edge to a target of `on_failure`.
    """
    children: _Parents = {}
    succeeds = {(router, target) for router, named in on_success.items() for target in named}
    fails = {(router, target) for router, named in on_failure.items() for target in named}
    for child, own in parents.items():
        for parent in own:
            repeated = (parent, child) in succeeds and (parent, child) not in edges
            if not repeated and (parent, child) not in fails:
                children.setdefault(parent, []).append(child)
    return children


def _find_active_routers(*lists: _Lists) -> dict[str, set[str]]:
    active: dict[str, set[str]] = {}
    for each in lists:
        for router, named in each.items():
            for target in named:
                active.setdefault(target, set()).add(router)
    return active


def _warn_of_ignored_lists(ignored: Mapping[str, list[str]]) -> Iterator[str]:
    for router, children in ignored.items():
        yield (
            f"node {router!r}: routing.on_success is ignored, because an edge leads from the node to {children[0]!r} "
            "and edges take precedence; remove the edges or the list"
        )


def _warn_of_unreachable(routers: _Parents, never: Collection[str]) -> Iterator[str]:
    for target in (target for target in routers if target in never):
        yield (
            f"node {target!r} never starts: only an ignored on_success list names it ({routers[target][0]!r}); "
            "add an edge to the node or remove it"
        )


def route_problems(graph: dict[str, Any], known: Collection[str]) -> Iterator[str]:
    """Yield the targets that are unknown or that are the node itself."""
    for raw in graph["nodes"]:
        for key in (ON_SUCCESS, ON_FAILURE):
            for target in list_targets(raw, key):
                place = f"node {raw['node_id']!r}: routing.{key} names"
                if target not in known:
                    yield f"{place} {printed(target)}, which is not a node{suggestion(target, known)}"
                elif target == raw["node_id"]:
                    yield f"{place} the node itself; name another node, and use retry_policy to repeat this one"
