"""The conditions of a graph: the expressions in `when` of its nodes and of its edges, and the values that
they read. Pure.

`create_task`, `flowkit validate` and the engine's activity `open_task` check conditions. The workflow does not, because
it must not load the CEL package. Its own validation checks only the type and the length of a node's `when`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from graphlib import TopologicalSorter
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from flowkit.errors import BadCondition, ConditionsTooLarge
from flowkit.graph import cel
from flowkit.graph.cel import VARS
from flowkit.graph.encoding import encode_json
from flowkit.graph.expressions import find_expressions, may_hold_expressions
from flowkit.graph.fields import when_problem
from flowkit.limits import CONDITIONS_BYTES
from flowkit.masks import HIDDEN, SECRET_TEXT, UNKNOWN_VALUES, hide, is_secret_name, values_at
from flowkit.text import add_caret, printable, printed, suggestion, truncate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from flowkit.graph.cel import Expression
    from flowkit.graph.cel_tree import Access
    from flowkit.models import Graph, Node


STATUS, ERROR_CODE, STATS = "status", "error_code", "stats"
FACTS = (STATUS, ERROR_CODE, STATS)
"""What a condition can read of an ancestor."""

SCHEDULED_AT = "scheduled_at"
"""The field of `task`: the nominal time at which a schedule has started the task; null without a schedule."""

_ENOUGH = 11
_Paths = dict[str, Any]
"""A tree of keys. None in place of a subtree selects the whole value."""

_SHOWN_CHARS = 80
_SHOWN_TEXT_CHARS = 400
_SHOWN_VALUES = 10
_MISSING = object()


def has_conditions(graph: dict[str, Any]) -> bool:
    """Return whether a node or an edge of a valid graph has a condition, or a node has a value by expression."""
    if any(node.get("map") for node in graph["nodes"]) or any(
        find_expressions(io)
        for node in graph["nodes"]
        if may_hold_expressions(encode_json(io := node.get("io")))
    ):
        return True
    parts = [*graph["nodes"], *(graph.get("edges_ex") or [])]
    return any(part.get("when") is not None for part in parts)


def condition_problems(graph: dict[str, Any], parsed: Graph) -> list[str]:
    """Return the problems of conditions and of values by expression in a valid graph, at most eleven.

    `parsed` is the same graph, normalized.

    Raise ConditionsTooLarge if all expressions together are too large to be compiled and evaluated in time.
    """
    if not has_conditions(graph):
        return []
    if problems := list(islice(_edge_problems(graph, parsed), _ENOUGH)):
        return problems
    conditions, values = _collect_places(parsed), _collect_values(parsed)
    total = sum(len(text.encode(errors="surrogatepass")) for text in {**conditions, **values})
    if total > CONDITIONS_BYTES:
        what = "all conditions and values" if values else "all conditions"
        problem = f"the expressions of {what} have {total:,} bytes, more than {CONDITIONS_BYTES:,}"
        raise ConditionsTooLarge([f"{problem}: shorten them, or use equal ones"])
    invalid = chain(
        _expression_problems(parsed, conditions, cel.compile_expression),
        _expression_problems(parsed, values, cel.compile_value),
    )
    return list(islice(invalid, _ENOUGH))


def _edge_problems(graph: dict[str, Any], parsed: Graph) -> Iterator[str]:
    """Yield the edges whose condition has a wrong type, or has no effect."""
    nodes = {node.node_id: node for node in parsed.nodes}
    seen: dict[tuple[str, str], object] = {}
    for edge in graph.get("edges_ex") or []:
        pair, when = (edge["from"], edge["to"]), edge.get("when")
        if when is None and seen.get(pair) is None:
            seen[pair] = when
            continue
        where = f"graph.edges_ex {printed(pair[0])} -> {printed(pair[1])}"
        if problem := when_problem(when) if when is not None else None:
            yield f"{where}: {problem}"
        elif seen.setdefault(pair, when) != when:
            yield f"{where}: the edge is listed twice with different conditions; join them with && in one entry"
        elif pair[0] not in nodes[pair[1]].depends_on:
            yield f"{where}: {_explain_no_effect(nodes[pair[0]], pair[1])}"


def _explain_no_effect(parent: Node, child: str) -> str:
    """Return why the condition of an edge has no effect."""
    if child in (*parent.on_success, *parent.on_failure):
        return (
            f"the condition has no effect, because {parent.node_id!r} routes to {child!r}; move it "
            f"to the node {child!r}"
        )
    return (
        f"the condition has no effect, because depends_on of {child!r} does not name {parent.node_id!r}; "
        "add the parent to depends_on, or remove the entry"
    )


def _collect_places(parsed: Graph) -> dict[str, list[tuple[str, Node]]]:
    """Return the expressions of a graph, each with its places and the nodes for which it decides."""
    places: dict[str, list[tuple[str, Node]]] = {}
    for node in parsed.nodes:
        if node.when is not None:
            places.setdefault(node.when, []).append((f"node {node.node_id!r}: when", node))
        for parent, text in node.edge_when.items():
            places.setdefault(text, []).append((f"graph.edges_ex {parent!r} -> {node.node_id!r}: when", node))
    return places


def _collect_values(parsed: Graph) -> dict[str, list[tuple[str, Node]]]:
    """Return the values by expression of a graph, each with its places and their nodes."""
    found: dict[str, list[tuple[str, Node]]] = {}
    for node in parsed.nodes:
        for path, text in node.expressions:
            found.setdefault(text, []).append((f"node {node.node_id!r}: {path}", node))
    return found


def _expression_problems(
    parsed: Graph, places: dict[str, list[tuple[str, Node]]], compile_text: Callable[[str], Expression]
) -> Iterator[str]:
    """Yield the expressions that are not valid, or that name a node which is no ancestor."""
    above = _find_ancestors(parsed)
    index_of = {node.node_id: node.index for node in parsed.nodes}
    for text, nodes in places.items():
        try:
            expression = compile_text(text)
        except BadCondition as error:
            yield from (f"{where}: {error}" for where, _ in nodes)
            continue
        for where, node in nodes:
            for access in expression.accesses:
                problem = _access_problem(access, node, above[node.index], index_of)
                if problem:
                    yield f"{where}: {add_caret(problem, text, access.position)}"


def _access_problem(access: Access, node: Node, ancestors: int, index_of: dict[str, int]) -> str | None:
    """Return why an expression must not read this part of `nodes` or `task`.

    `ancestors` has a bit for each ancestor.
    """
    if access.root == cel.TASK:
        return task_problem(access)
    if access.root != cel.NODES:
        return None
    if not access.path:
        return """nodes needs the id of a node as text, for example nodes["extract"].status"""
    named, field = access.path[0], access.path[1:2]
    if named not in index_of:
        return f"{printed(named)} is not a node{suggestion(named, index_of)}"
    if not ancestors >> index_of[named] & 1:
        return f"{printed(named)} is not an ancestor of {node.node_id!r}, so it may end later"
    if not field or field[0] not in FACTS:
        shown = f"has no field {printed(field[0])}" if field else "is not a value"
        return f"nodes[{printed(named)}] {shown}; use its {STATUS}, {ERROR_CODE} or {STATS}"
    return None


def task_problem(access: Access) -> str | None:
    """Return why an expression must not read this part of `task`; None if it may."""
    if access.path[:1] == (SCHEDULED_AT,):
        return None
    shown = f"task has no field {printed(access.path[0])}" if access.path else "task is not a value"
    return f"{shown}; use task.{SCHEDULED_AT}"


def _find_ancestors(graph: Graph) -> list[int]:
    """Return the ancestors of each node as bits: its parents, its routers and all nodes above them."""
    index_of = {node.node_id: node.index for node in graph.nodes}
    parents: dict[int, list[int]] = {
        node.index: [index_of[parent] for parent in node.depends_on] for node in graph.nodes
    }
    for router in graph.nodes:
        for target in (*router.on_success, *router.on_failure):
            parents[index_of[target]].append(router.index)
    found = [0] * len(graph.nodes)
    for index in TopologicalSorter(parents).static_order():
        for parent in parents[index]:
            found[index] |= found[parent] | 1 << parent
    return found


def select_values(values: Mapping[str, Any], accesses: Iterable[Access]) -> dict[str, Any]:
    """Return the part of `values` that an expression reads, in types that JSON and CEL have."""
    paths = _build_paths((access.root, *access.path) for access in accesses)
    found: dict[str, Any] = _prune(values, paths)
    return {root: found.get(root, {}) for root in values}


def _build_paths(chosen: Iterable[tuple[str, ...]]) -> _Paths:
    root: _Paths = {}
    for path in sorted(set(chosen), key=len):
        here: _Paths | None = root
        for key in path[:-1]:
            here = None if here is None else here.setdefault(key, {})
        if here is not None:
            here.setdefault(path[-1], None)
    return root


def _prune(value: Any, paths: _Paths | None) -> Any:
    if paths is None or not isinstance(value, Mapping):
        return to_json_types(value)
    return {key: _prune(value[key], below) for key, below in paths.items() if key in value}


def to_json_types(value: Any) -> Any:
    """Return `value` with times as ISO text, bytes as base64 text, and values of other types as text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json_types(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_types(each) for each in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


@dataclass(frozen=True, slots=True)
class SecretRule:
    """Which of the values that expressions read are secrets: by their names, by the schema of the params, or by their
    look.
    """

    detect: Callable[[str, Any], bool]
    """Decides by path and value about variables, and about params without a schema."""
    secret_params: Sequence[Sequence[str | int]] | None = None
    """Where the schema of the params says that they are secret; None without a schema."""

    @property
    def knows_params(self) -> bool:
        """Whether params have a schema. Without one, each of their values may be a secret."""
        return self.secret_params is not None

    def find(self, value: Any, path: tuple[str, ...] = ()) -> Iterator[Any]:
        """Yield the secrets below `path`. A list can be one as a whole, and so can its items."""
        if self._is_marked(path):
            yield value
        elif isinstance(value, Mapping):
            for key, each in value.items():
                yield from self.find(each, (*path, key))
        elif self._is_secret(value, path):
            yield value
        elif isinstance(value, list):
            for place, each in enumerate(value):
                yield from self.find(each, (*path, str(place)) if self._has_marks(path) else path)

    def holds(self, values: Mapping[str, Any], accesses: Iterable[Access]) -> bool:
        """Return whether an expression that reads these parts of the values may give a secret."""
        return not self.knows_params or any(
            True
            for access in accesses
            for value in values_at(values, [(access.root, *access.path)])
            for _ in self.find(value, (access.root, *access.path))
        )

    def _is_marked(self, path: tuple[str, ...]) -> bool:
        marks = self.secret_params or ()
        return path[:1] == (cel.PARAMS,) and any(
            [*map(str, mark)] == [*path[1 : 1 + len(mark)]] for mark in marks
        )

    def _has_marks(self, path: tuple[str, ...]) -> bool:
        return bool(self.secret_params) and path[:1] == (cel.PARAMS,)

    def _is_secret(self, value: Any, path: tuple[str, ...]) -> bool:
        if value in (None, ""):
            return False
        if any(map(is_secret_name, path[1:])):
            return True
        if path[:1] == (cel.PARAMS,) and self.knows_params:
            return isinstance(value, str) and SECRET_TEXT.search(value) is not None
        name = ".".join(path)
        return self.detect(f"coordinator.{name}" if path[:1] == (VARS,) else name, value)


def explain_failure(
    error: str,
    text: str,
    accesses: Iterable[Access],
    values: Mapping[str, Any],
    rule: SecretRule,
) -> str:
    """Return the message of a condition that cannot be evaluated: the error, the expression and its values.

    `rule` decides which values the message hides.
    """
    paths = dict.fromkeys((access.root, *access.path) for access in accesses)
    shown = [_format_value(values, path, rule) for path in paths]
    more = [f"and {len(shown) - _SHOWN_VALUES} more"] if len(shown) > _SHOWN_VALUES else []
    read = f"; it reads {', '.join([*shown[:_SHOWN_VALUES], *more])}" if shown else ""
    missing = next((path for path in _find_missing(values, paths) if f'map: "{path[-1]}"' in error), None)
    check = f"; {_suggest_check(missing)}" if missing else ""
    error = hide(error, [*rule.find(values)], shortest=1)
    return (
        f"{truncate(printable(error), _SHOWN_TEXT_CHARS)}, in the condition "
        f"{printable(truncate(text, _SHOWN_TEXT_CHARS))}{read}{check}"
    )


def explain_value_failure(
    error: str, text: str, accesses: Iterable[Access], values: Mapping[str, Any], rule: SecretRule
) -> str:
    """Return the message of a value by expression that cannot be evaluated, without secrets that it reads.

    `rule` decides which values are secrets. All of them may be if the params have no schema.
    """
    paths = dict.fromkeys((access.root, *access.path) for access in accesses)
    found = _find_missing(values, paths)
    missing = next((path for path in found if f'map: "{path[-1]}"' in error), None)
    check = f"; {_format_path(missing)} is not set" if missing else ""
    masked = error if missing else hide(error, [*rule.find(values)] if rule.knows_params else values)
    why = f" ({UNKNOWN_VALUES})" if masked != error and not rule.knows_params else ""
    shown = printable(truncate(text, _SHOWN_TEXT_CHARS))
    return f"{truncate(printable(masked), _SHOWN_TEXT_CHARS)}, in the expression {shown}{check}{why}"


def _suggest_check(missing: tuple[str, ...]) -> str:
    """Return how an expression checks that a value exists. `has` takes no keys in brackets."""
    *above, key = missing
    check = f"has({_format_path(missing)})"
    if not key.isidentifier():
        check = f"{json.dumps(key, ensure_ascii=False)} in {_format_path(tuple(above))}"
    return f"if it may be missing, write {printable(check)} && … before it"


def _find_missing(values: Mapping[str, Any], paths: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield, for each path that does not exist, its beginning up to the first key that is missing."""
    for path in paths:
        value: Any = values
        for place, key in enumerate(path, 1):
            value = value.get(key, _MISSING) if isinstance(value, Mapping) else _MISSING
            if value is _MISSING:
                yield path[:place]
                break


def _format_value(values: Mapping[str, Any], path: tuple[str, ...], rule: SecretRule) -> str:
    """Return a part of the values with its name, or which part of its path is missing."""
    if missing := next(_find_missing(values, [path]), None):
        return f"{_format_path(missing)} (not set)"
    value: Any = values
    for key in path:
        value = value[key]
    if any(True for _ in rule.find(value, path)):
        return f"{_format_path(path)} = {HIDDEN}"
    text = printable(json.dumps(value, ensure_ascii=False))
    return f"{_format_path(path)} = {truncate(text, _SHOWN_CHARS)}"


def _format_path(path: tuple[str, ...]) -> str:
    """Return a path as an expression contains it."""
    keys = [
        f".{key}" if key.isidentifier() else f"[{json.dumps(key, ensure_ascii=False)}]" for key in path[1:]
    ]
    return printable(path[0] + "".join(keys))
