"""A database with a small limit for the size of a document; MongoDB's own limit is 16 MB."""

from __future__ import annotations

from typing import Any

import bson
from pymongo.errors import WriteError

TOO_LARGE = 17419
"""MongoDB's error for an update that would make a document too large."""


class SizeLimitedDatabase:
    """Forwards all calls to `db`, but undoes updates that make a task document too large.

    A document that is too large already may shrink, although MongoDB never has such a document.
    """

    def __init__(self, db: Any, bytes_at_most: int) -> None:
        self._db = db
        self._most = bytes_at_most
        self.refused = 0

    def __getattr__(self, name: str) -> Any:
        collection = getattr(self._db, name)
        return _SizeLimitedTasks(collection, self) if name == "tasks" else collection

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def allows(self, before: dict[str, Any] | None, after: dict[str, Any] | None) -> bool:
        """Return whether the document is within the limit, or at least smaller than before."""
        fits = _size(after) <= max(self._most, _size(before) - 1)
        self.refused += not fits
        return fits


def _size(document: dict[str, Any] | None) -> int:
    return len(bson.encode(document or {}))


class _SizeLimitedTasks:
    def __init__(self, tasks: Any, database: SizeLimitedDatabase) -> None:
        self._tasks = tasks
        self._database = database

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tasks, name)

    async def update_one(self, condition: Any, update: Any, **options: Any) -> Any:
        before = await self._tasks.find_one({"id": condition["id"]})
        done = await self._tasks.update_one(condition, update, **options)
        if self._database.allows(before, await self._tasks.find_one({"id": condition["id"]})):
            return done
        await self._tasks.replace_one({"id": condition["id"]}, before)
        raise WriteError("Resulting document after update is larger than 16777216", TOO_LARGE)
