"""The items of nodes with `map`, in batches: the collection `map_items`, whose rows `flowkit purge` deletes.

The activity that evaluates a node's expressions stores the batches first, and then, with the other values of the node
(`input_values`), which set of them is valid. An activity that is repeated stores a set of its own, so that an attempt
never sees items of two evaluations.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pymongo import ASCENDING
from pymongo.errors import BulkWriteError

from flowkit.adapters.mongo import (
    Database,
    duplicate_indexes,
    durable,
    ensure_index,
    moment,
    translate_errors,
)
from flowkit.core.instruments import STORED_BYTES
from flowkit.core.utils import stable_hash

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from flowkit.graph.expressions import ItemBatches
    from flowkit.models import AttemptInput

_ROWS_PER_WRITE = 1_000
_BYTES_PER_WRITE = 4_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemSet:
    """What is known of the items of a node without reading them."""

    token: str
    """Distinguishes the evaluations of one generation of the node."""
    items: int
    batches: int
    batch_size: int
    largest: int
    """Size of the largest batch, in bytes of JSON."""


class MapItems:
    """The collection `map_items`. Raises StoreUnavailable if MongoDB does not respond."""

    def __init__(self, db: Database) -> None:
        self._rows = durable(db).map_items

    @translate_errors
    async def prepare(self) -> None:
        """Create the index by which `flowkit purge` finds the rows of a task."""
        await ensure_index(self._rows, [("task_id", ASCENDING)], "ix_map_items_task")

    @translate_errors
    async def put(
        self, key: tuple[str, str, int], token: str, given: ItemBatches, batch_size: int, at: float
    ) -> ItemSet:
        """Store the batches of items, for the task, the node and the generation in `key`.

        Storing them again changes nothing.
        """
        task_id, node_id, generation = key
        own = {"task_id": task_id, "node_id": node_id, "generation": generation, "token": token}
        largest = 0
        for page in _pages(given.batches):
            rows = [
                {**own, "_id": _row_id(key, token, number), "number": number, "items": text}
                for number, text in page
            ]
            await self._insert([{**row, "created_at": moment(at)} for row in rows])
            sizes = [len(text.encode()) for _, text in page]
            STORED_BYTES.add("inputs", amount=sum(sizes))
            largest = max(largest, *sizes)
        return ItemSet(
            token=token,
            items=given.items,
            batches=len(given.batches),
            batch_size=batch_size,
            largest=largest,
        )

    async def _insert(self, rows: list[dict[str, Any]]) -> None:
        try:
            await self._rows.insert_many(rows, ordered=False)
        except BulkWriteError as error:
            duplicate_indexes(error)

    @translate_errors
    async def read(
        self, attempt: AttemptInput, token: str, numbers: Sequence[int]
    ) -> Mapping[int, list[Any]]:
        """Return the items of these batches, by their numbers. Omit batches that were deleted."""
        key = (attempt.task_id, attempt.node_id, attempt.generation)
        ids = [_row_id(key, token, number) for number in numbers]
        found = self._rows.find({"_id": {"$in": ids}}, {"_id": 0, "number": 1, "items": 1})
        return {row["number"]: json.loads(row["items"]) async for row in found}


def _pages(batches: Sequence[str]) -> Iterator[list[tuple[int, str]]]:
    """Yield the batches with their numbers, as many together as one write takes."""
    page: list[tuple[int, str]] = []
    size = 0
    for number, text in enumerate(batches):
        if page and (len(page) >= _ROWS_PER_WRITE or size + len(text) > _BYTES_PER_WRITE):
            yield page
            page, size = [], 0
        page.append((number, text))
        size += len(text)
    if page:
        yield page


def _row_id(key: tuple[str, str, int], token: str, number: int) -> str:
    task_id, node_id, generation = key
    return stable_hash({"t": task_id, "n": node_id, "g": generation, "k": token, "b": number})
