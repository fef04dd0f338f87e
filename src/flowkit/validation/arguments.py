"""Validation of the arguments of public calls, before any call to a server.

A value that becomes part of a MongoDB filter must have the right type: MongoDB treats a dict in place of an id as a
condition, which may match other tasks. Each check returns None, or a sentence that names the argument, its value and
the allowed values. `require` raises that sentence as an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from flowkit.errors import ConfigError
from flowkit.limits import ID_CHARS
from flowkit.models.ownership import OwnerKind, reserved_for
from flowkit.text import shown, visible
from flowkit.validation.invalid import sentence
from flowkit.validation.values import (
    NODE_ID_RULE,
    has_blank_end,
    is_node_id,
    is_task_id,
    is_unicode,
    is_whole,
    name_bad_character,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from flowkit.errors import FlowKitError


def require(*problems: str | None, error: Callable[[str], FlowKitError] = ConfigError) -> None:
    """Raise `error` with the first problem that is not None."""
    for problem in problems:
        if problem is not None:
            raise error(problem)


def task_id_problem(value: object, name: str = "task_id") -> str | None:
    """Return why `value` cannot be the id of an existing task, or None.

    The rule is looser than for new tasks, because a Temporal client may have started the task without FlowKit.
    """
    return _problem(name, value, is_task_id(value), f"the id of a task: {_CHARS}, not '*'")


def new_task_id_problem(
    value: object, name: str = "task_id", *, kind: OwnerKind = OwnerKind.TASK
) -> str | None:
    """Return why `value` cannot be the id of a new task, or None. Terminals, logs and URLs show the id.

    `kind` says what starts the task: some ids are reserved for one kind of owner.
    """
    if isinstance(value, str) and (problem := reserved_id_problem(value, name, kind)) is not None:
        return problem
    bad = name_bad_character(value, _is_deceptive)
    good = is_task_id(value) and not bad and not has_blank_end(value)
    wanted = (
        f"{_CHARS}, not '*', without blanks at its ends, and without control and bidirectional characters; omit it to "
        f"get a new UUID{bad}"
    )
    return _problem(name, value, good, wanted)


def reserved_id_problem(value: str, name: str, kind: OwnerKind) -> str | None:
    """Return that an id is reserved for other kinds of owners than `kind`; None if it is not."""
    reserved = reserved_for(value)
    if reserved is None or kind in reserved.kinds:
        return None
    return f"{name} is {shown(value)}; {reserved.text}; choose another id"


def schedule_name_problem(value: object) -> str | None:
    """Return why `value` cannot be the name of a schedule, with which the ids of its tasks begin, or None."""
    return new_name_problem(value, "name", "the name of a schedule", _SCHEDULE_NAME_CHARS)


def new_name_problem(value: object, name: str, what: str, chars: int) -> str | None:
    """Return why `value` cannot name something new, or None. Terminals, logs and URLs show the name."""
    bad = name_bad_character(value, _is_deceptive)
    good = (
        isinstance(value, str) and is_unicode(value) and 1 <= len(value) <= chars and not has_blank_end(value)
    )
    wanted = (
        f"{what}: a string of 1 to {chars} characters, without blanks at its ends, and without control and "
        f"bidirectional characters{bad}"
    )
    return _problem(name, value, good and not bad, wanted)


def node_id_problem(value: object, name: str = "node_id") -> str | None:
    """Return why `value` cannot be the id of a node, or None."""
    bad = name_bad_character(value)
    return _problem(name, value, is_node_id(value), f"the id of a node: {NODE_ID_RULE}{bad}")


def text_problem(value: object, name: str, chars: int = ID_CHARS) -> str | None:
    """Return why `value` is not a text of 1 to `chars` characters, or None."""
    good = isinstance(value, str) and 1 <= len(value) <= chars and is_unicode(value)
    return _problem(name, value, good, f"a string of 1 to {chars:,} characters")


def whole_problem(value: object, name: str, least: int, most: int) -> str | None:
    """Return why `value` is not an integer from `least` to `most`, or None."""
    good = is_whole(value, least, most)
    return _problem(name, value, good, f"a whole number between {least:,} and {most:,}")


def moment_problem(value: object, name: str) -> str | None:
    """Return why `value` is not a time in seconds since the Unix epoch, or None. It may be None, for no time."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    good = value is None or (number and _FIRST_SEC <= _to_float(value) <= _LAST_SEC)
    return _problem(name, value, good, "a time in seconds since the Unix epoch, in the years 1 to 9999")


def datetime_problem(value: object, name: str) -> str | None:
    """Return why `value` is not a datetime with a time zone near the years of nominal times, or None."""
    good = isinstance(value, datetime) and value.tzinfo is not None and value.year in _YEARS
    wanted = f"a datetime with a time zone, in the years {_YEARS[0]} to {_YEARS[-1]}"
    return _problem(name, value, good, wanted)


def timeout_problem(value: object, name: str = "timeout") -> str | None:
    """Return why `value` is not a timeout, or None. A timeout is a number of seconds, or None for no limit."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    good = value is None or (number and not math.isnan(_to_float(value)) and _to_float(value) >= 0)
    return _problem(name, value, good, "a number of seconds, 0 or more, or None to wait without a timeout")


def check_wait(task_id: object, timeout: object) -> None:
    """Raise ConfigError unless `task_id` is a task id and `timeout` is a timeout."""
    require(task_id_problem(task_id), timeout_problem(timeout))


def choice_problem(value: object, name: str, known: Collection[str]) -> str | None:
    """Return why `value` is not one of the `known` values, or None."""
    good = isinstance(value, str) and value in known
    return None if good else f"{name} {shown(value)} is unknown; known: {', '.join(known)}"


def database_problem(value: object, name: str = "db") -> str | None:
    """Return why `value` is not a database of an async MongoDB client, or None. Does not contact a server."""
    good = value is not None and not isinstance(value, (str, bytes, int, Mapping, type))
    return _problem(name, value, good, "a database of Motor or PyMongo Async, for example client['flowkit']")


def client_problem(value: object, name: str = "client") -> str | None:
    """Return why `value` is not a Temporal client, or None. The value may be None, which means `TEMPORAL_*` applies."""
    good = value is None or (hasattr(value, "start_workflow") and not isinstance(value, type))
    return _problem(name, value, good, "a Temporal client; omit it to connect to TEMPORAL_ADDRESS")


def clock_problem(value: object, name: str = "clock") -> str | None:
    """Return why `value` is not a clock, or None. The value may be None, which means the system clock."""
    good = value is None or (hasattr(value, "now_dt") and not isinstance(value, type))
    return _problem(name, value, good, "a clock of flowkit.core.time, or an object with its methods")


def settings_problem(value: object, name: str, kind: type) -> str | None:
    """Return why `value` is not an instance of `kind`, or None. The value may be None, which means the defaults."""
    good = value is None or isinstance(value, kind)
    return _problem(
        name, value, good, f"a {kind.__name__}, for example {kind.__name__}.load(overrides={{…}})"
    )


def roles_problem(value: object, name: str) -> str | None:
    """Return why `value` is not a list of roles, or None. A string is rejected, because Python iterates its letters."""
    good = value is None or isinstance(value, (list, tuple, set, frozenset))
    return _problem(name, value, good, "a list of roles, for example ['extract', 'count']")


def handlers_problem(value: object, name: str = "handlers") -> str | None:
    """Return why `value` is not a mapping of handlers, or None. The value may be None: built-in handlers only."""
    good = value is None or isinstance(value, Mapping)
    return _problem(name, value, good, "a mapping of roles to handlers, {'extract': Extractor()}")


def functions_problem(value: object, name: str) -> str | None:
    """Return why `value` is not a mapping of names to coordinator functions, or None."""
    if not isinstance(value, Mapping):
        return _problem(name, value, False, "a mapping of names to functions, {'my.fn': fn}")
    for key, function in value.items():
        if problem := text_problem(key, f"a name in {name}"):
            return problem
        if not callable(function):
            return _problem(
                f"{name}[{key!r}]", function, False, "a function: async def fn(task_id, **fn_args)"
            )
    return None


_FIRST_SEC, _LAST_SEC = -62_135_596_800, 253_402_300_799
_YEARS = range(1900, 2201)
_CHARS = f"a string of 1 to {ID_CHARS} characters"
_SCHEDULE_NAME_CHARS = ID_CHARS - len("-2026-11-26T02:00:00Z")
"""Ids of tasks end with the nominal time."""


def _problem(name: str, value: object, good: bool, wanted: str) -> str | None:
    return None if good else sentence(name, value, wanted)


def _is_deceptive(char: str) -> bool:
    return char in "\t\n" or visible(char) != char


def _to_float(value: Any) -> float:
    """Return `value` as a float, or infinity for an integer that is too large for a float."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
