"""Checks of the arguments of public calls, made before a server is asked. Pure.

A value that becomes part of a filter must be what it claims to be: MongoDB takes a dict in the place of an id for a
condition, which other tasks may meet. Each check returns a sentence that names the argument, the value and what is
allowed, or None; `require` raises it.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowkit.errors import ConfigError
from flowkit.limits import ID_CHARS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from flowkit.errors import FlowKitError

_SHOWN_CHARS = 80
ELEMENT_SUFFIX = re.compile(r"\[\d+\]$")
"""End of a name that is not a node's id."""

NODE_ID_RULE = f"1 to {ID_CHARS} printable characters, not '*', not ending in '[number]'"


def require(*problems: str | None, error: Callable[[str], FlowKitError] = ConfigError) -> None:
    """Raise `error` with the first problem, if there is one."""
    for problem in problems:
        if problem is not None:
            raise error(problem)


def task_id_problem(value: object, name: str = "task_id") -> str | None:
    """What keeps `value` from being the id of an existing task, which Temporal alone may have started."""
    return _problem(name, value, is_task_id(value), f"the id of a task: {_CHARS}, not '*'")


def new_task_id_problem(value: object, name: str = "task_id") -> str | None:
    """What keeps `value` from being the id of a new task: it is shown in terminals, logs and URLs."""
    good = isinstance(value, str) and is_task_id(value) and not any(map(_is_control, value))
    wanted = f"{_CHARS}, not '*' and without control characters; leave it out for a new UUID"
    return _problem(name, value, good, wanted)


def node_id_problem(value: object, name: str = "node_id") -> str | None:
    """What keeps `value` from being the id of a node."""
    return _problem(name, value, is_node_id(value), f"the id of a node: {NODE_ID_RULE}")


def text_problem(value: object, name: str, chars: int = ID_CHARS) -> str | None:
    """What keeps `value` from being a text of 1 to `chars` characters."""
    good = isinstance(value, str) and 1 <= len(value) <= chars and is_unicode(value)
    return _problem(name, value, good, f"a text of 1 to {chars:,} characters")


def whole_problem(value: object, name: str, least: int, most: int) -> str | None:
    """What keeps `value` from being a whole number from `least` to `most`."""
    good = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    return _problem(name, value, good, f"a whole number between {least:,} and {most:,}")


def timeout_problem(value: object, name: str = "timeout") -> str | None:
    """What keeps `value` from being a time to wait: seconds, or None for as long as it takes."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    good = value is None or (number and not math.isnan(_float(value)) and _float(value) >= 0)
    return _problem(name, value, good, "a number of seconds, 0 or more, or None to wait as long as it takes")


def check_wait(task_id: object, timeout: object) -> None:
    """ConfigError unless this is a task's id, and a time to wait for its end."""
    require(task_id_problem(task_id), timeout_problem(timeout))


def choice_problem(value: object, name: str, known: Collection[str]) -> str | None:
    """What keeps `value` from being one of these words."""
    good = isinstance(value, str) and value in known
    return None if good else f"{name} {shown(value)} is unknown; known: {', '.join(known)}"


def database_problem(value: object, name: str = "db") -> str | None:
    """What keeps `value` from being a database of an asynchronous MongoDB client, as far as can be told offline."""
    good = value is not None and not isinstance(value, (str, bytes, int, Mapping, type))
    return _problem(name, value, good, "a database of Motor or PyMongo Async, for example client['flowkit']")


def client_problem(value: object, name: str = "client") -> str | None:
    """What keeps `value` from being a Temporal client, or None for one that is connected by `TEMPORAL_*`."""
    good = value is None or (hasattr(value, "start_workflow") and not isinstance(value, type))
    return _problem(name, value, good, "a Temporal client; leave it out to connect as TEMPORAL_ADDRESS says")


def clock_problem(value: object, name: str = "clock") -> str | None:
    """What keeps `value` from being a clock, or None for the system's."""
    good = value is None or (hasattr(value, "now_dt") and not isinstance(value, type))
    return _problem(name, value, good, "a clock of flowkit.core.time, or an object with its methods")


def settings_problem(value: object, name: str, kind: type) -> str | None:
    """What keeps `value` from being settings of this kind, or None for the defaults."""
    good = value is None or isinstance(value, kind)
    return _problem(
        name, value, good, f"a {kind.__name__}, for example {kind.__name__}.load(overrides={{…}})"
    )


def roles_problem(value: object, name: str) -> str | None:
    """What keeps `value` from being a list of roles, or None; a text is a list of letters to Python."""
    good = value is None or isinstance(value, (list, tuple, set, frozenset))
    return _problem(name, value, good, "a list of roles, for example ['extract', 'count']")


def handlers_problem(value: object, name: str = "handlers") -> str | None:
    """What keeps `value` from being handlers by role, or None for no other than the built-in ones."""
    good = value is None or isinstance(value, Mapping)
    return _problem(name, value, good, "a mapping of roles to handlers, {'extract': Extractor()}")


def functions_problem(value: object, name: str) -> str | None:
    """What keeps `value` from being coordinator functions by name."""
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


def is_task_id(value: object) -> bool:
    """Whether `value` can be a task's id."""
    return isinstance(value, str) and 1 <= len(value) <= ID_CHARS and value != "*" and is_unicode(value)


def is_node_id(value: object) -> bool:
    """Whether `value` can be a node's id."""
    return (
        isinstance(value, str)
        and 1 <= len(value) <= ID_CHARS
        and value.isprintable()
        and value != "*"
        and not ELEMENT_SUFFIX.search(value)
    )


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode `text`; it cannot encode half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object) -> str:
    """`value` as an error shows it, with its type unless that is plain to see."""
    text = printed(value)
    return text if value is None or isinstance(value, str) else f"{text} ({type(value).__name__})"


def printed(value: object) -> str:
    """`repr` of a value on one line, cut to 80 characters."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # ValueError: an integer of more digits than Python prints
        return f"{_kind(value)} too large or nested too deeply to show"
    return printable(text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…")


def shown_path(path: str, chars: int = _SHOWN_CHARS) -> str:
    """A path as an error shows it: on one line, the middle cut out when it is long."""
    half = chars // 2 - 1
    return printable(path if len(path) <= chars else f"{path[:half]}…{path[-half:]}")


def printable(text: str) -> str:
    """`text` with escapes for line breaks, control characters and halves of surrogate pairs."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


_CHARS = f"a text of 1 to {ID_CHARS} characters"


def _problem(name: str, value: object, good: bool, wanted: str) -> str | None:
    return None if good else f"{name} is {shown(value)}; it must be {wanted}"


def _is_control(char: str) -> bool:
    return unicodedata.category(char) == "Cc"


def _float(value: Any) -> float:
    """`value` as a float; an integer beyond them is infinite enough."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
