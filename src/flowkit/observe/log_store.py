"""The collection `attempt_logs`: the lines of handlers, in documents of up to 64 KiB.

MongoDB itself writes when it has stored a document, as `created_at`: the clocks of workers differ, and their documents
may have waited for an outage to end. So who follows a task reads what MongoDB has stored since, whoever wrote it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from pymongo import ASCENDING, DESCENDING, UpdateOne
from pymongo.errors import BulkWriteError

from flowkit.adapters.mongo import duplicate_indexes, durable, ensure_index, expire_after, translate_errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Sequence

    from flowkit.adapters.mongo import Database

COLLECTION: Final = "attempt_logs"
_AT_ONCE: Final = 20
"""Documents that a cursor receives at once: up to about a megabyte."""
TTL: Final = "ttl_attempt_logs"
_ORDER: Final = [("at", ASCENDING), ("_id", ASCENDING)]
_PLACE: Final = [("task_id", ASCENDING), *_ORDER, ("node_id", ASCENDING), ("attempt_epoch", ASCENDING)]
"""The documents of a task in their order, so that MongoDB needs no sort of all that a task has logged."""
_ARRIVAL: Final = [("task_id", ASCENDING), ("created_at", ASCENDING)]
"""The documents of a task in the order in which MongoDB has stored them."""
LATE: Final = timedelta(minutes=1)
"""For how long a document may be invisible to readers after MongoDB has given it its time."""


class LogStore:
    """Writes and reads the documents."""

    def __init__(self, db: Database) -> None:
        self._db = durable(db)
        self._rows = self._db[COLLECTION]

    @translate_errors
    async def prepare(self) -> None:
        """Create the indexes by which lines are found. Raise StoreUnavailable or StoreRefused."""
        await ensure_index(self._rows, _PLACE, "attempt_logs_of_task")
        await ensure_index(self._rows, _ARRIVAL, "attempt_logs_stored")

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
        """Store documents, with the time of MongoDB. Those that an earlier try has stored stay unchanged."""
        try:
            await self._rows.bulk_write([*map(_insertion, documents)], ordered=False)
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
    async def find_events(
        self, wanted: dict[str, Any], known: Collection[Any] = (), *, since_ms: int = 0
    ) -> list[dict[str, Any]]:
        """Return the events of external workers that `wanted` selects as it does documents of lines, oldest first.

        Leave out those whose ids are `known`, and those that are older than `since_ms` by the clock of their worker.
        An attempt of an external worker has a row in `dispatches`.
        """
        of_nodes = {name: value for name, value in wanted.items() if name != "attempt_epoch"}
        nodes = await self._db.dispatches.distinct("node_id", of_nodes)
        if not nodes:
            return []
        events = self._db.worker_events
        selected = {**wanted, "node_id": {"$in": nodes}} | ({"ts_ms": {"$gte": since_ms}} if since_ms else {})
        if known:
            # Bridges note when an event has arrived, but may store it much later. So the events are counted.
            if await events.count_documents(selected) == len(known):
                return []
            ids = {each["_id"] async for each in events.find(selected, {"_id": 1})}
            selected = {"_id": {"$in": [*ids.difference(known)]}}
        return [each async for each in events.find(selected).sort("ts_ms", ASCENDING)]


def _insertion(document: dict[str, Any]) -> UpdateOne:
    """Return the write that stores a document unless it exists."""
    content = {name: value for name, value in document.items() if name != "_id"}
    absent = {"_id": document["_id"], "created_at": {"$exists": False}}
    return UpdateOne(absent, {"$setOnInsert": content, "$currentDate": {"created_at": True}}, upsert=True)


async def _translated(cursor: Any) -> AsyncIterator[dict[str, Any]]:
    @translate_errors
    async def step() -> dict[str, Any] | None:
        found: dict[str, Any] | None = await anext(cursor, None)
        return found

    while (document := await step()) is not None:
        yield document
