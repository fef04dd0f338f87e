"""Which values are valid, wherever users give them: in settings, as arguments of a call, or in a graph. Pure.

`Must` is the metadata of an `Annotated` type: what a value must be. `flowkit.validation.invalid` says what is wrong
with a value that is not.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from flowkit.core.handler_lines import OFF
from flowkit.core.log import LEVELS
from flowkit.limits import BATCH_UID_CHARS, ID_CHARS, ROLE
from flowkit.masks import HIDDEN
from flowkit.models import COORDINATOR_FN, RESERVED_TYPES
from flowkit.protocol.messages import FINAL_UID
from flowkit.text import kind_of, suggestion, truncate

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

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


# --- what the value of a field must be ----------------------------------------------------------------------------

Wrong = tuple[str, object, str]
"""Where in the value of a field something is wrong, what stands there (HIDDEN for a secret), and what it must be."""


@dataclass(frozen=True, slots=True)
class Must:
    """What the value of a field must be: metadata of its `Annotated` type, which says whether it may be None."""

    good: Callable[[Any], object]
    """Decides whether a value is that."""
    be: str
    """What it must be, for the end of an error."""
    hides: Callable[[Any], bool] = lambda _: False
    """Decides whether an error must hide a value."""

    def find(self, value: Any) -> Iterator[Wrong]:
        """Yield what is wrong with a value."""
        if not self.good(value):
            yield "", HIDDEN if self.hides(value) else value, self.be


@dataclass(frozen=True, slots=True)
class OneOf(Must):
    """One of these words."""

    words: tuple[str, ...] = ()

    def find(self, value: Any) -> Iterator[Wrong]:
        """Yield a value that is none of them, with the word that was probably meant."""
        for where, found, wanted in Must.find(self, value):
            yield where, found, f"{wanted}{suggestion(found, self.words)}"


@dataclass(frozen=True, slots=True)
class Roles(Must):
    """A list of roles, each of them once."""

    def find(self, value: Any) -> Iterator[Wrong]:
        """Yield what is no list, and what is no role, or is in it twice."""
        yield from (wrong := list(Must.find(self, value)))
        for index, role in enumerate([] if wrong else value):
            if not is_role(role):
                yield f"[{index}]", role, _role_wanted(role)
            elif role in value[:index]:
                yield f"[{index}]", role, "a role that is not in the list yet"


@dataclass(frozen=True, slots=True)
class ByRole(Must):
    """A mapping of role to value."""

    alone: bool = False
    """Whether one value for all roles is good, too."""
    others: tuple[str, ...] = ()
    """Names of what is no role, and may have a value."""

    def find(self, value: Any) -> Iterator[Wrong]:
        """Yield what is neither a mapping nor a good value, and each key and value of a mapping that is not good."""
        if isinstance(value, dict):
            for role, given in value.items():
                if not is_role(role) and role not in self.others:
                    yield "'s key", role, _role_wanted(role)
                elif not self.good(given):
                    yield f"[{role!r}]", given, self.be
        elif not self.alone:
            yield "", value, f"a mapping of role to {self.be}, like {{'extract': 4}}"
        elif not self.good(value):
            yield "", value, f"{self.be}, or a mapping of role to one"


def is_one_of(value: object, words: Collection[str]) -> bool:
    """Return whether `value` is one of these words."""
    return isinstance(value, str) and value in words


def seconds(least: float = SHORTEST_SEC) -> Must:
    """Return the rule for a time in seconds, possibly a fraction, of at most one year."""
    return Must(partial(is_seconds, least=least), f"a number of seconds between {least:g} and {YEAR_SEC}")


def whole(least: int, most: int | None = None) -> Must:
    """Return the rule for an integer within the bounds; None means no upper bound."""
    bound = f"of at least {least}" if most is None else f"between {least} and {most}"
    return Must(partial(is_whole, least=least, most=most), f"a whole number {bound}")


def milliseconds(least: int) -> Must:
    """Return the rule for a time in whole milliseconds, of at most one year."""
    return whole(least, YEAR_SEC * 1000)


def one_of(*words: str) -> OneOf:
    """Return the rule for one of these words."""
    return OneOf(partial(is_one_of, words=words), f"one of {', '.join(map(repr, words))}", words=words)


def _is_log_level(value: object) -> bool:
    return isinstance(value, str) and value.upper() in _LOG_LEVELS


def _is_name(value: object) -> bool:
    return (
        isinstance(value, str)
        and 1 <= len(value) <= ID_CHARS
        and value.isprintable()
        and not has_blank_end(value)
        and not value.startswith("/_sys/")
    )


def _is_path(value: object) -> bool:
    return isinstance(value, str) and value.strip() != "" and "\0" not in value


def _is_page_address(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _URL_CHARS and _URL.fullmatch(value) is not None


def _are_brokers(value: object) -> bool:
    return isinstance(value, str) and all(_BROKER.fullmatch(each.strip()) for each in value.split(","))


def _may_have_user(value: object) -> bool:
    return not isinstance(value, str) or "@" in value


def _is_topic(value: object) -> bool:
    return isinstance(value, str) and _TOPIC.fullmatch(value) is not None and value not in (".", "..")


def _is_topic_format(value: object) -> bool:
    return isinstance(value, str) and value.count("{type}") == 1 and _is_topic(value.replace("{type}", "r"))


def _role_wanted(given: object) -> str:
    """Return what a role must be in place of `given`, which is none."""
    if isinstance(given, str) and given in RESERVED_TYPES:
        return "another name, because the engine reserves this one for its own nodes"
    return "a role: a letter or digit, then at most 99 of letters, digits and . _ -"


_LOG_LEVELS: Final = (*LEVELS, OFF)
_BROKER: Final = re.compile(r"([^\s:,/@\[\]]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_URL_CHARS: Final = 500
_URL: Final = re.compile(r"https?://[A-Za-z0-9._:\[\]-]+(/[A-Za-z0-9._~%/-]*)?")

MEBIBYTES: Final = Must(lambda value: is_number(value) and value > 0, "a number of MiB above 0")
SWITCH: Final = Must(lambda value: isinstance(value, bool), "true or false")
NAME: Final = Must(
    _is_name, f"a string of 1 to {ID_CHARS} printable characters without leading or trailing spaces"
)
"""The name of a queue, a worker or a version."""
PASSWORD: Final = Must(is_text, "a text of at least one character", hides=lambda _: True)
PATH: Final = Must(_is_path, "the path of a file")
"""The path of a file. Whether the file exists is checked when it is used."""
PAGE_ADDRESS: Final = Must(
    _is_page_address,
    "a URL without a user, a query or a fragment, such as https://flowkit.example.com/page",
    hides=_may_have_user,
)
"""The address of a web page. It contains no password: everybody sees the links that use it."""
REPLICAS: Final = Must(
    lambda value: is_whole(value, 1, 32_767) or is_whole(value, -1, -1),
    "a whole number between 1 and 32767, or -1 for the default of the broker",
)
BROKERS: Final = Must(
    _are_brokers,
    "brokers as host:port, with commas between them and without a user",
    hides=_may_have_user,
)
TOPIC: Final = Must(_is_topic, "a Kafka topic: at most 249 of letters, digits and . _ -")
TOPIC_FORMAT: Final = Must(
    _is_topic_format, "a Kafka topic with {type} in place of the role, like 'cmd.{type}.v1'"
)
ROLES: Final = Roles(
    lambda value: isinstance(value, (list, tuple)), "a list of roles, like ['extract', 'count']"
)
SOME_ROLES: Final = Roles(
    lambda value: isinstance(value, (list, tuple)) and value,
    "a list of at least one role, like ['extract', 'count']",
)
SLOTS: Final = whole(1, 10_000)
SLOTS_BY_ROLE: Final = ByRole(SLOTS.good, SLOTS.be)
SLOTS_PER_ROLE: Final = ByRole(SLOTS.good, SLOTS.be, alone=True)
"""One number for each role, or numbers by role."""
LOG_LEVEL: Final = ByRole(
    _is_log_level, f"one of {', '.join(_LOG_LEVELS)}", alone=True, others=(COORDINATOR_FN,)
)
