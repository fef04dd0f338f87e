"""Turns: of all engines, one at a time does a periodic task. Each turn is a document of `flowkit_meta`."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from pymongo.errors import DuplicateKeyError

from flowkit.adapters.mongo import durable, moment, translate_errors

if TYPE_CHECKING:
    from flowkit.adapters.mongo import Database


class Turns:
    """The turns of one database. Raises StoreUnavailable if MongoDB does not respond."""

    def __init__(self, db: Database) -> None:
        self._meta = durable(db).flowkit_meta

    @translate_errors
    async def take(self, name: str, owner: str, at: float, seconds: float) -> bool:
        """Reserve the turn `name` for `owner` for so many `seconds`. Return False if another owner has reserved it."""
        free = [{"owner": owner}, {"until": {"$lt": moment(at)}}]
        until = moment(at) + timedelta(seconds=seconds)
        try:
            await self._meta.update_one(
                {"_id": name, "$or": free}, {"$set": {"owner": owner, "until": until}}, upsert=True
            )
        except DuplicateKeyError:
            return False
        return True

    @translate_errors
    async def end(self, name: str, owner: str) -> None:
        """Release the owner's reservation, so that another engine can take the turn immediately."""
        await self._meta.delete_one({"_id": name, "owner": owner})
