"""Input adapters of a node and their arguments (spec: input routing). Pure; validation and workers use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowkit import reason_codes
from flowkit.errors import BadInput
from flowkit.graph import expressions
from flowkit.graph.expressions import is_expression
from flowkit.graph.kinds import (
    EXPRESSION_SCHEMA,
    FLAG,
    Field,
    ValueKind,
    allow_null,
    by_name,
    field_problems,
    whole,
)
from flowkit.text import did_you_mean
from flowkit.validation.values import is_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from flowkit.graph.kinds import Schema


PULL = "pull.from_artifacts"
RECHUNK = "pull.from_artifacts.rechunk:size"
NOOP = "noop"
"""No input from other nodes: the worker calls the handler's own `iter_batches`."""

ADAPTERS = (PULL, RECHUNK, NOOP)

"""Key of `input_inline` under which a node finds the failures that started it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PullArgs:
    """Arguments of the two pulling input adapters."""

    from_nodes: tuple[str, ...]
    poll_ms: int = 300
    eof_on_task_done: bool = True
    backoff_max_ms: int = 4000
    size: int | None = None
    """Items per chunk. None delivers every upstream batch unchanged."""
    meta_list_key: str | None = None


def _are_texts(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(map(is_text, value))


_FULL_TEXT: Schema = {"type": "string", "minLength": 1}
_MILLISECONDS = whole(1, must="a whole number of milliseconds above 0")
_SOURCES = ("from_nodes", "from_node")
RECHUNK_ARGS = by_name(
    Field(
        "from_nodes",
        ValueKind(schema={"type": "array", "items": _FULL_TEXT}, fits=_are_texts, must="a list of node ids"),
    ),
    Field("from_node", ValueKind(schema=_FULL_TEXT, fits=is_text, must="one node id")),
    Field("size", whole(1, must="a whole number above 0")),
    Field(
        "meta_list_key",
        ValueKind(schema=_FULL_TEXT, fits=is_text, must="the name of a list in the upstream meta"),
    ),
    Field("poll_ms", _MILLISECONDS),
    Field("backoff_max_ms", _MILLISECONDS),
    Field("eof_on_task_done", FLAG),
)
"""The fields of `input_args` of the adapter that pulls and rechunks, in the order in which a `Flow` writes them."""
PULL_ARGS = {name: field for name, field in RECHUNK_ARGS.items() if name not in ("size", "meta_list_key")}
"""The fields of `input_args` of the adapter that pulls."""


def inline_problems(inline: dict[str, Any], *, strict: bool = False) -> Iterator[str]:
    """Yield the problems of the input adapter in `io.input_inline`. Yield nothing if it names no adapter."""
    adapter = inline.get("input_adapter")
    if adapter is None or is_expression(adapter) or is_expression(inline.get("input_args")):
        return
    if adapter not in ADAPTERS:
        hint = did_you_mean(adapter, ADAPTERS, otherwise=f"known: {', '.join(ADAPTERS)}")
        yield f"io.input_inline.input_adapter {adapter!r} is unknown; {hint}"
        return
    yield from args_problems(adapter, inline.get("input_args"), strict=strict)


def args_problems(adapter: str, args: object, *, strict: bool = False) -> Iterator[str]:
    """Yield the problems of `input_args` for a known adapter. `strict` also requires `meta_list_key` to rechunk."""
    if adapter == NOOP or args is None:
        args = {}
    if not isinstance(args, dict):
        yield f"input_args {args!r} must be an object"
        return
    if adapter == RECHUNK:
        yield from _find_missing(args, strict=strict)
    if "from_node" in args and "from_nodes" in args:
        yield "input_args has both from_node and from_nodes; keep from_nodes"
    fields = RECHUNK_ARGS if adapter == RECHUNK else PULL_ARGS
    for key, value in args.items():
        if key not in fields:
            yield f"input_args.{key} is unknown to {adapter}; it takes {', '.join(fields)}"
        elif not is_expression(value):
            yield from field_problems(fields[key], value, "input_args.")


def _args_schema(fields: Mapping[str, Field]) -> Schema:
    by_expression: Schema = {
        "description": "a value by expression, in CEL",
        "type": "object",
        "required": [expressions.KEY],
        "properties": {expressions.KEY: EXPRESSION_SCHEMA},
        "additionalProperties": False,
    }
    properties = {
        name: {
            "description": field.kind.must,
            **(field.kind.schema if name in _SOURCES else {"anyOf": [field.kind.schema, by_expression]}),
        }
        for name, field in fields.items()
    }
    both = {"required": ["from_node", "from_nodes"]}
    return {"type": "object", "properties": properties, "additionalProperties": False, "not": both}


def _route_schema(adapter: str, args: Schema, *required: str) -> Schema:
    properties = {"input_adapter": {"const": adapter}, "input_args": args}
    return {"required": ["input_adapter", *required], "properties": properties}


INLINE = ValueKind(
    schema={
        "type": "object",
        "anyOf": [
            {"properties": {"input_adapter": {"enum": [None, NOOP]}}},
            _route_schema(PULL, allow_null(_args_schema(PULL_ARGS))),
            _route_schema(RECHUNK, {**_args_schema(RECHUNK_ARGS), "required": ["size"]}, "input_args"),
        ],
    },
    fits=lambda value: isinstance(value, dict),
    must="an object",
    more=inline_problems,
)
"""`io.input_inline`: an object of the user, which may name an input adapter and its arguments."""


def _find_missing(args: dict[str, Any], *, strict: bool) -> Iterator[str]:
    if "size" not in args:
        yield "input_args.size is missing; it must be a whole number above 0"
    if strict and "meta_list_key" not in args:
        yield "input_args.meta_list_key is missing; this worker is strict (strict_input_adapters) and requires it"


def replace_alias(args: dict[str, Any] | None) -> dict[str, Any]:
    """Return a copy of `args` in which the alias `from_node` is replaced by `from_nodes`."""
    given = dict(args or {})
    if "from_node" in given:
        given["from_nodes"] = [given.pop("from_node")]
    return given


def parse_pull(
    inline: dict[str, Any],
    *,
    parents: Sequence[str] = (),
    defaults: Mapping[str, int] | None = None,
    strict: bool = False,
) -> PullArgs:
    """Return the arguments of the pulling adapter that `inline` names. Raise BadInput, which lists every problem.

    `parents` are used when `from_nodes` is left out; an explicit `from_nodes: []` means no sources. `defaults` provides
    `poll_ms` and `backoff_max_ms` when they are left out.
    """
    problems = list(inline_problems(inline, strict=strict))
    args = {} if problems else replace_alias(inline.get("input_args"))
    given = "from_nodes" in args
    sources = tuple(args["from_nodes"] if given else parents)
    if not problems and not sources and not given:
        problems = ["input_args.from_nodes is missing, and the node has no parents to pull from"]
    if problems:
        known = inline.get("input_adapter") in ADAPTERS
        raise BadInput(
            "; ".join(problems), code=reason_codes.BAD_INPUT_ARGS if known else reason_codes.BAD_INPUT_ADAPTER
        )
    return PullArgs(**{**(defaults or {}), **args, "from_nodes": sources})
