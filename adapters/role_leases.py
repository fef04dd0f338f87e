"""The leases of roles, `role_leases`: whether native workers or bridges poll the task queue of a role, never both.

One document for each namespace and task queue names the kind of the processes that hold it, with a number that each of
them raises when it renews its share. Processes of one kind share a lease. A process of the other kind takes it in one
update, once it has seen no renewal of any share for as long as one lasts, by its own clock.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pymongo.errors import DuplicateKeyError

from flowkit.adapters.mongo import Database, durable, translate_errors
from flowkit.core.time import LeaseObserver

if TYPE_CHECKING:
    from collections.abc import Collection


class RoleKind(StrEnum):
    """The kind of processes that poll the task queue of a role."""

    NATIVE = "native"
    """Native workers, and engines that host handlers."""
    EXTERNAL = "external"
    """Bridges, for external workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleHolders:
    """The processes of one kind that hold a lease."""

    kind: RoleKind
    holders: Collection[str]


class RoleLeases:
    """The collection `role_leases`."""

    def __init__(self, db: Database) -> None:
        self._leases = durable(db).role_leases
        self._observed = LeaseObserver()

    @translate_errors
    async def take(
        self, key: tuple[str, str], kind: RoleKind, holder: str, ttl_sec: float
    ) -> RoleHolders | None:
        """Take, share or renew the lease of a namespace and a task queue.

        A share lasts until other processes have seen no renewal of it for `ttl_sec` seconds. Return None if the process
        now holds the lease. Otherwise, return the processes of the other kind that do.
        """
        row, new = _row(key), {"id": holder, "renewals": 0}
        read_at = self._observed.now()
        own = {"_id": row, "kind": kind.value}
        renewed = await self._leases.update_one(
            {**own, "holders.id": holder}, {"$inc": {"holders.$.renewals": 1}}
        )
        if not renewed.matched_count:
            renewed = await self._leases.update_one(own, {"$push": {"holders": new}})
        found = await self._leases.find_one({"_id": row})
        if found is None:
            with suppress(DuplicateKeyError):
                await self._leases.insert_one({**own, "holders": [new]})
                return None
            return await self.take(key, kind, holder, ttl_sec)
        silent = [each for each in found["holders"] if self._is_lost(row, each, read_at, ttl_sec)]
        lost = [each for each in silent if each["id"] != holder]
        if found["kind"] == kind.value:
            if lost:
                await self._leases.update_one(own, {"$pull": {"holders": {"$in": lost}}})
            return None if renewed.matched_count else await self.take(key, kind, holder, ttl_sec)
        if len(lost) < len(found["holders"]):
            held = [each["id"] for each in found["holders"] if each not in lost]
            return RoleHolders(kind=RoleKind(found["kind"]), holders=held)
        taken = {"$set": {"kind": kind.value, "holders": [new]}}
        if (await self._leases.update_one(found, taken)).matched_count:
            return None
        return await self.take(key, kind, holder, ttl_sec)

    def _is_lost(self, row: str, share: dict[str, Any], read_at: float, ttl_sec: float) -> bool:
        return self._observed.unchanged_sec((row, share["id"]), share.get("renewals"), read_at) >= ttl_sec

    @translate_errors
    async def release(self, key: tuple[str, str], kind: RoleKind, holder: str) -> None:
        """End the share of a process in a lease. Do nothing if it has none."""
        await self._leases.update_one(
            {"_id": _row(key), "kind": kind.value}, {"$pull": {"holders": {"id": holder}}}
        )


def _row(key: tuple[str, str]) -> str:
    return "/".join(key)
