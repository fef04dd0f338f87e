"""What people read about the nodes of a task: what each waits for, and what the task waits for."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from flowkit.models import DELAY, NodeStatus
from flowkit.text import count_of, format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.reading.state import NodeRow, TaskView

_ACTIVE = (NodeStatus.RUNNING, NodeStatus.CANCELLING)
"""Statuses in which the last error of a node is from an earlier attempt."""

_NAMED = 3
"""How many nodes `describe_waits` names."""


def describe_age(seconds: float | None, total_seconds: float | None, *, is_open: bool) -> str:
    """Return how long the latest run of a task took, or has been open; empty if that is unknown.

    If the task has run before, add the time since its creation.
    """
    if seconds is None:
        return ""
    lasted = f"{'for' if is_open else 'took'} {format_seconds(seconds)}"
    if total_seconds is None or total_seconds <= seconds:
        return lasted
    return f"latest run {lasted}; {format_seconds(total_seconds)} since it was created"


def format_seconds(seconds: float) -> str:
    """Return a duration with tenths of a second, and below a second with milliseconds."""
    return format_duration(round(seconds, 3 if seconds < 1 else 1))


def describe_waits(view: TaskView, hints: Sequence[str]) -> str:
    """Return what an open task does and waits for, in a paragraph. `hints` say which processes are missing."""
    begun = [node for node in view.nodes if NodeStatus(node.status).begun or _waits(node)]
    begun.sort(key=lambda node: (not node.awaits_decision, node.status in _ACTIVE and not node.waiting))
    sentences = [_describe_pause(paused) for paused in view.paused]
    sentences += [_describe_node(node) for node in begun[:_NAMED]]
    if (more := len(begun) - _NAMED) > 0:
        verbs = "runs or waits" if more == 1 else "run or wait"
        sentences.append(f"{count_of(more, 'more node')} {verbs}.")
    if not begun:
        sentences.append("No node runs, and none can start now.")
    return " ".join([*sentences, *(f"{hint[:1].upper()}{hint[1:]}." for hint in hints)])


def _describe_pause(paused: str) -> str:
    """Return a sentence about a paused scope, which stays as `flowkit resume` takes it."""
    return f"A pause holds nodes back: {paused}."


def _waits(node: NodeRow) -> bool:
    return node.status == NodeStatus.QUEUED and bool(node.waits_for)


def _describe_node(node: NodeRow) -> str:
    note = format_note(node) or (f"waits for {node.waits_for}" if node.waits_for else "")
    return f"Node {node.node_id} is {node.status}{f': {note}' if note else ''}."


def format_note(node: NodeRow) -> str:
    """Return what the node waits for, its last error, and the batches that it has set aside."""
    return "; ".join(filter(None, [_describe_state(node), node.set_aside_text]))


def _describe_state(node: NodeRow) -> str:
    if node.next_retry_at is not None:
        wait = format_duration(max(0, round(node.next_retry_at - time.time())))
        return f"{'ends' if node.role == DELAY else 'retry'} in {wait}" + (
            f": {node.note}" if node.note else ""
        )
    if node.status not in _ACTIVE and not node.waits_for:
        return node.note
    waits = ["no worker has started it yet"] if node.waiting else []
    for_other = [f"waits for {node.waits_for}"] if node.waits_for else []
    worker = [_format_worker(node)] if node.worker else []
    silent = ["sends no heartbeats"] if node.silent and node.heard_at is None else []
    before = [f"last attempt: {node.note}"] if node.note else []
    shards = [node.shards] if node.shards else []
    return "; ".join([*waits, *shards, *worker, *silent, *for_other, *before])


def _format_worker(node: NodeRow) -> str:
    """Return the worker of a node and, if it is silent, since when, and when another attempt replaces it."""
    name = f"external worker {node.worker}" if node.external else f"worker {node.worker}"
    if node.heard_at is None:
        return name
    since = datetime.fromtimestamp(node.heard_at, UTC).strftime("%H:%M:%S UTC")
    age = format_duration(max(0, round(time.time() - node.heard_at)))
    silence = f"silent since {since} ({age})"
    if node.lost or node.replaced_at is None:
        return f"{name} is lost: {silence}; the next free worker replaces it"
    wait = format_duration(max(0, round(node.replaced_at - time.time())))
    return f"{name} is {silence}; replaced in {wait} unless it responds"
