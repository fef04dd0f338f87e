"""Rules for the values of settings. A rule yields a problem as: where it is, the value there, and what is allowed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from flowkit.core.handler_lines import OFF
from flowkit.core.log import LEVELS
from flowkit.errors import ConfigError
from flowkit.limits import ID_CHARS
from flowkit.models import COORDINATOR_FN, RESERVED_TYPES
from flowkit.text import suggestion, truncate
from flowkit.validation.values import SHORTEST_SEC, YEAR_SEC, is_number, is_role, is_seconds, is_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Problem = tuple[str, object, str]
    Rule = Callable[[Any], Iterator[Problem]]

MOST_SLOTS = 10_000
_LOG_LEVELS = (*LEVELS, OFF)

_SHOWN_CHARS = 80
_BROKER = re.compile(r"([^\s:,/@\[\]]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_URL_CHARS = 500
_URL = re.compile(r"https?://[A-Za-z0-9._:\[\]-]+(/[A-Za-z0-9._~%/-]*)?")
_A_ROLE = "a role: a letter or digit, then at most 99 of letters, digits and . _ -"


def check(owner: str, values: Mapping[str, Any], rules: Mapping[str, Rule], place: str = "") -> None:
    """Raise ConfigError for the first value that violates its rule. `place` names the source of the values."""
    for name, value in values.items():
        for where, found, wanted in rules[name](value) if name in rules else ():
            shown = truncate(repr(found), _SHOWN_CHARS)
            raise ConfigError(f"{place}{owner}.{name}{where} is {shown}; it must be {wanted}")


def seconds(least: float = SHORTEST_SEC) -> Rule:
    """Return a rule for a time in seconds, possibly a fraction, of at most one year."""
    return _make_rule(
        lambda value: is_seconds(value, least),
        f"a number of seconds between {least:g} and {YEAR_SEC}",
    )


def whole(least: int, most: int | None = None) -> Rule:
    """Return a rule for an integer within the bounds; None means no upper bound."""
    bound = f"of at least {least}" if most is None else f"between {least} and {most}"
    return _make_rule(lambda value: is_whole(value, least, most), f"a whole number {bound}")


def milliseconds(least: int) -> Rule:
    """Return a rule for a time in whole milliseconds, of at most one year."""
    return whole(least, YEAR_SEC * 1000)


def above_zero(unit: str) -> Rule:
    """Return a rule for a number above 0, possibly a fraction."""
    return _make_rule(lambda value: is_number(value) and value > 0, f"a number of {unit} above 0")


def switch() -> Rule:
    """Return a rule for a bool; 0 and 1 are not accepted."""
    return _make_rule(lambda value: isinstance(value, bool), "true or false")


def one_of(*words: str) -> Rule:
    """Return a rule for a value that must be one of `words`."""

    def rule(value: Any) -> Iterator[Problem]:
        if not isinstance(value, str) or value not in words:
            yield "", value, f"one of {', '.join(map(repr, words))}{suggestion(value, words)}"

    return rule


def text() -> Rule:
    """Return a rule for the name of a queue, a worker or a version."""
    return _make_rule(
        _is_name, f"a string of 1 to {ID_CHARS} printable characters without leading or trailing spaces"
    )


def web_address() -> Rule:
    """Return a rule for the address of a web page. It contains no password: everybody sees the links that use it."""
    wanted = "a URL without a user, a query or a fragment, such as https://flowkit.example.com/page"

    def rule(value: Any) -> Iterator[Problem]:
        if not isinstance(value, str) or len(value) > _URL_CHARS or not _URL.fullmatch(value):
            yield "", _Hidden() if "@" in str(value) else value, wanted

    return rule


def secret() -> Rule:
    """Return a rule for a password; errors do not show it."""

    def rule(value: Any) -> Iterator[Problem]:
        if not isinstance(value, str) or not value:
            yield "", _Hidden(), "a text of at least one character"

    return rule


def file() -> Rule:
    """Return a rule for the path of a file; whether the file exists is checked when it is used."""
    return _make_rule(
        lambda value: isinstance(value, str) and value.strip() != "" and "\0" not in value,
        "the path of a file",
    )


def replication() -> Rule:
    """Return a rule for a number of replicas, or -1 for the default of the broker."""
    return _make_rule(
        lambda value: is_whole(value, 1, 32_767) or (is_whole(value, -1, -1)),
        "a whole number between 1 and 32767, or -1 for the default of the broker",
    )


def optional(rule: Rule) -> Rule:
    """Return a rule that allows None and every value that `rule` allows."""

    def either(value: Any) -> Iterator[Problem]:
        if value is not None:
            for where, found, wanted in rule(value):
                yield where, found, f"none, or {wanted}"

    return either


def roles(least: int = 0) -> Rule:
    """Return a rule for a list of roles without duplicates."""

    def rule(value: Any) -> Iterator[Problem]:
        if not isinstance(value, (list, tuple)) or len(value) < least:
            yield (
                "",
                value,
                f"a list of {'at least one role' if least else 'roles'}, like ['extract', 'count']",
            )
            return
        for index, role in enumerate(value):
            if not is_role(role):
                yield f"[{index}]", role, _describe_role(role)
            elif role in value[:index]:
                yield f"[{index}]", role, "a role that is not in the list yet"

    return rule


def _describe_role(given: object) -> str:
    """Return what a role must be in place of `given`, which is none."""
    if isinstance(given, str) and given in RESERVED_TYPES:
        return "another name, because the engine reserves this one for its own nodes"
    return _A_ROLE


def per_role() -> Rule:
    """Return a rule for one count for all roles, or a mapping of role to count."""
    number = f"a whole number between 1 and {MOST_SLOTS}"

    def rule(value: Any) -> Iterator[Problem]:
        if not isinstance(value, dict):
            if not is_whole(value, 1, MOST_SLOTS):
                yield "", value, f"{number}, or a mapping of role to such a number"
            return
        yield from _find_bad_counts(value, number)

    return rule


def by_role() -> Rule:
    """Return a rule for a mapping of role to count."""
    number = f"a whole number between 1 and {MOST_SLOTS}"

    def rule(value: Any) -> Iterator[Problem]:
        if isinstance(value, dict):
            yield from _find_bad_counts(value, number)
        else:
            yield "", value, f"a mapping of role to {number}, like {{'extract': 4}}"

    return rule


def _find_bad_counts(counts: dict[Any, Any], number: str) -> Iterator[Problem]:
    for role, count in counts.items():
        if not is_role(role):
            yield "'s key", role, _describe_role(role)
        elif not is_whole(count, 1, MOST_SLOTS):
            yield f"[{role!r}]", count, number


def log_levels() -> Rule:
    """Return a rule for one level of log lines for all roles, or a mapping of role to level."""
    wanted = f"one of {', '.join(_LOG_LEVELS)}"

    def rule(value: Any) -> Iterator[Problem]:
        if not isinstance(value, dict):
            if not _is_log_level(value):
                yield "", value, f"{wanted}, or a mapping of role to one of them"
            return
        for role, level in value.items():
            if not (is_role(role) or role == COORDINATOR_FN):
                yield "'s key", role, _describe_role(role)
            elif not _is_log_level(level):
                yield f"[{role!r}]", level, wanted

    return rule


def _is_log_level(value: Any) -> bool:
    return isinstance(value, str) and value.upper() in _LOG_LEVELS


def brokers() -> Rule:
    """Return a rule for a comma-separated list of Kafka brokers. Errors do not show a user or a password."""

    def rule(value: Any) -> Iterator[Problem]:
        if not isinstance(value, str) or not all(
            _BROKER.fullmatch(each.strip()) for each in value.split(",")
        ):
            shown = _Hidden() if "@" in str(value) else value
            yield "", shown, "brokers as host:port, with commas between them and without a user"

    return rule


def topic() -> Rule:
    """Return a rule for the name of a Kafka topic."""
    return _make_rule(_is_topic, "a Kafka topic: at most 249 of letters, digits and . _ -")


def topic_format() -> Rule:
    """Return a rule for a Kafka topic with the placeholder `{type}` for the role."""
    return _make_rule(
        _is_topic_format, "a Kafka topic with {type} in place of the role, like 'cmd.{type}.v1'"
    )


class _Hidden:
    """Takes the place of a password in an error."""

    def __repr__(self) -> str:
        return "a hidden value"


def _make_rule(good: Callable[[Any], object], wanted: str) -> Rule:
    def rule(value: Any) -> Iterator[Problem]:
        if not good(value):
            yield "", value, wanted

    return rule


def _is_name(value: Any) -> bool:
    return (
        isinstance(value, str)
        and 1 <= len(value) <= ID_CHARS
        and value.isprintable()
        and value == value.strip()
        and not value.startswith("/_sys/")
    )


def _is_topic(value: Any) -> bool:
    return isinstance(value, str) and _TOPIC.fullmatch(value) is not None and value not in (".", "..")


def _is_topic_format(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    return value.count("{type}") == 1 and _is_topic(value.replace("{type}", "r"))
