"""Format and read the summaries of attempts and timers, which Temporal's Web UI shows beside their events. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from flowkit import reason_codes
from flowkit.text import format_duration, truncate, truncate_utf8

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flowkit.models import Node, NodeState, Slot

_SUMMARY_CHARS = 100
_SUMMARY_BYTES = 200
"""Temporal rejects longer summaries, which would fail the workflow task."""

_ID_CHARS = 60
_ID_BYTES = 120

_HELD, _DELAY = "held for a decision", "delay"


def next_attempt(node: Node, state: NodeState) -> str:
    """Return `retry 1 of 2` after a failure, and `next attempt` after an end that does not use the retry budget."""
    if state.free or not state.failures:
        return "next attempt"
    return f"retry {state.failures} of {node.retry_policy.max}"


def timer_summary(node: Node, state: NodeState, seconds: float) -> str:
    """Return the summary of the timer of a node that waits for `seconds`."""
    name, wait = _shorten_id(node.node_id), format_duration(seconds)
    if state.reason_code == reason_codes.YIELDED:
        return f"{name}: waits for a source node, at most {wait}"
    return fit_summary(
        f"{name}: {next_attempt(node, state)} in {wait}, after {state.reason_code or 'a failure'}"
    )


def hold_summary(node: Node, seconds: float) -> str:
    """Return the summary of the timer after which a held node fails."""
    return fit_summary(f"{_shorten_id(node.node_id)}: {_HELD}, at most {format_duration(seconds)}")


def delay_summary(node: Node, seconds: float) -> str:
    """Return the summary of the timer of a node of the type `delay`."""
    return fit_summary(f"{_shorten_id(node.node_id)}: {_DELAY} of {format_duration(seconds)}")


class TimerKind(StrEnum):
    """What a node waits for while a timer runs."""

    RETRY = "retry"
    """Its next attempt, or that of one of its shards."""
    HOLD = "hold"
    """The decision about its failure."""
    DELAY = "delay"
    """The end of a node of the type `delay`."""


def timer_name(node_id: str) -> str:
    """Return how the summaries of a node's timers begin, before the colon. Long ids may share it."""
    return fit_summary(_shorten_id(node_id))


def read_timer(summary: str, node_ids: Mapping[str, str]) -> tuple[str, TimerKind] | None:
    """Return the node of a timer, and what it waits for; None for a timer of no node. For display only.

    `node_ids` has the ids by `timer_name`.
    """
    name, colon, rest = summary.partition(": ")
    while colon:
        if name in node_ids:
            kinds = {_HELD: TimerKind.HOLD, _DELAY: TimerKind.DELAY}
            kind = next((kinds[text] for text in kinds if rest.startswith(text)), TimerKind.RETRY)
            return node_ids[name], kind
        more, colon, rest = rest.partition(": ")
        name = f"{name}: {more}"
    return None


def deadline_summary(limits: str, seconds: float) -> str:
    """Return the summary of the timer for a deadline. `limits` is the id of a node or a name for the task."""
    return fit_summary(f"deadline of {_shorten_id(limits)} in {format_duration(seconds)}")


def shard_timer_summary(node: Node, shard: int, code: str, after_sec: float) -> str:
    """Return the summary of the timer of a shard that waits for its retry."""
    name = _shorten_id(node.node_id)
    return fit_summary(f"{name}: retry of shard {shard} after {code}, in {format_duration(after_sec)}")


def attempt_summary(node: Node, state: NodeState, shard: int = 0) -> str:
    """Return the summary of an attempt: the node id, its shard, if any, and, after failures, the number of
    the retry.
    """
    of_shard = f", shard {shard}" if shard else ""
    if not state.failures:
        return fit_summary(node.node_id) if not shard else f"{_shorten_id(node.node_id)}{of_shard}"
    return f"{_shorten_id(node.node_id)}{of_shard}, retry {state.failures} of {node.retry_policy.max}"


def inline_summary(node: Node, state: NodeState) -> str:
    """Return the summary of an inline attempt, with its role: the type of its activity does not name it."""
    return fit_summary(f"{truncate_utf8(attempt_summary(node, state), _ID_BYTES)}, role {node.type}")


def conditions_summary(node_ids: Iterable[str]) -> str:
    """Return the summary of an evaluation of the conditions of nodes and of edges to them: `conditions of a, b`."""
    shown = list(dict.fromkeys(map(_shorten_id, node_ids)))
    return fit_summary(f"condition{'' if len(shown) == 1 else 's'} of {', '.join(shown)}")


def slots_summary(slots: Sequence[Slot]) -> str:
    """Return the summary of a call that asks for these slots: `slot: node a of role x, node b of role y`."""
    return fit_summary(
        "slot: " + ", ".join(f"node {_shorten_id(slot.node_id)} of role {slot.role}" for slot in slots)
    )


def free_summary(slots: Sequence[Slot], *, whole_task: bool) -> str:
    """Return the summary of a call that frees these slots, or all of them."""
    if whole_task:
        return "free all slots of the task"
    return fit_summary("free slot: " + ", ".join(f"node {_shorten_id(slot.node_id)}" for slot in slots))


def _shorten_id(node_id: str) -> str:
    return truncate_utf8(truncate(node_id, _ID_CHARS), _ID_BYTES)


def fit_summary(text: str) -> str:
    """Return `text` without unprintable characters, truncated to the size that Temporal accepts."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    return truncate_utf8(truncate(printable, _SUMMARY_CHARS), _SUMMARY_BYTES)
