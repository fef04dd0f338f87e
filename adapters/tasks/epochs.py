"""Reads the epoch of a node, which shows whether another attempt has replaced one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowkit.adapters.durability import durable
from flowkit.adapters.mongo import translate_errors
from flowkit.adapters.tasks import fields as task_fields

if TYPE_CHECKING:
    from flowkit.adapters.mongo import Database
    from flowkit.models import AttemptInput


class Epochs:
    """The epochs of nodes in the collection `tasks`."""

    def __init__(self, db: Database) -> None:
        self._tasks = durable(db).tasks

    @translate_errors
    async def current(self, attempt: AttemptInput) -> int:
        """Return the epoch of the attempt's node; 0 without a document."""
        stored = await self._tasks.find_one({"id": attempt.task_id}, task_fields.NODE_STATES)
        nodes = task_fields.nodes_of(stored or {})
        return int(nodes[attempt.index]["attempt_epoch"]) if attempt.index < len(nodes) else 0
