"""Turns: of all engines, one at a time does a periodic task. Each turn is a document of `flowkit_meta`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pymongo.errors import DuplicateKeyError

from flowkit.adapters.mongo import durable, translate_errors
from flowkit.core.time import LeaseObserver

if TYPE_CHECKING:
    from flowkit.adapters.mongo import Database


class Turns:
    """The turns of one database. Raises StoreUnavailable if MongoDB does not respond."""

    def __init__(self, db: Database) -> None:
        self._meta = durable(db).flowkit_meta
        self._observed = LeaseObserver()

    @translate_errors
    async def take(self, name: str, owner: str, seconds: float) -> bool:
        """Reserve the turn `name` for `owner`. Return False if another owner has reserved it.

        The reservation lasts until other processes have seen no renewal of it for so many `seconds`.
        """
        read_at = self._observed.now()
        renewal = {"$inc": {"renewals": 1}, "$set": {"seconds": seconds}}
        if (await self._meta.update_one({"_id": name, "owner": owner}, renewal)).matched_count:
            return True
        new = {"owner": owner, "renewals": 0, "seconds": seconds}
        found = await self._meta.find_one({"_id": name})
        if found is None:
            with suppress(DuplicateKeyError):
                await self._meta.insert_one({"_id": name, **new})
                return True
            return False
        value = (found["owner"], found.get("renewals"))
        if self._observed.unchanged_sec(name, value, read_at) <= found.get("seconds", 0.0):
            return False
        return bool((await self._meta.update_one(found, {"$set": new})).matched_count)

    @translate_errors
    async def end(self, name: str, owner: str) -> None:
        """Release the owner's reservation, so that another engine can take the turn immediately."""
        await self._meta.delete_one({"_id": name, "owner": owner})
