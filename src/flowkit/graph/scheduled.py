"""The nominal time of a task that a schedule has started, and params that contain it by expression. Pure.

A schedule gives all its tasks the same params. They can hold expressions such as `{"$cel": "task.scheduled_at"}`, which
the engine evaluates when it opens the task. Params of other tasks hold no expressions: there, such an object is a value
like any other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flowkit import limits
from flowkit.errors import BadCondition, GraphError
from flowkit.graph import cel
from flowkit.graph.conditions import SCHEDULED_AT, task_problem
from flowkit.graph.expressions import Found, fill, find
from flowkit.text import add_caret

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOMINAL_END = re.compile(r"-(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)\Z", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Nominal:
    """The schedule to which a task belongs, and the nominal time for which it starts."""

    schedule: str
    at: datetime

    @property
    def text(self) -> str:
        """The time as the task document has it."""
        return format_nominal(self.at)

    @property
    def task_id(self) -> str:
        """The id of the task, as Temporal forms it."""
        return f"{self.schedule}-{self.text}"


def format_nominal(at: datetime) -> str:
    """Return a nominal time as RFC 3339 text in UTC and whole seconds, as Temporal writes it into ids of tasks."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def nominal_fields(nominal: Nominal | None) -> dict[str, str]:
    """Return the fields of a stored request that keep a nominal time."""
    return {} if nominal is None else {"schedule": nominal.schedule, "scheduled_at": nominal.text}


def read_nominal(fields: Mapping[str, Any]) -> Nominal | None:
    """Return the nominal time that `nominal_fields` has stored; None if there is none."""
    schedule, text = fields.get("schedule"), fields.get("scheduled_at")
    try:
        at = datetime.fromisoformat(text if isinstance(text, str) else "")
    except ValueError:
        return None
    return Nominal(schedule=schedule, at=at) if isinstance(schedule, str) and at.tzinfo else None


def nominal_of(task_id: str, scheduled_at: str | None) -> Nominal | None:
    """Return the nominal time of a task whose document has `scheduled_at`; None for a task without a schedule."""
    if scheduled_at is None:
        return None
    return Nominal(schedule=task_id.removesuffix(f"-{scheduled_at}"), at=datetime.fromisoformat(scheduled_at))


def parse_nominal(text: str | None) -> datetime | None:
    """Return the time that `format_nominal` has written, in UTC; None without a text."""
    return None if text is None else datetime.fromisoformat(text)


def nominal_time_in(task_id: str) -> datetime | None:
    """Return the nominal time with which the id of a scheduled task ends; None if it ends with none."""
    found = _NOMINAL_END.search(task_id)
    try:
        return found and parse_nominal(found[1])
    except ValueError:
        return None


def evaluate_params(params: dict[str, Any], scheduled_at: str) -> dict[str, Any]:
    """Return params with the values of their expressions. Raise GraphError if one cannot be evaluated."""
    expressions = tuple(find(params, "params"))
    if not expressions:
        return params
    if len(expressions) > limits.SCHEDULE_EXPRESSIONS:
        many = f"params of a schedule hold {len(expressions):,} expressions, more than {limits.SCHEDULE_EXPRESSIONS}"
        raise GraphError([f"{many}; pass task.scheduled_at once, and compute the rest in a handler"])
    if problems := [problem for each in expressions if (problem := _problem(each))]:
        raise GraphError(problems)
    values = {**{root: {} for root in cel.ROOTS}, cel.TASK: {SCHEDULED_AT: scheduled_at}}
    try:
        found = {text: cel.evaluate_value(cel.compile_value(text), values) for _, text in expressions}
    except BadCondition as error:
        raise GraphError([f"params of a schedule: {error}"]) from None
    filled: dict[str, Any] = fill(params, found)
    return filled


def _problem(expression: Found) -> str | None:
    """Return why the params of a schedule cannot contain an expression."""
    path, text = expression
    if len(text) > limits.CONDITION_CHARS:
        return f"{path}: the expression has {len(text):,} characters; it must have 1 to {limits.CONDITION_CHARS:,}"
    try:
        compiled = cel.compile_value(text)
    except BadCondition as error:
        return f"{path}: {error}"
    if compiled.iterates:
        return f"{path}: {add_caret('the params of a schedule cannot iterate over lists', text, 0)}"
    for access in compiled.accesses:
        problem = f"the params of a schedule can read task.{SCHEDULED_AT} only, not {access.root}"
        if access.root == cel.TASK:
            problem = task_problem(access) or ""
        if problem:
            return f"{path}: {add_caret(problem, text, access.position)}"
    return None
