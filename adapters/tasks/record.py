"""Writes to the task document for state transitions that only the workflow knows.

One update contains the transitions of many nodes. If one of these nodes has changed meanwhile, the update does not
match. FlowKit then reads the document and writes only the transitions that are still missing.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from pymongo import UpdateOne

from flowkit.adapters.mongo import fits
from flowkit.adapters.tasks import fields as task_fields
from flowkit.adapters.tasks import liveness
from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.models import NodeRecord, RecordTask

Fields = dict[str, Any]
T = TypeVar("T")

NODES_OF_ONE_UPDATE = 100

_logger = logging.getLogger("flowkit.store")


class Recording:
    """Writes transitions to the collection `tasks`."""

    def __init__(self, tasks: Any) -> None:
        self._tasks = tasks

    async def write(self, record: RecordTask) -> None:
        """Write the transitions that the document lacks.

        If they exceed MongoDB's limit of 16 MB, leave out the errors. If they still exceed it, leave them to the close.
        """
        if await fits(self._write(record)):
            return
        lean = replace(record, nodes=[replace(node, last_error=None) for node in record.nodes])
        if not await fits(self._write(lean)):
            _logger.warning("task %s: its document is too large to update its nodes", record.task_id)

    async def _write(self, record: RecordTask) -> None:
        waiting = sorted(record.nodes, key=lambda node: node.status is not NodeStatus.FAILED)
        fields = task_fields.task_fields(record) | liveness.shown_silent(record)
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
        """Return the nodes that the document lacks; None if the task has ended or belongs to a newer run."""
        stored = await self._tasks.find_one(task_fields.task_filter(record), task_fields.NODE_STATES)
        if stored is None:
            return None
        return [node for node in nodes if task_fields.may_follow(node, task_fields.nodes_of(stored))]

    async def _one_by_one(self, record: RecordTask, nodes: Sequence[NodeRecord], fields: Fields) -> None:
        """Write each node with a filter of its own, because nodes keep changing between the read and the write."""
        single = [UpdateOne(*_update(record, [], fields))] if fields else []
        single += [UpdateOne(*_update(record, [node], {})) for node in nodes]
        await self._tasks.bulk_write(single, ordered=True)


def _update(record: RecordTask, nodes: Sequence[NodeRecord], fields: Fields) -> tuple[Fields, Fields]:
    removed = liveness.heard_again(record) if fields else {}
    condition = task_fields.task_filter(record)
    for node in nodes:
        condition |= task_fields.node_filter(node)
        own_flag = liveness.own_flag(node, record.run_id)
        fields = fields | task_fields.node_fields(node, record.at) | own_flag
    return condition, {"$set": fields, **({"$unset": removed} if removed else {})}


def chunks(nodes: Sequence[T], size: int) -> list[Sequence[T]]:
    """Split `nodes` into chunks of at most `size`."""
    return [nodes[start : start + size] for start in range(0, len(nodes), size)]
