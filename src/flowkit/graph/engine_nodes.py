"""Parse and check nodes of the types `approval` and `delay`, which the workflow runs itself. Pure.

An approval waits until a person decides; a delay waits for a time. Neither has attempts, so they take no other input
than their settings in `io.input_inline`. docs/graphs/branches.md defines both.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flowkit import limits
from flowkit.graph.expressions import is_expression
from flowkit.graph.kinds import SECONDS, Field, ValueKind, by_name, field_problems
from flowkit.models import APPROVAL, APPROVE, DELAY, ENGINE_NODES, REJECT, Approval, Delay
from flowkit.text import clean, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DECISIONS = (APPROVE, REJECT)

_OF_ATTEMPTS = ("retry_policy", "timeout_sec")
_INSTEAD = {"timeout_sec": "deadline_sec"}


def engine_node_problems(node: Mapping[str, Any]) -> Iterator[str]:
    """Yield what an approval or a delay cannot have. Yield nothing for another node."""
    kind = node.get("type")
    if not isinstance(kind, str) or kind not in ENGINE_NODES:
        return
    for key in _OF_ATTEMPTS:
        if node.get(key) is not None:
            hint = f"set {_INSTEAD[key]!r} instead" if key in _INSTEAD else "remove it"
            yield f"{key} has no meaning in a node of the type {kind!r}, which has no attempts; {hint}"
    io = node.get("io") or {}
    if isinstance(io, dict):
        yield from _io_problems(kind, io)


def _io_problems(kind: str, io: Mapping[str, Any]) -> Iterator[str]:
    for key, value in io.items():
        if value is not None and key != "input_inline" and not str(key).startswith("x-"):
            yield f"io.{key} has no meaning in a node of the type {kind!r}, which takes only io.input_inline; remove it"
    inline = io.get("input_inline")
    if isinstance(inline, dict | None):
        yield from _settings_problems(kind, inline or {})


def _settings_problems(kind: str, inline: Mapping[str, Any]) -> Iterator[str]:
    own = [*SETTINGS[kind]]
    given = {key: value for key, value in inline.items() if value is not None}
    for key, value in given.items():
        place = f"io.input_inline.{key}"
        if key in own and is_expression(value):
            yield f"{place} must not be an expression in a node of the type {kind!r}; write the value"
        elif key in own:
            yield from field_problems(SETTINGS[kind][key], value, "io.input_inline.")
        elif not str(key).startswith("x-"):
            known = f"a node of the type {kind!r} takes {own[0]!r} and {own[1]!r}"
            yield f"{place} is unknown; {did_you_mean(key, own, otherwise=known)}"
    if kind == DELAY and len(given.keys() & {*own}) != 1:
        yield "io.input_inline must have either 'sec', a number of seconds, or 'until', a moment"


def _is_moment(value: object) -> bool:
    return isinstance(value, str) and _parse_moment(value) is not None


_TEXT = ValueKind(
    schema={"type": "string", "maxLength": limits.APPROVAL_TEXT_CHARS},
    fits=lambda value: isinstance(value, str) and len(value) <= limits.APPROVAL_TEXT_CHARS,
    must=f"a text of at most {limits.APPROVAL_TEXT_CHARS:,} characters",
)
_DECISION = ValueKind(
    schema={"enum": [*DECISIONS, None]},
    fits=lambda value: value in DECISIONS,
    must=f"{APPROVE!r} or {REJECT!r}",
)
_MOMENT = ValueKind(
    schema={"type": "string", "format": "date-time"},
    fits=_is_moment,
    must="a moment in ISO 8601 with its time zone, such as '2026-01-31T06:00:00+01:00'",
)
SETTINGS: Mapping[str, Mapping[str, Field]] = {
    APPROVAL: by_name(
        Field("text", _TEXT, "what to decide"),
        Field("default", _DECISION, "what applies when deadline_sec passes", nullable=False),
    ),
    DELAY: by_name(
        Field("sec", SECONDS, "how long to wait, in seconds"),
        Field("until", _MOMENT, "until when to wait, in ISO 8601 with the time zone"),
    ),
}
"""The fields of `io.input_inline` by the type of the node."""


def _parse_moment(text: str) -> float | None:
    """Return the Unix timestamp of a moment; None if the text is none, or names no time zone."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.astimezone(UTC).timestamp() if moment.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def read_approval(node: Mapping[str, Any]) -> Approval | None:
    """Return what a valid node waits for, or None if it is no approval."""
    if node["type"] != APPROVAL:
        return None
    given = (node.get("io") or {}).get("input_inline") or {}
    return Approval(text=clean(given.get("text") or ""), default=given.get("default") or REJECT)


def read_delay(node: Mapping[str, Any]) -> Delay | None:
    """Return how long a valid node waits, or None if it is no delay."""
    if node["type"] != DELAY:
        return None
    given = (node.get("io") or {}).get("input_inline") or {}
    until = given.get("until")
    return Delay(sec=given.get("sec"), until=None if until is None else _parse_moment(until))
