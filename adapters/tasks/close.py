"""The final write to a task document. If the document becomes too large, FlowKit cuts bulky fields until it fits."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flowkit.adapters.mongo import fits, moment
from flowkit.adapters.tasks.cancel_flags import set_of_task_flag
from flowkit.adapters.tasks.fields import COUNTED, NODE_STATES, TRUNCATED, has_ended_since, history, nodes_of
from flowkit.adapters.tasks.record import (
    ACTIONS,
    NODES_OF_ONE_UPDATE,
    REVISION,
    chunks,
    list_actions,
    node_fields,
    omitted_changes,
    unset_of_decisions,
    update_of,
)
from flowkit.adapters.tasks.room import SHORT_ERROR_CHARS
from flowkit.core.instruments import NODES_CLOSED, TASKS_CLOSED, is_measured
from flowkit.errors import StoreTooLarge
from flowkit.models import NodeStatus, TaskStatus
from flowkit.text import truncate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from flowkit.core.utils import Fields
    from flowkit.models import CloseTask, NodeRecord


_REASON_CHARS = 200
_WITHOUT_ERROR = {NodeStatus.CANCELLED.value, NodeStatus.FINISHED.value}

_logger = logging.getLogger("flowkit.store")


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How much of its bulky fields a document keeps when it is closed. None keeps everything."""

    error_chars: int | None = None
    """Maximum length of each node's error."""
    changes: int | None = None
    """Maximum number of entries in `status_history`: the first entry, if there is space for two, and the last one."""
    stats: bool = True
    """Whether `result` includes the stats of the nodes."""
    nodes: bool = True
    """Whether `result` includes the nodes."""


_ROOMS = (
    Room(),
    Room(error_chars=SHORT_ERROR_CHARS),
    Room(error_chars=0, changes=2),
    Room(error_chars=0, changes=2, stats=False),
    Room(error_chars=0, changes=1, stats=False, nodes=False),
)


class Closing:
    """Writes the end of a task to the collection `tasks`."""

    def __init__(self, tasks: Any) -> None:
        self._tasks = tasks

    async def write(self, close: CloseTask) -> bool:
        """Write the end of a task and the transitions that its document lacks. Return False if there is no document.

        Do not change a document that a newer run has opened. Raise StoreTooLarge if even the smallest version is too
        large.
        """
        for room in _ROOMS:
            stored = await self._tasks.find_one({"id": close.task_id}, _projection(close, room))
            if stored is None:
                return False
            if await fits(self._write(close, nodes_of(stored), room)):
                if not _is_outdated(close, stored):
                    count_ended(close.status, _ends(close, stored))
                return True
            _logger.warning(
                "task %s: its document becomes too large when it is closed; FlowKit omits details",
                close.task_id,
            )
        raise StoreTooLarge(
            f"the document of task {close.task_id!r} is too large to close, even without the details "
            "that the engine writes: remove other data from it, for example from coordinator.vars"
        )

    async def _write(self, close: CloseTask, stored_nodes: list[Fields], room: Room) -> None:
        """Write the nodes first, many in one update. The last update ends the task."""
        own = {"id": close.task_id, "run_seq": {"$lte": close.run_seq}}
        changes = [*node_changes(close, stored_nodes, room)]
        *before, last = chunks(changes, NODES_OF_ONE_UPDATE) or [()]
        for some in before:
            done = await self._tasks.update_one(own, {"$set": _merged(some)})
            if not done.matched_count:
                return
        removed = unset_of_decisions(close.nodes)
        fields = end_fields(close, stored_nodes, room) | _merged(last)
        await self._tasks.update_one(own, update_of(fields, removed, close.nodes, close.at))


def _merged(changes: Any) -> Fields:
    return {path: value for fields in changes for path, value in fields.items()}


def _projection(close: CloseTask, room: Room) -> Fields:
    """Return the projection of the fields that the close needs. Stats and errors may be large and are rarely needed."""
    wanted = {**NODE_STATES, **counted_fields()}
    if close.status is TaskStatus.FINISHED and room.stats:
        wanted["graph.nodes.stats"] = 1
    if room.error_chars is not None:
        wanted["graph.nodes.last_error"] = 1
    return wanted


def counted_fields() -> Fields:
    """Return the projection of what the counts of ended tasks and nodes need beside the states of the nodes."""
    if not is_measured():
        return {}
    names = ("graph.nodes.type", "graph.nodes.reset_by", COUNTED, "run_seq", "closed_run_id", "finished_at")
    return dict.fromkeys(names, 1)


def _is_outdated(close: CloseTask, stored: Fields) -> bool:
    """Return whether a newer run has opened the document before, or an earlier try of this close has ended the task."""
    ended = stored.get("closed_run_id") == close.run_id and stored.get("finished_at") is not None
    return ended or (stored.get("run_seq") or 0) > close.run_seq


def _ends(close: CloseTask, stored: Fields) -> Iterator[tuple[str, str]]:
    """Yield role and status of each node that has ended since the latest rerun began, or at all."""
    ends = {index: status.value for status, indexes in close.unfinished.items() for index in indexes}
    ends |= {node.index: node.status.value for node in close.nodes}
    for index, node in enumerate(nodes_of(stored)):
        if has_ended_since(index, node, stored):
            yield node.get("type") or "", ends.get(index, NodeStatus.FINISHED.value)


def count_ended(status: TaskStatus, nodes: Iterable[tuple[str, str]]) -> None:
    """Count a task that has ended, and its nodes by role and status."""
    if is_measured():
        TASKS_CLOSED.add(status.value)
        for labels, count in Counter(nodes).items():
            NODES_CLOSED.add(*labels, amount=count)


def end_fields(close: CloseTask, stored_nodes: list[Fields], room: Room) -> Fields:
    """Return the `$set` of the task's own fields."""
    changes, omitted = _kept_changes(close, room)
    close = replace(close, status_history=changes, status_history_omitted=omitted)
    fields: Fields = {
        "status": close.status.value,
        "status_history": history(changes),
        "closed_run_id": close.run_id,
        "reason": close.reason,
        "finished_at": moment(close.at),
        "next_retry_at_ms": None,
        "updated_at": moment(close.at),
        **omitted_changes(close),
    }
    if close.applied and room == Room():
        fields |= {ACTIONS: list_actions(close.applied), REVISION: close.applied[-1].revision}
    if close.dead:
        fields["coordinator.liveness"] = {"state": "dead"}
    if close.status is TaskStatus.FINISHED:
        fields["result"] = result(close, stored_nodes if room.nodes else [])
    if close.status is TaskStatus.CANCELLED:
        fields |= set_of_task_flag(close.reason or "", close.at, close.run_id)
    if room.error_chars is not None and close.reason:
        fields["reason"] = truncate(close.reason, _REASON_CHARS)
    if close.handled_failures_omitted or room != Room():
        fields[TRUNCATED] = True
    return fields


def _kept_changes(close: CloseTask, room: Room) -> tuple[list[Any], int]:
    """Return the entries of `status_history` to write, and the number of omitted entries."""
    changes = close.status_history
    if room.changes is None or len(changes) <= room.changes:
        return changes, close.status_history_omitted
    kept = changes[:1][: room.changes - 1] + changes[-1:]
    return kept, close.status_history_omitted + len(changes) - len(kept)


def result(close: CloseTask, stored_nodes: list[Fields]) -> Fields:
    """Return the `result` of a finished task: each node's stats in graph order, and the tolerated failures."""
    nodes = [{"node_id": node["node_id"], "stats": node.get("stats") or {}} for node in stored_nodes]
    handled = {
        "handled_failures": close.handled_failures,
        "handled_failures_omitted": close.handled_failures_omitted,
        **({"failed_batches": close.failed_batches} if close.failed_batches else {}),
    }
    return {"nodes": nodes, **{name: value for name, value in handled.items() if value}}


def node_changes(close: CloseTask, stored_nodes: list[Fields], room: Room) -> Iterator[Fields]:
    """Yield the `$set` of each node that the document lacks or whose error is too long. The cuts come first."""
    if room.error_chars is not None:
        yield from _cut_errors(stored_nodes, room.error_chars)
    for node in close.nodes:
        if _differs(node, stored_nodes):
            known = _with_latest_epoch(node, stored_nodes)
            yield node_fields(_cut(known, room), close.at, close.run_id)
    yield from _missed_ends(close, stored_nodes)


def _cut_errors(stored_nodes: list[Fields], chars: int) -> Iterator[Fields]:
    for index, node in enumerate(stored_nodes):
        error = node.get("last_error")
        if isinstance(error, str) and len(error) > chars:
            yield {f"graph.nodes.{index}.last_error": truncate(error, chars) or None}


def _cut(node: NodeRecord, room: Room) -> NodeRecord:
    if room.error_chars is None or node.last_error is None:
        return node
    return replace(node, last_error=truncate(node.last_error, room.error_chars) or None)


def _with_latest_epoch(node: NodeRecord, stored_nodes: list[Fields]) -> NodeRecord:
    """Return the record with the epoch of the document if that is later.

    The workflow does not know the epoch of an inline attempt whose engine was killed in the same workflow task.
    """
    stored = stored_nodes[node.index].get("attempt_epoch") or 0
    return replace(node, epoch=stored) if stored > node.epoch else node


def _differs(node: NodeRecord, stored_nodes: list[Fields]) -> bool:
    if node.index >= len(stored_nodes):
        return False
    stored = stored_nodes[node.index]
    return (stored.get("status"), stored.get("attempt_epoch")) != (node.status.value, node.epoch)


def _missed_ends(close: CloseTask, stored_nodes: list[Fields]) -> Iterator[Fields]:
    """Yield the `$set` of each node without a record whose status in the document is not the one with which
    it ended.
    """
    recorded = {node.index for node in close.nodes}
    unfinished = {index: status for status, indexes in close.unfinished.items() for index in indexes}
    for index, node in enumerate(stored_nodes):
        status = unfinished.get(index, NodeStatus.FINISHED).value
        if index not in recorded and node.get("status") != status:
            path = f"graph.nodes.{index}"
            cleared = {f"{path}.last_error": None} if status in _WITHOUT_ERROR else {}
            yield {f"{path}.status": status, f"{path}.finished_at": moment(close.at), **cleared}
