"""The collection `attempt_logs`: the lines of handlers, in documents of up to 64 KiB."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pymongo import ASCENDING, DESCENDING
from pymongo.errors import BulkWriteError

from flowkit.adapters.mongo import duplicate_indexes, durable, ensure_index, expire_after, translate_errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from flowkit.adapters.mongo import Database

COLLECTION: Final = "attempt_logs"
_AT_ONCE: Final = 20
"""Documents that a cursor receives at once: up to about a megabyte."""
TTL: Final = "ttl_attempt_logs"
_ORDER: Final = [("at", ASCENDING), ("_id", ASCENDING)]
_PLACE: Final = [("task_id", ASCENDING), *_ORDER, ("node_id", ASCENDING), ("attempt_epoch", ASCENDING)]
"""The documents of a task in their order, so that MongoDB needs no sort of all that a task has logged."""


class LogStore:
    """Writes and reads the documents."""

    def __init__(self, db: Database) -> None:
        self._db = durable(db)
        self._rows = self._db[COLLECTION]

    @translate_errors
    async def prepare(self) -> None:
        """Create the index by which lines are found. Raise StoreUnavailable or StoreRefused."""
        await ensure_index(self._rows, _PLACE, "attempt_logs_of_task")

    @translate_errors
    async def expire_after(self, seconds: float) -> None:
        """Let MongoDB delete lines this long after it stored them; 0 means never."""
        await expire_after(self._rows, TTL, seconds)

    @translate_errors
    async def kept_sec(self) -> float | None:
        """Return after how many seconds MongoDB deletes lines; None for never."""
        index = (await self._rows.index_information()).get(TTL)
        return None if index is None else float(index["expireAfterSeconds"])

    @translate_errors
    async def append(self, documents: Sequence[dict[str, Any]]) -> None:
        """Store documents. Those that an earlier try has stored stay unchanged."""
        try:
            await self._rows.insert_many(documents, ordered=False)
        except BulkWriteError as error:
            duplicate_indexes(error)

    @translate_errors
    async def remove(self, ids: Sequence[str]) -> None:
        """Delete documents."""
        await self._rows.delete_many({"_id": {"$in": list(ids)}})

    async def find(
        self, wanted: dict[str, Any], *, without: Sequence[str] = ()
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield documents in the order of their first lines."""
        if without:
            wanted = {**wanted, "_id": {"$nin": list(without)}}
        found = self._rows.find(wanted).sort(_ORDER).batch_size(_AT_ONCE)
        async for each in _translated(found):
            yield each

    @translate_errors
    async def number_before(self, row_id: str) -> int:
        """Return the number of the last line before a document of the same log; 0 if there is none."""
        log = row_id.partition("-")[0]
        found = self._rows.find({"_id": {"$gte": f"{log}-", "$lt": row_id}}, {"lines.n": 1})
        async for each in found.sort("_id", DESCENDING).limit(1):
            return int(each["lines"][-1]["n"])
        return 0

    @translate_errors
    async def find_events(self, wanted: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of external workers that `wanted` selects as it does documents of lines, oldest first.

        An attempt of an external worker has a row in `dispatches`.
        """
        place = {name: value for name, value in wanted.items() if name not in {"at", "until"}}
        of_nodes = {name: value for name, value in place.items() if name != "attempt_epoch"}
        nodes = await self._db.dispatches.distinct("node_id", of_nodes)
        if not nodes:
            return []
        since = {"created_at": wanted["at"]} if "at" in wanted else {}
        found = self._db.worker_events.find({**place, "node_id": {"$in": nodes}, **since})
        return [each async for each in found.sort("ts_ms", ASCENDING)]


async def _translated(cursor: Any) -> AsyncIterator[dict[str, Any]]:
    @translate_errors
    async def step() -> dict[str, Any] | None:
        found: dict[str, Any] | None = await anext(cursor, None)
        return found

    while (document := await step()) is not None:
        yield document
