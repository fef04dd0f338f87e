"""A database that freezes a caller before one of its writes, as an engine that is killed or suspended."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from tests.unit.event_loop import let_other_tasks_run

WRITES = {"insert_one", "insert_many", "update_one", "find_one_and_update", "delete_one", "bulk_write"}


class FreezingDatabase:
    """Forwards all calls to `db`, but holds the write with this number to `collection`, and all later calls."""

    def __init__(self, db: Any, collection: str, number: int) -> None:
        self._db = db
        self._point = collection, number
        self._writes: Counter[str] = Counter()
        self._reached = asyncio.Event()
        self._thawed = asyncio.Event()
        self._calls = 0

    def __getattr__(self, name: str) -> _FreezingCollection:
        return _FreezingCollection(name, self._db[name], self)

    def __getitem__(self, name: str) -> _FreezingCollection:
        return _FreezingCollection(name, self._db[name], self)

    async def reached_by(self, caller: asyncio.Task[Any]) -> None:
        """Return when the caller has reached the point and its concurrent calls have ended, or when it has ended."""
        reached = asyncio.create_task(self._reached.wait())
        await asyncio.wait([reached, caller], return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()
        while self._calls:
            await let_other_tasks_run()

    def thaw(self) -> None:
        """Let the caller continue."""
        self._thawed.set()

    async def call(self, name: str, operation: str, method: Any, *args: Any, **options: Any) -> Any:
        """Make a call, unless the caller is frozen."""
        self._writes[name] += operation in WRITES
        if self._point == (name, self._writes[name]) and operation in WRITES:
            self._reached.set()
            await self._thawed.wait()
        self._calls += 1
        try:
            return await method(*args, **options)
        finally:
            self._calls -= 1


class _FreezingCollection:
    def __init__(self, name: str, collection: Any, database: FreezingDatabase) -> None:
        self._name = name
        self._collection = collection
        self._database = database

    def __getattr__(self, operation: str) -> Any:
        method = getattr(self._collection, operation)
        if operation == "find":
            return method
        return lambda *args, **options: self._database.call(self._name, operation, method, *args, **options)
