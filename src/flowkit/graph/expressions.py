"""Values by expression in the input of a node: `{"$cel": "params.day"}` in place of a value. Pure.

The workflow only knows where the expressions are. An activity evaluates them when the node starts and
stores the values; the executor of an attempt puts them in.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard

from flowkit import limits
from flowkit.errors import BadExpression
from flowkit.text import printed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from flowkit.models import NodeIO

KEY = "$cel"
FIELDS = ("input_ref", "input_inline", "fn_args")
"""The fields of `io` that can contain expressions."""

_INLINE_NAMES = ("input_adapter", "input_args")
_SOURCES = ("from_nodes", "from_node")
_NODE_ARGS = ("from_nodes", "from_node", "node_id", "target")
"""Arguments of functions that name nodes."""

MAP_OVER = "map.over"
"""The path of the expression that gives the items of a node."""

_ENCODED_KEY = b'"$cel"'

Found = tuple[str, str]
"""The path of an expression in a node, and its text."""


def is_expression(value: object) -> TypeGuard[dict[str, str]]:
    """Return whether `value` is an expression: an object with the single key `$cel`, whose value is a text."""
    return isinstance(value, dict) and len(value) == 1 and isinstance(value.get(KEY), str)


def find_expressions(io: Mapping[str, Any]) -> tuple[Found, ...]:
    """Return the expressions in the input of a node, in the order of the input."""
    return tuple(each for name in FIELDS if io.get(name) for each in find(io[name], f"io.{name}"))


def expressions_of(io: Mapping[str, Any], encoded: bytes, over: str | None) -> tuple[Found, ...]:
    """Return the expressions of a node. `encoded` is its input as JSON, `over` gives its items if it has `map`."""
    found = find_expressions(io) if may_hold_expressions(encoded) else ()
    return found if over is None else (*found, (MAP_OVER, over))


def find(value: Any, path: str, level: int = 0) -> Iterator[Found]:
    """Yield the expressions in a value, as deep as MongoDB stores values."""
    if is_expression(value):
        yield path, value[KEY]
        return
    parts: Iterator[tuple[str, Any]] = iter(())
    if isinstance(value, dict):
        parts = ((f"{path}.{key}", each) for key, each in value.items())
    elif isinstance(value, list):
        parts = ((f"{path}[{place}]", each) for place, each in enumerate(value))
    for below, each in parts:
        if isinstance(each, (dict, list)) and level < limits.DOCUMENT_LEVELS:
            yield from find(each, below, level + 1)


def may_hold_expressions(encoded: bytes) -> bool:
    """Return whether an input can contain expressions, given as JSON. Most inputs need no closer look."""
    return _ENCODED_KEY in encoded


def expression_problems(io: Mapping[str, Any]) -> Iterator[str]:
    """Yield the expressions in places where none is allowed, and those that are too long or empty."""
    expressions = find_expressions(io)
    if not expressions:
        return
    for name in FIELDS:
        if is_expression(io.get(name)):
            yield f"io.{name} must be an object, not an expression; use expressions for the values in it"
    for place in _list_fixed(io):
        yield f"io.{place} must not be an expression, because FlowKit reads it before the node starts; name the value"
    for path, text in expressions:
        if not 1 <= len(text) <= limits.CONDITION_CHARS:
            shown = f"has {len(text):,} characters" if text else "is empty"
            yield f"{path}: the expression {shown}; it must have 1 to {limits.CONDITION_CHARS:,}"


def _list_fixed(io: Mapping[str, Any]) -> Iterator[str]:
    """Yield the places that contain an expression although they name an adapter or nodes."""
    inline, args = io.get("input_inline") or {}, io.get("fn_args") or {}
    if isinstance(inline, dict):
        yield from (f"input_inline.{name}" for name in _INLINE_NAMES if is_expression(inline.get(name)))
        adapter = inline.get("input_args")
        if isinstance(adapter, dict) and not is_expression(adapter):
            yield from (f"input_inline.input_args.{name}" for name in _SOURCES if _holds(adapter.get(name)))
    if isinstance(args, dict):
        yield from (f"fn_args.{name}" for name in _NODE_ARGS if _holds(args.get(name)))


def _holds(value: Any) -> bool:
    return any(True for _ in find(value, ""))


def with_values(io: NodeIO, values: Mapping[str, Any]) -> NodeIO:
    """Return the input with a value, by text, in place of each expression. Raise BadExpression if one is missing."""
    return replace(
        io,
        input_ref=fill(io.input_ref, values),
        input_inline=fill(io.input_inline, values),
        fn_args=fill(io.fn_args, values),
    )


def fill(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a value with `values`, by text, in place of its expressions. Raise BadExpression if one is missing."""
    if is_expression(value):
        text = value[KEY]
        if text not in values:
            raise BadExpression(f"the value of the expression {printed(text)} is not stored")
        return values[text]
    if isinstance(value, dict):
        return {key: fill(each, values) for key, each in value.items()}
    return [fill(each, values) for each in value] if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemBatches:
    """The items of a node with `map`, as the JSON of each batch: as objects, they need several times the memory."""

    items: int
    batches: list[str]


def divide(items: list[Any], batch_size: int) -> ItemBatches:
    """Return the items of a list in batches."""
    batches = [
        json.dumps(items[start : start + batch_size], ensure_ascii=False, separators=(",", ":"))
        for start in range(0, len(items), batch_size)
    ]
    return ItemBatches(items=len(items), batches=batches)
