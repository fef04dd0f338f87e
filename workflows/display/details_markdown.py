"""Render the Markdown that Temporal's Web UI shows as a run's current details. Pure.

The Web UI shows about eight lines without scrolling, so the most important information comes first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from flowkit.models import NodeStatus, TaskStatus
from flowkit.temporal_names import role_queue
from flowkit.text import shorten, visible
from flowkit.workflows.budget import longest_prefix
from flowkit.workflows.display.details import Notes, SlotLimits
from flowkit.workflows.display.reports import DISPLAY_ORDER

if TYPE_CHECKING:
    from collections.abc import Collection

    from flowkit.models import Node
    from flowkit.workflows.scheduling.scheduler import Scheduler

ROWS = 40
"""Largest number of nodes in the table."""

BYTES = 20_000
"""Largest size of the current details that Temporal keeps."""

_LAST_LINE_BYTES = 100
"""Bytes reserved for the last line, which shows how many nodes the table omits."""

_RANK = {status: position for position, status in enumerate(DISPLAY_ORDER)}
_TABLE_HEADER = ("| node | role | status | attempt | note |", "|:---|:---|:---|:---:|:---|")
_LINE_BREAK = "  \n"  # in Markdown
_EMPTY_LINE = "\N{NO-BREAK SPACE}"
"""The Web UI cuts off the lower half of the last line."""

_NAME_CHARS = 60
_NOTE_CHARS = 80
_NOTES_CHARS = 1_200
"""Characters for all notes of a small graph together. Each note may always have `_NOTE_CHARS`."""

_REASON_CHARS = 200
_ROLES = 6
"""Largest number of links to task queues."""

_MARKDOWN = re.compile(r"[\\`*\[\]<>|~&]|(?<!\w)_|_(?!\w)|:(?=//)|(?<=www)\.", re.IGNORECASE)
"""Characters that format text or make an address a link. An underscore within a word does not."""

_URL_SAFE = re.compile(r"[A-Za-z0-9_.-]+")
_DEFAULT_LIMITS = SlotLimits()


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskQueues:
    """The namespace of a task and the prefix of the task queues that run its attempts."""

    namespace: str
    prefix: str


def render(
    status: TaskStatus,
    scheduler: Scheduler,
    queues: TaskQueues,
    reason: str | None = None,
    limits: SlotLimits = _DEFAULT_LIMITS,
    now: float = 0.0,
    silent_nodes: Collection[str] = (),
) -> str:
    """Return Markdown with node counts, links to the task queues of running nodes, and a table of nodes."""
    shown = sorted(scheduler.nodes, key=lambda node: _RANK[scheduler.states[node.index].status])[:ROWS]
    note_chars = max(_NOTE_CHARS, _NOTES_CHARS // len(shown))
    heading = _LINE_BREAK.join([_heading(status, scheduler, reason), *_queue_links(scheduler, shown, queues)])
    above_rows = [heading, "", *_TABLE_HEADER]
    notes = Notes(scheduler, limits, now, silent_nodes)
    all_rows = (_row(notes, node, note_chars) for node in shown)
    rows = longest_prefix(all_rows, _line_bytes, BYTES - _LAST_LINE_BYTES - sum(map(_line_bytes, above_rows)))
    hidden = len(scheduler.nodes) - len(rows)
    last = f"… and {hidden:,} more nodes; the query `status` has them all" if hidden else _EMPTY_LINE
    return "\n".join([*above_rows, *rows, "", last])


@lru_cache(maxsize=4096)
def _line_bytes(line: str) -> int:
    return len(line.encode("utf-8", "replace")) + 1


def _heading(status: TaskStatus, scheduler: Scheduler, reason: str | None) -> str:
    counts, total = scheduler.counts(), len(scheduler.nodes)
    parts = ", ".join(f"{counts[kind]} {kind.value}" for kind in DISPLAY_ORDER if counts[kind])
    why = f" ({_cell(reason, _REASON_CHARS)})" if reason else ""
    return f"Task **{status.value}**{why}: {parts}, of {total:,} node{'' if total == 1 else 's'}"


def _queue_links(scheduler: Scheduler, shown: list[Node], queues: TaskQueues) -> list[str]:
    """Link to the task queues of running roles. Only these pages show whether a worker has taken an attempt."""
    running = (node for node in shown if scheduler.states[node.index].status is NodeStatus.RUNNING)
    roles = list(dict.fromkeys(node.type for node in running if not node.is_function))
    if not roles:
        return []
    links = [_link(role, queues) for role in roles[:_ROLES]]
    more = [f"{len(roles) - _ROLES} more"] if len(roles) > _ROLES else []
    owner = "its role" if len(roles) == 1 else "its roles"
    return [f"A running node may still wait for a worker. Workers of {owner}: {', '.join([*links, *more])}"]


@lru_cache(maxsize=1024)
def _link(role: str, queues: TaskQueues) -> str:
    """Link to the page of the role's task queue, relative to the root of the Web UI."""
    queue = role_queue(queues.prefix, role)
    if all(_URL_SAFE.fullmatch(part) for part in (queues.namespace, queue)):
        return f"[{role}](namespaces/{queues.namespace}/task-queues/{queue})"
    return _cell(f"{role}, queue {queue}", _NAME_CHARS)


def _row(notes: Notes, node: Node, note_chars: int) -> str:
    state, label = notes.scheduler.states[node.index], node.io.fn if node.is_function else node.type
    return _cells(node.node_id, label, state.status.value, state.epoch, notes.of(node), note_chars)


@lru_cache(maxsize=4096)
def _cells(node_id: str, label: str, status: str, epoch: int, note: str, note_chars: int) -> str:
    """Return one row. Cached because usually only one or two rows change between two updates."""
    attempt = str(epoch) if epoch else ""
    names = (_cell(node_id, _NAME_CHARS), _cell(label, _NAME_CHARS), status)
    return "| " + " | ".join([*names, attempt, _cell(note, note_chars)]) + " |"


def _cell(text: str, max_chars: int) -> str:
    """Return a text of a user or a worker on one line, cut and escaped: it adds no link, image, HTML or column."""
    return _MARKDOWN.sub(r"\\\g<0>", shorten(visible(text), max_chars))
