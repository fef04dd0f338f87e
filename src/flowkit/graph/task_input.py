"""Parse the input of a new task. Pure.

Malformed input fails with a message, because an error while decoding would be retried forever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowkit.errors import GraphError
from flowkit.limits import ID_CHARS
from flowkit.text import did_you_mean, printed, truncate
from flowkit.validation.values import is_task_id

if TYPE_CHECKING:
    from flowkit.models import StoredGraph

_KEYS = ("params", "graph")
_SHOWN_CHARS = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTask:
    """The input with which a client starts a task."""

    params: dict[str, Any] = field(default_factory=dict)
    graph: dict[str, Any] = field(default_factory=dict)
    stored: StoredGraph | None = None
    """Where both are stored, if `create_task` stored them."""


def parse_input(task_id: str, given: object) -> NewTask:
    """Return the input of a new task. The content of the graph is not checked here.

    Raise GraphError if the task id or the top-level structure of `given` is not valid.
    """
    problems = [*_id_problems(task_id), *_outer_problems(given)]
    if problems or not isinstance(given, dict):
        raise GraphError(problems)
    return NewTask(params=given.get("params") or {}, graph=given["graph"])


def _id_problems(task_id: str) -> list[str]:
    if is_task_id(task_id):
        return []
    return [f"task id {truncate(task_id, _SHOWN_CHARS)!r} must be 1 to {ID_CHARS} characters and not '*'"]


def _outer_problems(given: object) -> list[str]:
    if not isinstance(given, dict):
        shown = given if isinstance(given, str) else printed(given)
        return [
            f'the input of a task is {{"params": {{...}}, "graph": {{...}}}}, not {truncate(shown, _SHOWN_CHARS)!r}'
        ]
    problems = [_unknown(key) for key in given if key not in _KEYS]
    if "graph" not in given:
        problems.append("the input of a task has no 'graph'")
    elif not isinstance(given["graph"], dict):
        problems.append(f"graph must be an object with 'nodes', not {printed(given['graph'])}")
    if not isinstance(given.get("params"), (dict, type(None))):
        problems.append(f"params must be an object, not {printed(given['params'])}")
    return problems


def _unknown(key: object) -> str:
    hint = did_you_mean(key, _KEYS, otherwise="it takes 'params' and 'graph'")
    return f"the input of a task has the unknown key {printed(key)}; {hint}"
