"""Values as programs write them, and as the JSON of a graph has them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from flowkit.errors import GraphError
from flowkit.graph.expressions import KEY, is_expression
from flowkit.graph.submission import convert_to_json
from flowkit.text import printed

Duration = float | timedelta
"""A duration: a number of seconds, or a timedelta."""


class Cel:
    """An expression in CEL, which gives a value when the task runs."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return f"cel({self.text!r})"


def cel(expression: str) -> Cel:
    """Return a value by expression, for example `cel("params.day")`, for the input of a node."""
    return Cel(expression)


def to_json(value: Any, name: str) -> Any:
    """Return a value of the program as JSON, with its expressions. Raise GraphError, with `name`, if it has no JSON."""
    return convert_to_json(name, _write_expressions(value))


def to_input(value: Any, name: str) -> Any:
    """Return a value as `to_json` does. Raise GraphError, too, for data that would be evaluated as an expression."""
    _refuse_expressions(value)
    return to_json(value, name)


def _refuse_expressions(value: Any) -> None:
    if is_expression(value):
        raise GraphError(
            [f"{printed(value)} would be an expression, not a value; write cel({value[KEY]!r}) for one"]
        )
    for each in (
        value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    ):
        _refuse_expressions(each)


def _write_expressions(value: Any) -> Any:
    if isinstance(value, Cel):
        return {KEY: value.text}
    if isinstance(value, dict):
        return {key: _write_expressions(each) for key, each in value.items()}
    return [_write_expressions(each) for each in value] if isinstance(value, (list, tuple)) else value


def to_text(expression: str | Cel) -> str:
    """Return the text of an expression."""
    return expression.text if isinstance(expression, Cel) else expression


def to_seconds(duration: Any) -> Any:
    """Return a duration in seconds. Other values are left to the validation of the graph."""
    if not isinstance(duration, timedelta):
        return duration
    seconds = duration.total_seconds()
    return int(seconds) if seconds == int(seconds) else seconds


def present(**given: Any) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in given.items() if value is not None}
