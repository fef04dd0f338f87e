"""Compile expressions in CEL, the Common Expression Language, find the values that they name, and evaluate them. Pure.

The CEL package loads 50 MB of native code, so FlowKit imports it only when a graph contains an expression, and never in
workflow code, which may use only `find_names`."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from datetime import datetime
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from flowkit.core.time import time_zones
from flowkit.errors import BadCondition
from flowkit.limits import EXPRESSION_VALUE_BYTES
from flowkit.text import add_caret, did_you_mean, printed, suggestion, truncate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from flowkit.graph.cel_tree import Access


PARAMS, VARS, NODES, TASK = "params", "vars", "nodes", "task"
ROOTS = frozenset([PARAMS, VARS, NODES, TASK])
"""The variables of an expression. All are objects with values of any type."""

DATE = "date"
"""FlowKit's function that returns the day of a time in a time zone."""

_PROBLEM_CHARS = 300

_COMPILED = 1_000
"""Number of expressions that stay compiled."""

_PROBLEM = re.compile(r"ERROR: <input>:(-?\d+):(-?\d+): (.*)")
_STATUS = re.compile(r"^[A-Z_]+: |\s*\[[A-Z_]+\]$")
_NOISE = re.compile(r"Syntax error: | \(in container ''\)| expecting \{.*")
_UNDECLARED = re.compile(r"undeclared reference to '([^']*)'")
_TOKEN = re.compile(r"[=<>!&|]+|\w+")
_INSTEAD = {
    "=>": ">=",
    "=<": "<=",
    "=": "==",
    "===": "==",
    "!==": "!=",
    "<>": "!=",
    "&": "&&",
    "|": "||",
    "and": "&&",
    "or": "||",
    "not": "!",
    "is": "==",
    "None": "null",
    "True": "true",
    "False": "false",
}
"""CEL's operators and constants by those of other languages."""
_NAME = re.compile(
    r"""
    //[^\n]*                                                  # a comment
    | `(?P<quoted>[^`]*)`
    | [bB]?[rR](?P<mark>\"{3}|'{3}|["'])(?P<raw>.*?)(?P=mark)
    | (?P<quote>\"{3}|'{3}|["'])(?P<text>(?:\\.|[^\\])*?)(?P=quote)
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
    """,
    re.DOTALL | re.VERBOSE,
)
"""The names and the texts of an expression."""
_ESCAPE = re.compile(
    r"\\(?:[xX]([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(00[01][0-9a-fA-F]{5})|([0-3][0-7]{2})|(.))"
)
_NOT_UNICODE = "the expression is not valid Unicode"
_REMEDIES = {"bytes": "string(…)", "duration": "string(…)", "timestamp": "string(…)", "type": ""}
"""The types that JSON does not have, and what to write in place of such a result."""
_DATE_FORM = 'write date(task.scheduled_at, "Europe/Berlin"), with a time and a time zone'


@dataclass(frozen=True, slots=True)
class Expression:
    """A compiled expression."""

    text: str
    accesses: tuple[Access, ...]
    """The variables that it reads."""
    iterates: bool
    """Whether it iterates over a list or an object. The time of its evaluation is then hard to predict."""
    kind: str
    """The type of the result, as far as it is known before the evaluation; `dyn` if it is not."""
    program: Any


def compile_expression(text: str) -> Expression:
    """Return the compiled condition. Raise BadCondition, with a caret below the place, if it is not valid."""
    expression = _compile(text)
    if expression.kind not in {"bool", "dyn"}:
        raise BadCondition(add_caret(f"the result is of type {expression.kind}, not bool", text, 0))
    return expression


def compile_value(text: str) -> Expression:
    """Return the compiled expression, whose result may be any value of JSON. Raise BadCondition as for a condition."""
    expression = _compile(text)
    if expression.kind.partition("<")[0] in _REMEDIES:
        raise BadCondition(add_caret(_explain_type(expression.kind.partition("<")[0]), text, 0))
    return expression


def find_names(text: str) -> Iterator[str]:
    """Yield the names and the texts in a valid expression. Each node id that its accesses name is among them.

    This needs no CEL package. Texts that contain control characters are not exact, because no id contains any.
    """
    for match in _NAME.finditer(text):
        kind = match.lastgroup
        if kind is not None:
            yield _ESCAPE.sub(_unescape, match[kind]) if kind == "text" else match[kind]


def _unescape(sequence: re.Match[str]) -> str:
    """Return the character that an escape sequence stands for."""
    byte, short, long, octal, itself = sequence.groups()
    if itself is not None:
        return itself
    code = int(octal, 8) if octal else int(byte or short or long, 16)
    return chr(code) if code <= sys.maxunicode else ""


@lru_cache(maxsize=_COMPILED)
def _compile(text: str) -> Expression:
    from flowkit.graph.cel_tree import read_tree

    try:
        program = _create_environment().compile(text)
    except RuntimeError as error:
        raise BadCondition(_explain(text, str(error))) from None
    except TypeError:
        raise BadCondition(_NOT_UNICODE) from None
    tree = read_tree(program.serialize(), ROOTS, DATE)
    for zone in tree.zones:
        if problem := _zone_problem(zone.name):
            raise BadCondition(add_caret(problem, text, zone.position))
    kind = program.return_type().name().lower()
    return Expression(text, tree.accesses, tree.iterates, kind, program)


@cache
def _create_environment() -> Any:
    from cel_expr_python import cel

    kind = cel.Type.Map(cel.Type.STRING, cel.Type.DYN)
    times = {"text": cel.Type.STRING, "time": cel.Type.TIMESTAMP, "null": cel.Type.NULL}
    text = cel.Type.STRING
    overloads = [
        cel.Overload(f"date_of_{name}", text, [time, text], impl=_date) for name, time in times.items()
    ]
    functions = [cel.FunctionDecl(DATE, overloads)]
    return cel.NewEnv(variables=dict.fromkeys(sorted(ROOTS), kind), functions=functions)


def _date(at: datetime | str | None, zone: str) -> str:
    """Return the day of a time in a time zone: `2026-11-26`. Raise ValueError with what is wrong."""
    if at is None:
        raise ValueError("date(null, …): the time is null, such as that of a task without a schedule")
    if problem := _zone_problem(zone):
        raise ValueError(problem)
    try:
        moment = at if isinstance(at, datetime) else datetime.fromisoformat(at)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ValueError(f"date({printed(at)}, …): write the time as in 2026-11-26T02:00:00Z")
    try:
        return moment.astimezone(ZoneInfo(zone)).date().isoformat()
    except OverflowError:
        raise ValueError(
            f"date({printed(str(at))}, {printed(zone)}): the day is not in the years 1 to 9999"
        ) from None


def _zone_problem(zone: str) -> str:
    """Return why there is no time zone of this name; empty if there is one."""
    known = time_zones()
    if zone == "UTC" or zone in known:
        return ""
    if not known:
        return (
            f"time zone {printed(zone)} is unknown, because this machine has none; install the package tzdata"
        )
    hint = did_you_mean(zone, known, otherwise="use a name of the IANA database, such as Europe/Berlin")
    return f"time zone {printed(zone)} is unknown; {hint}"


def evaluate(expression: Expression, values: Mapping[str, Any]) -> bool:
    """Return the result for these values of the variables. Raise BadCondition if the evaluation fails."""
    found = _run(expression, values)
    result = found.value()
    if isinstance(result, bool):
        return result
    raise BadCondition(f"the result is of type {found.type().name().lower()}, not bool")


def evaluate_value(
    expression: Expression, values: Mapping[str, Any], most_bytes: int = EXPRESSION_VALUE_BYTES
) -> Any:
    """Return the result as a value of JSON with at most `most_bytes`. Raise BadCondition if there is none."""
    result = _to_json(_run(expression, values), "the result")
    try:
        size = len(json.dumps(result, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode())
    except ValueError:
        raise BadCondition("the result contains a number that JSON does not have") from None
    if size > most_bytes:
        raise BadCondition(
            f"the result has {size:,} bytes of JSON, more than {most_bytes:,}: pass a reference"
        )
    return result


def _run(expression: Expression, values: Mapping[str, Any]) -> Any:
    try:
        found = expression.program.eval(data=dict(values))
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise BadCondition(_STATUS.sub("", str(error))) from None
    if found.type().name() == "ERROR":
        raise BadCondition(_STATUS.sub("", str(found.value())).replace("map : ", "map: "))
    return found


def _to_json(found: Any, what: str) -> Any:
    """Return a value of CEL as a value of JSON."""
    value, kind = found.value(), found.type().name().partition("<")[0].lower()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_to_json(each, "a part of the result") for each in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise BadCondition(
                "the result contains an object with a key that is no text; JSON has only such keys"
            )
        return {key: _to_json(each, "a part of the result") for key, each in value.items()}
    raise BadCondition(_explain_type(kind, what))


def _explain_type(kind: str, what: str = "the result") -> str:
    remedy = _REMEDIES.get(kind)
    return f"{what} is of type {kind}, which JSON does not have" + (f"; write {remedy}" if remedy else "")


def _explain(text: str, error: str) -> str:
    """Return the first problem that the compiler reports."""
    match = _PROBLEM.search(error)
    if match is None:
        return _STATUS.sub("", error.splitlines()[0])
    line, column, problem = int(match[1]), int(match[2]), _NOISE.sub("", _STATUS.sub("", match[3]))
    lines = text.splitlines() or [""]
    if not 1 <= line <= len(lines):
        return problem
    position = sum(len(each) + 1 for each in lines[: line - 1]) + column - 1
    if other := _suggest_token(text, position):
        problem += f"; {other}"
    elif re.search(rf"'{DATE}'", problem):
        problem += f"; {_DATE_FORM}"
    elif name := _UNDECLARED.search(problem):
        problem += (
            suggestion(name[1].partition(".")[0], ROOTS) or f"; the variables are {', '.join(sorted(ROOTS))}"
        )
    problem = problem.replace("mismatched input '<EOF>'", "the expression is incomplete")
    return add_caret(truncate(problem, _PROBLEM_CHARS), text, position)


def _suggest_token(text: str, position: int) -> str:
    """Return a suggestion if the compiler stops at an operator or a constant of another language, or after `not`."""
    token = next((each for each in _TOKEN.finditer(text) if each.start() <= position < each.end()), None)
    given = "not" if re.search(r"\bnot\s+$", text[:position]) else token[0] if token else ""
    return f"did you mean {_INSTEAD[given]!r}?" if given in _INSTEAD else ""
