"""Transitions that only the workflow knows, on their way into the task's document.

Many go together in one update. When a node of them has moved on meanwhile, the others are found by a look at the
document, so that a repetition writes only what is missing.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pymongo import UpdateOne

from flowkit.adapters import documents
from flowkit.adapters.mongo import fits
from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flowkit.models import NodeRecord, RecordTask

Fields = dict[str, Any]

NODES_OF_ONE_UPDATE = 100

_logger = logging.getLogger("flowkit.store")


class Recording:
    """The writes of `record` in the `tasks` collection."""

    def __init__(self, tasks: Any) -> None:
        self._tasks = tasks

    async def write(self, record: RecordTask) -> None:
        """Write what the document does not know yet. What does not fit a document of 16 MB is left to the close."""
        if await fits(self._write(record)):
            return
        lean = replace(record, nodes=[replace(node, last_error=None) for node in record.nodes])
        if not await fits(self._write(lean)):
            _logger.warning("task %s: its document is too large for changes of its nodes", record.task_id)

    async def _write(self, record: RecordTask) -> None:
        failed_first = sorted(record.nodes, key=lambda node: node.status is not NodeStatus.FAILED)
        fields = documents.task_fields(record)
        for nodes in chunks(failed_first, NODES_OF_ONE_UPDATE) or [()]:
            if not (
                await self._together(record, nodes, fields) or await self._missing(record, nodes, fields)
            ):
                return
            fields = {}

    async def _together(self, record: RecordTask, nodes: Sequence[NodeRecord], fields: Fields) -> bool:
        if not (nodes or fields):
            return True
        done = await self._tasks.update_one(*_update(record, nodes, fields))
        return bool(done.matched_count)

    async def _missing(self, record: RecordTask, nodes: Sequence[NodeRecord], fields: Fields) -> bool:
        """Write what the document does not know yet; False when the task has ended, or belongs to a newer run."""
        stored = await self._tasks.find_one(documents.task_filter(record), documents.NODE_STATES)
        if stored is None:
            return False
        behind = [node for node in nodes if documents.may_follow(node, documents.nodes_of(stored))]
        if not await self._together(record, behind, fields):
            single = [UpdateOne(*_update(record, [], fields))] if fields else []
            single += [UpdateOne(*_update(record, [node], {})) for node in behind]
            await self._tasks.bulk_write(single, ordered=True)
        return True


def _update(record: RecordTask, nodes: Sequence[NodeRecord], fields: Fields) -> tuple[Fields, Fields]:
    condition = documents.task_filter(record)
    for node in nodes:
        condition |= documents.node_filter(node)
        fields = fields | documents.node_fields(node, record.at)
    return condition, {"$set": fields}


def chunks(nodes: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """`nodes` in pieces of `size` at most."""
    return [*_chunks(nodes, size)]


def _chunks(nodes: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(nodes), size):
        yield nodes[start : start + size]
