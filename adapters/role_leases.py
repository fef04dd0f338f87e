"""The leases of roles, `role_leases`: whether native workers or bridges poll the task queue of a role, never both.

One document for each namespace and task queue names the kind of the processes that hold it, with the time until which
each of them does. Processes of one kind share a lease. The other kind takes it in one update whose filter matches only
while no process holds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pymongo.errors import DuplicateKeyError

from flowkit.adapters.entries import utc
from flowkit.adapters.mongo import Database, durable, moment, translate_errors

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

    @translate_errors
    async def take(
        self, key: tuple[str, str], kind: RoleKind, holder: str, at: float, ttl_sec: float
    ) -> RoleHolders | None:
        """Take, share or renew the lease of a namespace and a task queue for `ttl_sec` seconds.

        Return None if the process now holds it. Otherwise, return the processes of the other kind that do.
        """
        row, entry = _row(key), {"id": holder, "expires_at": moment(at) + timedelta(seconds=ttl_sec)}
        renewed = await self._leases.update_one(
            {"_id": row, "kind": kind.value, "holders.id": holder},
            {"$set": {"holders.$.expires_at": entry["expires_at"]}},
        )
        if renewed.matched_count or await self._share(row, kind, entry, at):
            return None
        unheld = {"holders": {"$not": {"$elemMatch": {"expires_at": {"$gt": moment(at)}}}}}
        try:
            await self._leases.update_one(
                {"_id": row, **unheld}, {"$set": {"kind": kind.value, "holders": [entry]}}, upsert=True
            )
        except DuplicateKeyError:
            pass
        else:
            return None
        found = await self._leases.find_one({"_id": row})
        if found is None or found["kind"] == kind.value:
            return await self.take(key, kind, holder, at, ttl_sec)
        return _holders_of(found, at)

    async def _share(self, row: str, kind: RoleKind, entry: dict[str, Any], at: float) -> bool:
        """Join the processes that hold the lease, and remove those whose time is over. Return whether it is theirs."""
        held = {"_id": row, "kind": kind.value, "holders.expires_at": {"$gt": moment(at)}}
        shared = await self._leases.update_one(held, {"$push": {"holders": entry}})
        if shared.matched_count:
            over = {"$pull": {"holders": {"expires_at": {"$lte": moment(at)}}}}
            await self._leases.update_one({"_id": row, "kind": kind.value}, over)
        return bool(shared.matched_count)

    @translate_errors
    async def release(self, key: tuple[str, str], kind: RoleKind, holder: str) -> None:
        """End the share of a process in a lease. Do nothing if it has none."""
        await self._leases.update_one(
            {"_id": _row(key), "kind": kind.value}, {"$pull": {"holders": {"id": holder}}}
        )


def _row(key: tuple[str, str]) -> str:
    return "/".join(key)


def _holders_of(found: dict[str, Any], at: float) -> RoleHolders:
    current = [each["id"] for each in found["holders"] if utc(each["expires_at"]).timestamp() > at]
    return RoleHolders(kind=RoleKind(found["kind"]), holders=current)
