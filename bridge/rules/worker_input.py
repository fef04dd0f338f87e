"""Converts the inline input of an external node to the form that its worker understands (H23). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.graph.input_adapters import NOOP, inline_of, parse_pull

if TYPE_CHECKING:
    from flowkit.graph.input_adapters import PullArgs
    from flowkit.models import AttemptInput

_ADAPTER, _ARGS = "input_adapter", "input_args"


def pull_of(attempt: AttemptInput) -> PullArgs | None:
    """Return the arguments of the attempt's pulling adapter; None if its graph names none. Raise BadInput."""
    inline = attempt.io.input_inline or {}
    return None if inline.get(_ADAPTER) in (None, "", NOOP) else parse_pull(inline)


def worker_input(attempt: AttemptInput) -> dict[str, Any] | None:
    """Return the `input_inline` of TASK_START: as the graph has it, with `failed_nodes` and without the adapter `noop`.

    External workers do not know `noop`. Validation has replaced every alias and rejected every unknown argument.
    """
    inline = inline_of(attempt)
    if inline is None or inline.get(_ADAPTER) != NOOP:
        return inline
    return {name: value for name, value in inline.items() if name not in (_ADAPTER, _ARGS)}
