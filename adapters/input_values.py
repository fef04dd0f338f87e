"""The values by expression of nodes: one row for each generation of a node, which `flowkit purge` deletes."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pymongo import ASCENDING
from pymongo.errors import DuplicateKeyError

from flowkit.adapters.map_items import ItemSet, MapItems
from flowkit.adapters.mongo import Database, durable, ensure_index, moment, translate_errors
from flowkit.core.utils import stable_hash
from flowkit.errors import BadExpression

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flowkit.models import AttemptInput


class InputValues:
    """The collection `input_values`. Raises StoreUnavailable if MongoDB does not respond."""

    def __init__(self, db: Database) -> None:
        self._rows = durable(db).input_values
        self.items = MapItems(db)
        """The items of nodes with `map`."""

    @translate_errors
    async def prepare(self) -> None:
        """Create the index by which `flowkit purge` finds the rows of a task."""
        await ensure_index(self._rows, [("task_id", ASCENDING)], "ix_input_values_task")
        await self.items.prepare()

    @translate_errors
    async def put(
        self,
        key: tuple[str, str, int],
        values: Mapping[str, Any],
        at: float,
        scheduled: tuple[float, int],
        items: ItemSet | None = None,
        shown: Sequence[str] | None = None,
    ) -> None:
        """Store the values of a node's expressions, by text, for the task, the node and the generation in `key`.

        `scheduled` is when the activity that has evaluated them was scheduled (Unix time), and its try. An earlier
        evaluation, or an earlier try, that ends late changes nothing. `items` is the set of stored items of a node with
        `map`. `shown` are the expressions whose values are no secrets; None if this is unknown.
        """
        task_id, node_id, generation = key
        since, attempt = scheduled
        earlier = [
            {"scheduled_at": {"$not": {"$gte": since}}},
            {"scheduled_at": since, "attempt": {"$lte": attempt}},
        ]
        stored: dict[str, Any] = {
            "task_id": task_id,
            "node_id": node_id,
            "generation": generation,
            "scheduled_at": since,
            "attempt": attempt,
            "created_at": moment(at),
            **({} if items is None else {"items": asdict(items)}),
            "values": json.dumps(values, ensure_ascii=False, allow_nan=False),
            "shown": None if shown is None else [*shown],
        }
        own = {"_id": _row_id(*key), "$or": earlier}
        for _ in range(2):
            # The insert fails if there is a later evaluation, or if another one has just been inserted.
            with suppress(DuplicateKeyError):
                await self._rows.update_one(own, {"$set": stored}, upsert=True)
                return

    @translate_errors
    async def stored(self, key: tuple[str, str, int]) -> tuple[dict[str, Any], ItemSet | None]:
        """Return the stored values, by text, and the stored set of items; empty and None without an evaluation."""
        found = await self._rows.find_one({"_id": _row_id(*key)}, {"values": 1, "items": 1}) or {}
        items = ItemSet(**found["items"]) if found.get("items") else None
        return json.loads(found.get("values", "{}")), items

    @translate_errors
    async def get(self, attempt: AttemptInput) -> tuple[dict[str, Any], list[str] | None]:
        """Return the values for an attempt, by the text of the expression, and the texts of those that errors may show.

        The latter is None if it is unknown which may be shown. Raise BadExpression if they are not stored.
        """
        key = _row_id(attempt.task_id, attempt.node_id, attempt.generation)
        found = await self._rows.find_one({"_id": key}, {"values": 1, "shown": 1})
        if found is None:
            raise BadExpression(
                f"the values of the expressions of node {attempt.node_id!r} are not in MongoDB; start the task again"
            )
        return json.loads(found["values"]), found.get("shown")

    @translate_errors
    async def item_set(self, attempt: AttemptInput) -> ItemSet:
        """Return the set of items that an attempt processes. Raise BadExpression if it is not stored."""
        _, items = await self.stored((attempt.task_id, attempt.node_id, attempt.generation))
        if items is None:
            raise BadExpression(
                f"the items of node {attempt.node_id!r} are not in MongoDB; start the task again"
            )
        return items

    @translate_errors
    async def batches(self, task_id: str) -> dict[tuple[str, int], int]:
        """Return the number of batches of the nodes of a task with `map`, by node id and generation."""
        rows = self._rows.find(
            {"task_id": task_id, "items": {"$exists": True}},
            {"_id": 0, "node_id": 1, "generation": 1, "items.batches": 1},
        )
        return {(row["node_id"], row["generation"]): row["items"]["batches"] async for row in rows}


def _row_id(task_id: str, node_id: str, generation: int) -> str:
    return stable_hash({"t": task_id, "n": node_id, "g": generation})
