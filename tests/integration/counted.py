"""A handler that counts in MongoDB how many of its attempts run at once, over all processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.integration.handlers import Paced

if TYPE_CHECKING:
    from flowkit.worker import Batch, BatchResult
    from flowkit.worker.context import RunContext
    from tests.integration.harness import Harness

ALL_ROLES = "all roles"


class Counted(Paced):
    """Waits `pause` seconds, and counts itself meanwhile: once for its role and once for all roles."""

    def __init__(self, db: Any, role: str = "counted") -> None:
        self.role = role
        self._db = db

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Count this attempt while its batch runs."""
        await self._count(ctx)
        try:
            return await super().process_batch(batch, ctx)
        finally:
            await self._db.running.update_many(
                {"_id": {"$in": [self.role, ALL_ROLES]}}, {"$inc": {"now": -1}}
            )

    async def _count(self, ctx: RunContext) -> None:
        for counter in (self.role, ALL_ROLES):
            found = await self._db.running.find_one_and_update(
                {"_id": counter}, {"$inc": {"now": 1}}, upsert=True, return_document=True
            )
            await self._db.running.update_one({"_id": counter}, {"$max": {"most": found["now"]}})
        await self._db.starts.insert_one({"task": ctx.task_id, "node": ctx.node_id})


async def most(harness: Harness, counter: str = ALL_ROLES) -> int:
    """Return the largest number of attempts that ran at once."""
    found = await harness.db.running.find_one({"_id": counter})
    return int(found.get("most", 0)) if found else 0


async def started(harness: Harness) -> list[dict[str, Any]]:
    """Return the attempts in the order in which they started."""
    return [row async for row in harness.db.starts.find({}, {"_id": 0}).sort("_id", 1)]


async def holders(harness: Harness) -> list[dict[str, Any]]:
    """Return the attempts that hold a slot."""
    stored = await harness.db.slots.find_one({})
    return list(stored["holders"]) if stored else []


async def requests(harness: Harness) -> list[dict[str, Any]]:
    """Return the requests that wait for a slot."""
    return [row async for row in harness.db.slot_requests.find({})]
