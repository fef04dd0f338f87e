"""Which values are valid, wherever users give them: in settings, as arguments of a call, or in a graph. Pure."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, TypeGuard

from flowkit.limits import BATCH_UID_CHARS, ID_CHARS, ROLE
from flowkit.models import RESERVED_TYPES
from flowkit.protocol.messages import FINAL_UID
from flowkit.text import kind_of, truncate

if TYPE_CHECKING:
    from collections.abc import Callable

YEAR_SEC = 365 * 24 * 3600
"""Longest time that FlowKit accepts."""

SHORTEST_SEC = 0.001
"""One millisecond, the resolution of waiting times."""

ELEMENT_SUFFIX = re.compile(r"\[\d+\]$")
"""The suffix `[number]`, with which a node id must not end."""

NODE_ID_RULE = (
    f"1 to {ID_CHARS} printable characters, not '*', not ending in '[number]', without blanks at its ends"
)

_SHOWN_UID_CHARS = 80


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a finite number within the range of floats. A bool is no number."""
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    )


def is_whole(value: object, least: int, most: int | None = None) -> TypeGuard[int]:
    """Return whether `value` is an integer within the bounds; None means no upper bound. A bool is no integer."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return least <= value and (most is None or value <= most)


def is_seconds(value: object, least: float = SHORTEST_SEC) -> TypeGuard[float]:
    """Return whether `value` is a time in seconds, possibly a fraction, of at most one year."""
    return is_number(value) and least <= value <= YEAR_SEC


def is_text(value: object) -> TypeGuard[str]:
    """Return whether `value` is a text that is not empty."""
    return isinstance(value, str) and value != ""


def is_role(value: object) -> TypeGuard[str]:
    """Return whether `value` can be the name of a role."""
    return isinstance(value, str) and ROLE.fullmatch(value) is not None and value not in RESERVED_TYPES


def is_task_id(value: object) -> TypeGuard[str]:
    """Return whether `value` can be a task id."""
    return isinstance(value, str) and 1 <= len(value) <= ID_CHARS and value != "*" and is_unicode(value)


def is_node_id(value: object) -> TypeGuard[str]:
    """Return whether `value` can be a node id."""
    return (
        isinstance(value, str)
        and 1 <= len(value) <= ID_CHARS
        and value.isprintable()
        and value != "*"
        and not ELEMENT_SUFFIX.search(value)
        and not has_blank_end(value)
    )


def has_blank_end(text: str) -> bool:
    """Return whether a text begins or ends with blanks, which nobody sees in a list, a log or a command."""
    return text != text.strip()


def batch_uid_problem(uid: object) -> str | None:
    """Return why FlowKit cannot store a batch under this uid, or None."""
    if not isinstance(uid, str) or not uid:
        given = "empty" if uid == "" else kind_of(uid)
        return f"a batch uid is {given}: use a string that is not empty"
    place = f"batch uid {truncate(uid, _SHOWN_UID_CHARS)!r}"
    if len(uid) > BATCH_UID_CHARS:
        return (
            f"{place} has {len(uid):,} characters, more than {BATCH_UID_CHARS}: use a shorter one, "
            "for example a hash"
        )
    if uid == FINAL_UID:
        return f"{place} is reserved for the metrics of finalize: use another one"
    if "\0" in uid or not is_unicode(uid):
        what = "a NUL character" if "\0" in uid else "half of a surrogate pair"
        return f"{place} contains {what}: remove or replace it"
    return None


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode `text`. It cannot encode lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def name_bad_character(
    value: object, bad: Callable[[str], bool] = lambda char: not char.isprintable()
) -> str:
    """Return the code of the first bad character of an id, for the end of an error, or an empty string."""
    found = next(filter(bad, value), None) if isinstance(value, str) else None
    return f"; it contains U+{ord(found):04X}" if found else ""
