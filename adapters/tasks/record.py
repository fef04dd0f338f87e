"""Writes to the task document for state transitions that only the workflow knows.

One update contains the transitions of many nodes. If one of these nodes has changed meanwhile, the update does not
match. FlowKit then reads the document and writes only the transitions that are still missing.

A workflow has one record written at a time. One that was given up and arrives late is older than what the
document shows, and changes nothing.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pymongo import UpdateOne

from flowkit.adapters.entries import utc
from flowkit.adapters.mongo import fits, moment, with_room
from flowkit.adapters.tasks.cancel_flags import set_of_node_flag, set_of_task_flag
from flowkit.adapters.tasks.fields import (
    ATTEMPT_ENDED_AT,
    NODE_STATES,
    PAUSED,
    PAUSED_SCOPES,
    RECORDED_AT,
    SATISFIED,
    history,
    nodes_of,
)
from flowkit.adapters.tasks.room import make_room
from flowkit.limits import APPLIED_ACTIONS
from flowkit.models import OPEN_NODE_STATUSES, NodeStatus, waits
from flowkit.models.actions import AppliedAction

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flowkit.core.utils import Fields
    from flowkit.models import CloseTask, NodeRecord, RecordTask
    from flowkit.models.actions import ActionRecord

T = TypeVar("T")

NODES_OF_ONE_UPDATE = 100

ACTIONS, REVISION = "coordinator.actions", "coordinator.revision"

SILENT = "silent"
"""The `liveness` of a task, and of its nodes, whose attempts send no heartbeats."""

_WITHOUT_END = (NodeStatus.RUNNING, NodeStatus.CANCELLING, NodeStatus.FINISHED)
"""Statuses of nodes whose attempts run, or have ended as their nodes did."""

_logger = logging.getLogger("flowkit.store")


class Recording:
    """Writes transitions to the collection `tasks`."""

    def __init__(self, tasks: Any) -> None:
        self._tasks = tasks
        self._finished: dict[int, NodeRecord] = {}

    async def write(self, record: RecordTask) -> list[NodeRecord]:
        """Write the transitions and actions that the document lacks.

        Return the open nodes of the record that an attempt has finished, with its epoch: its worker was lost before it
        could report the end.

        If they exceed MongoDB's limit of 16 MB, cut the errors of the document, then leave out the new ones. If they
        still exceed it, leave them to the close.
        """
        if names := record.actions.satisfied:
            satisfied = {"$addToSet": {SATISFIED: {"$each": names}}}
            await fits(self._tasks.update_one(_task_filter(record), satisfied))
        if record.actions.applied and not await fits(self._add_actions(record)):
            _logger.warning("task %s: its document is too large to list the latest actions", record.task_id)
        room = partial(make_room, self._tasks, record.task_id)
        if not await fits(with_room(partial(self._write, record), room)):
            lean = replace(record, nodes=[replace(node, last_error=None) for node in record.nodes])
            if not await fits(self._write(lean)):
                _logger.warning("task %s: its document is too large to update its nodes", record.task_id)
        return [*self._finished.values()]

    async def _add_actions(self, record: RecordTask) -> None:
        """Add the new actions to the list of the document. A repetition of the record adds nothing."""
        new = record.actions.applied
        lacks = {**_task_filter(record), REVISION: {"$not": {"$gte": new[0].revision}}}
        added = {
            "$push": {ACTIONS: {"$each": list_actions(new), "$slice": -APPLIED_ACTIONS}},
            "$set": {REVISION: new[-1].revision},
        }
        while True:
            done = await self._tasks.update_one(lacks, added)
            if done.matched_count or await self._correct_actions(record):
                return

    async def _correct_actions(self, record: RecordTask) -> bool:
        """Replace actions of a history that a *Reset* has discarded. Others have their revisions since.

        Return False if the list has changed meanwhile.
        """
        stored = await self._tasks.find_one(_task_filter(record), {"_id": 0, ACTIONS: 1, REVISION: 1})
        if stored is None:
            return True
        known, new = read_actions(stored), record.actions.applied
        kept = [each for each in known if each.revision < new[0].revision]
        if {*map(_identify, new)} <= {*map(_identify, known)} or (
            known and known[0].revision > new[-1].revision
        ):
            return True
        entries = list_actions([*kept, *new])[-APPLIED_ACTIONS:]
        own = {**_task_filter(record), REVISION: (stored.get("coordinator") or {}).get("revision")}
        done = await self._tasks.update_one(own, {"$set": {ACTIONS: entries, REVISION: new[-1].revision}})
        return bool(done.matched_count)

    async def _write(self, record: RecordTask) -> None:
        waiting = sorted(record.nodes, key=lambda node: node.status is not NodeStatus.FAILED)
        fields = _task_fields(record) | _set_of_silence(record)
        while waiting or fields:
            some = waiting[:NODES_OF_ONE_UPDATE]
            if not await self._together(record, some, fields):
                missing = await self._missing(record, waiting)
                if missing is None:
                    return
                if len(missing) < len(waiting):
                    waiting = missing
                    continue
                await self._one_by_one(record, some, fields)
            waiting, fields = waiting[NODES_OF_ONE_UPDATE:], {}

    async def _together(self, record: RecordTask, nodes: Sequence[NodeRecord], fields: Fields) -> bool:
        done = await self._tasks.update_one(*_update(record, nodes, fields))
        return bool(done.matched_count)

    async def _missing(self, record: RecordTask, nodes: Sequence[NodeRecord]) -> list[NodeRecord] | None:
        """Return the nodes that the document lacks; None if the task has ended, or has a newer run or record."""
        stored = await self._tasks.find_one(_task_filter(record), {**NODE_STATES, "graph.nodes.run_id": 1})
        if stored is None:
            return None
        known = nodes_of(stored)
        found = (_finished_by_attempt(node, known, record.run_id) for node in nodes)
        self._finished |= {node.index: node for node in found if node is not None}
        return [node for node in nodes if _may_follow(node, known)]

    async def _one_by_one(self, record: RecordTask, nodes: Sequence[NodeRecord], fields: Fields) -> None:
        """Write each node with a filter of its own, because nodes keep changing between the read and the write."""
        single = [UpdateOne(*_update(record, [], fields))] if fields else []
        single += [UpdateOne(*_update(record, [node], {})) for node in nodes]
        await self._tasks.bulk_write(single, ordered=True)


def _task_filter(record: RecordTask) -> Fields:
    """Return the filter of a record: the task is open, no newer run has opened it, and it has no newer record."""
    return {
        "id": record.task_id,
        "run_seq": {"$lte": record.run_seq},
        "finished_at": None,
        RECORDED_AT: {"$not": {"$gt": moment(record.at)}},
    }


def _task_fields(record: RecordTask) -> Fields:
    """Return the `$set` of a task's own fields during its run."""
    fields: Fields = {
        "status": record.status.value,
        "status_history": history(record.status_history),
        "updated_at": moment(record.at),
        RECORDED_AT: moment(record.at),
        **omitted_changes(record),
    }
    if record.actions.revision:
        fields[PAUSED_SCOPES] = list_paused(record.actions)
    if record.reason is not None:
        fields["reason"] = record.reason
    if record.cancel_reason is not None:
        fields |= set_of_task_flag(record.cancel_reason, record.at, record.run_id)
    return fields


def list_paused(record: ActionRecord) -> list[Fields]:
    """Return the paused scopes as the document lists them."""
    return [
        {
            "scope": each.scope,
            "since": moment(each.since),
            "by": each.by,
            "reason": each.reason,
            "drained": each.scope in record.drained,
        }
        for each in record.paused
    ]


def list_actions(applied: Iterable[AppliedAction]) -> list[Fields]:
    """Return applied actions as the document lists them."""
    return [
        {
            "revision": each.revision,
            "action": each.action,
            "at": moment(each.at),
            "by": each.by,
            "reason": each.reason,
            "what": each.what,
            "names": each.names,
            "affected": each.affected,
        }
        for each in applied
    ]


def _identify(action: AppliedAction) -> tuple[int, str]:
    """Return what distinguishes an action from one of a discarded history: its revision, and its time in
    milliseconds.
    """
    return action.revision, moment(action.at).isoformat(timespec="milliseconds")


def read_actions(stored: Fields) -> list[AppliedAction]:
    """Return the applied actions that a document lists. Leave out what another program has written."""
    listed = (stored.get("coordinator") or {}).get("actions")
    return [
        AppliedAction(
            **{name: value for name, value in each.items() if name != "at"}, at=utc(each["at"]).timestamp()
        )
        for each in (listed if isinstance(listed, list) else ())
    ]


def omitted_changes(record: RecordTask | CloseTask) -> Fields:
    """Return the field with the number of entries omitted from `status_history`; `{}` if none are omitted."""
    count = record.status_history_omitted
    return {"status_history_omitted": count} if count else {}


def _set_of_silence(record: RecordTask) -> Fields:
    """Return the `$set` of the fields that show silent nodes, or that none is silent any more."""
    if record.silent:
        suspected: Fields = {
            "state": "suspected",
            "suspected_at": moment(record.at),
            "silent_nodes": [*record.silent.values()],
        }
        nodes = {f"graph.nodes.{index}.liveness": SILENT for index in record.silent}
        return {"liveness": SILENT, "coordinator.liveness": suspected, **nodes}
    if not record.heard:
        return {}
    return {"coordinator.liveness": {"state": "ok"}}


def _unset_of_silence(record: RecordTask) -> Fields:
    """Return the `$unset` for nodes that are no longer silent."""
    gone = {} if record.silent or not record.heard else {"liveness": ""}
    return gone | {f"graph.nodes.{index}.liveness": "" for index in record.heard}


def _update(record: RecordTask, nodes: Sequence[NodeRecord], fields: Fields) -> tuple[Fields, Fields]:
    removed = (_unset_of_silence(record) if fields else {}) | unset_of_decisions(nodes)
    condition = _task_filter(record)
    for node in nodes:
        condition |= _node_filter(node)
        fields = fields | node_fields(node, record.at, record.run_id)
    return condition, update_of(fields, removed, nodes, record.at)


def update_of(fields: Fields, removed: Fields, nodes: Sequence[NodeRecord], at: float) -> Fields:
    """Return the update that sets and removes fields, and notes the ends of the attempts of these nodes."""
    kept = _ends_of_attempts(nodes, at)
    return {
        "$set": fields,
        **({"$unset": removed} if removed else {}),
        **({"$min": kept} if kept else {}),
    }


def _node_filter(node: NodeRecord) -> Fields:
    """Return the filter for a transition of the workflow: the node is open and has no later epoch.

    A node whose parents failed later fails although its attempt has finished it.
    """
    path = f"graph.nodes.{node.index}"
    return {
        f"{path}.node_id": node.node_id,
        f"{path}.attempt_epoch": {"$lte": node.epoch},
        f"{path}.status": {"$in": _statuses_before(node)},
    }


def _statuses_before(node: NodeRecord) -> list[str]:
    return [*OPEN_NODE_STATUSES, NodeStatus.FINISHED.value] if node.after_finish else OPEN_NODE_STATUSES


def _may_follow(node: NodeRecord, stored_nodes: list[Fields]) -> bool:
    """Return True if the nodes of a document meet the condition of `_node_filter`."""
    if node.index >= len(stored_nodes):
        return False
    stored = stored_nodes[node.index]
    known = stored.get("node_id") == node.node_id and stored.get("status") in _statuses_before(node)
    return known and stored.get("attempt_epoch", 0) <= node.epoch


def _finished_by_attempt(node: NodeRecord, stored_nodes: list[Fields], run_id: str) -> NodeRecord | None:
    """Return an open node with the epoch of the attempt that has finished it in this run of the task; None if none has.

    The workflow may have ordered a later attempt, which has not begun.
    """
    if node.status.ended or node.index >= len(stored_nodes):
        return None
    stored = stored_nodes[node.index]
    found = tuple(stored.get(name) for name in ("node_id", "status", "run_id"))
    epoch = stored.get("attempt_epoch", 0)
    finished = found == (node.node_id, NodeStatus.FINISHED.value, run_id) and 0 < epoch <= node.epoch
    return replace(node, epoch=epoch) if finished else None


def _ends_of_attempts(nodes: Sequence[NodeRecord], at: float) -> Fields:
    """Return the `$min` that notes when the latest attempts of nodes ended without finishing them.

    The first transition after the end of an attempt says it. Later ones, such as a decision, change nothing.
    """
    return {
        f"graph.nodes.{node.index}.{ATTEMPT_ENDED_AT}": moment(at)
        for node in nodes
        if node.epoch and node.status not in _WITHOUT_END
    }


def unset_of_decisions(nodes: Sequence[NodeRecord]) -> Fields:
    """Return the `$unset` for nodes that no longer wait for a decision or for prerequisites, or that are not paused."""
    names = (*waits.FIELDS, "held_until_ms")
    decided = (node.index for node in nodes if node.decided)
    continued = (node.index for node in nodes if node.paused is False)
    left = [
        *((index, name) for index in decided for name in names),
        *((index, PAUSED) for index in continued),
    ]
    return {f"graph.nodes.{index}.{name}": "" for index, name in left}


def node_fields(node: NodeRecord, at: float, run_id: str) -> Fields:
    """Return the `$set` of a transition that only the workflow knows."""
    path = f"graph.nodes.{node.index}"
    retry_ms = None if node.next_retry_at is None else int(node.next_retry_at * 1000)
    fields: Fields = {
        f"{path}.status": node.status.value,
        f"{path}.attempt_epoch": node.epoch,
        f"{path}.next_retry_at_ms": retry_ms,
    }
    if node.last_error is not None or node.status is NodeStatus.CANCELLED:
        fields[f"{path}.last_error"] = node.last_error
    if node.skip_reason is not None:
        fields[f"{path}.skip_reason"] = node.skip_reason.value
    if node.status.ended:
        fields[f"{path}.finished_at"] = moment(at)
    if node.wait is not None:
        fields |= {f"{path}.{name}": value for name, value in waits.stored_wait(node.wait).items()}
    if node.paused:
        fields[f"{path}.{PAUSED}"] = True
    if node.held_until is not None:
        fields[f"{path}.held_until_ms"] = int(node.held_until * 1000)
    if node.reason_code is not None:
        fields[f"{path}.reason_code"] = node.reason_code
    return fields | set_of_node_flag(node, at, run_id)


def chunks(nodes: Sequence[T], size: int) -> list[Sequence[T]]:
    """Split `nodes` into chunks of at most `size`."""
    return [nodes[start : start + size] for start in range(0, len(nodes), size)]
