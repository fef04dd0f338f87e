"""A database that records every update, and lets a test act just before a write."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import TYPE_CHECKING, Any

from tests.unit.event_loop import let_other_tasks_run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

Update = dict[str, dict[str, Any]]


class RecordingDatabase:
    """Forwards all calls to `db`."""

    def __init__(self, db: Any) -> None:
        self._db = db
        self.updates: list[Update] = []
        self.before: defaultdict[str, list[Callable[[], Awaitable[None]]]] = defaultdict(list)
        """Functions by collection. Each runs once, before the collection's next write."""

    def __getattr__(self, name: str) -> _RecordingCollection:
        return _RecordingCollection(name, self._db[name], self)

    def __getitem__(self, name: str) -> _RecordingCollection:
        return _RecordingCollection(name, self._db[name], self)

    async def note(self, collection: str, update: Update) -> None:
        """Record an update before it is made."""
        self.updates.append(update)
        await self.reach(collection)

    async def reach(self, collection: str) -> None:
        """Run before every write; yield to other tasks, as a call to a server does."""
        await let_other_tasks_run()
        if self.before[collection]:
            await self.before[collection].pop(0)()


class _RecordingCollection:
    def __init__(self, name: str, collection: Any, database: RecordingDatabase) -> None:
        self._name = name
        self._collection = collection
        self._database = database

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collection, name)

    async def insert_one(self, document: Any, **options: Any) -> Any:
        await self._database.reach(self._name)
        return await self._collection.insert_one(document, **options)

    async def update_one(self, condition: Any, update: Update, **options: Any) -> Any:
        await self._database.note(self._name, update)
        return await self._collection.update_one(condition, update, **options)

    async def delete_one(self, condition: Any, **options: Any) -> Any:
        await self._database.reach(self._name)
        return await self._collection.delete_one(condition, **options)

    async def insert_many(self, documents: Any, **options: Any) -> Any:
        await self._database.reach(self._name)
        return await self._collection.insert_many(documents, **options)

    async def bulk_write(self, requests: Any, **options: Any) -> Any:
        for request in requests:
            await self._database.note(self._name, request._doc)
        return await self._collection.bulk_write(requests, **options)

    async def find_one_and_update(self, condition: Any, update: Update, **options: Any) -> Any:
        await self._database.note(self._name, update)
        return await self._collection.find_one_and_update(condition, update, **options)


def conflicts(update: Update) -> list[tuple[str, str]]:
    """Return the pairs of paths that MongoDB rejects in one update: equal paths, or a path and its parent."""
    paths = [path for fields in update.values() for path in fields]
    return [pair for pair in combinations(paths, 2) if _overlap(*pair)]


def _overlap(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
