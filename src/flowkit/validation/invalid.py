"""What pydantic says about an invalid value, in the words of FlowKit's errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_PREFIXES: Final = {"value_error": "Value error, ", "assertion_error": "Assertion failed, "}
"""Before the text of the error that a validator has raised, by the type of the problem."""


def problem_of(found: Mapping[str, Any]) -> str:
    """Return what is wrong according to an entry of `ValidationError.errors()`, without a word about validators."""
    return str(found["msg"]).removeprefix(_PREFIXES.get(found["type"], ""))
