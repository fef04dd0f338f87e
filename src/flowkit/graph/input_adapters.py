"""Input adapters of a node and their arguments (spec: input routing). Pure; validation and workers use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowkit import reason_codes
from flowkit.errors import BadInput
from flowkit.graph.expressions import is_expression
from flowkit.text import did_you_mean
from flowkit.validation.values import is_text, is_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


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


def _is_count(value: object) -> bool:
    return is_whole(value, 1)


def _are_texts(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(map(is_text, value))


_PULL_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "from_nodes": ("a list of node ids", _are_texts),
    "from_node": ("one node id", is_text),
    "poll_ms": ("a whole number of milliseconds above 0", _is_count),
    "eof_on_task_done": ("true or false", lambda value: isinstance(value, bool)),
    "backoff_max_ms": ("a whole number of milliseconds above 0", _is_count),
}
_RECHUNK_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **_PULL_CHECKS,
    "size": ("a whole number above 0", _is_count),
    "meta_list_key": ("the name of a list in the upstream meta", is_text),
}


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
    checks = _RECHUNK_CHECKS if adapter == RECHUNK else _PULL_CHECKS
    for key, value in args.items():
        if key not in checks:
            yield f"input_args.{key} is unknown to {adapter}; it takes {', '.join(checks)}"
        elif not is_expression(value) and not checks[key][1](value):
            yield f"input_args.{key} {value!r} must be {checks[key][0]}"


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
