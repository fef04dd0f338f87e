"""Compile and evaluate expressions in CEL, the Common Expression Language. Pure.

The CEL package loads 50 MB of native code, so FlowKit imports it only when a graph contains an expression, and never in
workflow code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from flowkit.errors import BadCondition
from flowkit.graph.cel_tree import Access, read_tree
from flowkit.text import suggestion, truncate

if TYPE_CHECKING:
    from collections.abc import Mapping

PARAMS, VARS, NODES = "params", "vars", "nodes"
ROOTS = frozenset([PARAMS, VARS, NODES])
"""The variables of an expression. All are objects with values of any type."""

_SHOWN_CHARS = 100
"""Longest part of an expression's line that a message shows."""

_PROBLEM_CHARS = 300

_COMPILED = 1_000
"""Number of expressions that stay compiled."""

_PROBLEM = re.compile(r"ERROR: <input>:(-?\d+):(-?\d+): (.*)")
_STATUS = re.compile(r"^[A-Z_]+: |\s*\[[A-Z_]+\]$")
_NOISE = re.compile(r"Syntax error: | \(in container ''\)| expecting \{.*")
_UNDECLARED = re.compile(r"undeclared reference to '([^']*)'")
_NOT_UNICODE = "the expression is not valid Unicode"


@dataclass(frozen=True, slots=True)
class Expression:
    """A compiled expression."""

    text: str
    accesses: tuple[Access, ...]
    """The variables that it reads."""
    iterates: bool
    """Whether it iterates over a list or an object. The time of its evaluation is then hard to predict."""
    program: Any


@lru_cache(maxsize=_COMPILED)
def compiled(text: str) -> Expression:
    """Return the compiled expression. Raise BadCondition, with a caret below the place, if it is not valid."""
    try:
        program = _environment().compile(text)
    except RuntimeError as error:
        raise BadCondition(_explain(text, str(error))) from None
    except TypeError:
        raise BadCondition(_NOT_UNICODE) from None
    kind = program.return_type().name().lower()
    if kind not in {"bool", "dyn"}:
        raise BadCondition(with_caret(f"the result is of type {kind}, not bool", text, 0))
    tree = read_tree(program.serialize(), ROOTS)
    return Expression(text, tree.accesses, tree.iterates, program)


@cache
def _environment() -> Any:
    from cel_expr_python import cel

    kind = cel.Type.Map(cel.Type.STRING, cel.Type.DYN)
    return cel.NewEnv(variables=dict.fromkeys(sorted(ROOTS), kind))


def evaluate(expression: Expression, values: Mapping[str, Any]) -> bool:
    """Return the result for these values of the variables. Raise BadCondition if the evaluation fails."""
    try:
        found = expression.program.eval(data=dict(values))
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise BadCondition(_STATUS.sub("", str(error))) from None
    result, kind = found.value(), found.type().name()
    if isinstance(result, bool):
        return result
    if kind == "ERROR":
        raise BadCondition(_STATUS.sub("", str(result)).replace("map : ", "map: "))
    raise BadCondition(f"the result is of type {kind.lower()}, not bool")


def _explain(text: str, error: str) -> str:
    """Return the first problem that the compiler reports."""
    match = _PROBLEM.search(error)
    if match is None:
        return _STATUS.sub("", error.splitlines()[0])
    line, column, problem = int(match[1]), int(match[2]), _NOISE.sub("", _STATUS.sub("", match[3]))
    if name := _UNDECLARED.search(problem):
        problem += (
            suggestion(name[1].partition(".")[0], ROOTS) or f"; the variables are {', '.join(sorted(ROOTS))}"
        )
    lines = text.splitlines() or [""]
    if not 1 <= line <= len(lines):
        return problem
    problem = problem.replace("mismatched input '<EOF>'", "the expression is incomplete")
    return with_caret(
        truncate(problem, _PROBLEM_CHARS), text, sum(len(each) + 1 for each in lines[: line - 1]) + column - 1
    )


def with_caret(problem: str, text: str, position: int) -> str:
    """Return a problem, followed by the line of `text` that contains `position` and a caret below that place."""
    start = text.rfind("\n", 0, position) + 1
    line = text[start:].partition("\n")[0]
    column = position - start
    first = max(0, column - _SHOWN_CHARS // 2)
    shown = "".join(c if c.isprintable() else " " for c in line[first : first + _SHOWN_CHARS])
    return f"{problem}\n  | {shown}\n  | {' ' * (column - first)}^"
