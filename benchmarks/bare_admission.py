"""What an expert would write for admission on one machine: the same documents and grouped writes, in one process.

It keeps the caps with the same filters, but it has no tokens, sessions, or recovery: after a crash, its counters are
wrong.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from pymongo import InsertOne, ReturnDocument, UpdateOne

if TYPE_CHECKING:
    from collections.abc import Sequence

Fields = dict[str, Any]

MAX_PENDING, MAX_ACTIVE, MAX_PER_USER = 10_000, 1_000, 1_000
_ORDER = [("rank", 1), ("seq", 1)]


class BareAdmission:
    """Submits, starts and ends groups of requests."""

    def __init__(self, db: Any) -> None:
        self._items, self._users, self._counters = db.items, db.users, db.counters

    async def prepare(self, users: Sequence[str]) -> None:
        """Create the indexes, the users and the counters."""
        await self._items.create_index([("state", 1), ("rank", 1), ("seq", 1)])
        await self._items.create_index([("unsent", 1)], sparse=True)
        await self._users.bulk_write([InsertOne({"_id": user, "held": []}) for user in users])
        await self._counters.insert_one({"_id": "queue", "pending": 0, "active": 0, "seq": 0, "bands": {}})

    async def submit(self, items: Sequence[Fields]) -> None:
        """Queue a group of requests."""
        await self._items.insert_many(
            [{**item, "state": "reserving", "v": 0, "events": [], "sent": 0} for item in items],
            ordered=False,
        )
        held = await self._users.bulk_write([_hold(item) for item in items], ordered=False)
        assert held.modified_count == len(items)
        steps = {"pending": len(items), "seq": len(items)}
        for item in items:
            band = f"bands.{item['rank']}"
            steps[band] = steps.get(band, 0) + 1
        counted = await self._counters.find_one_and_update(
            {"_id": "queue", "pending": {"$lte": MAX_PENDING - len(items)}},
            {"$inc": steps},
            return_document=ReturnDocument.AFTER,
        )
        assert counted is not None
        at, first = time.time(), counted["seq"] - len(items) + 1
        await self._items.bulk_write(
            [
                _change(
                    *(item["_id"], 0),
                    {"state": "queued", "seq": number, "queued_at": at, "stale_at": at + 3_600},
                    [_event("execution_accepted", queue_position=number), _event("execution_queued")],
                )
                for number, item in enumerate(items, first)
            ],
            ordered=False,
        )

    async def start(self, most: int) -> list[Fields]:
        """Start the first requests that wait, and return them."""
        first = self._items.find({"state": "queued"}).sort(_ORDER).limit(most)
        items = [item async for item in first]
        if not items:
            return []
        counted = await self._counters.find_one_and_update(
            {"_id": "queue", "active": {"$lte": MAX_ACTIVE - len(items)}},
            {"$inc": {"pending": -len(items), "active": len(items)}},
        )
        if counted is None:
            return []
        at = time.time()
        events = ("create_pod_command", "execution_started", "execution_running")
        await self._items.bulk_write(
            [
                _change(
                    *(item["_id"], item["v"]),
                    {"state": "active", "started_at": at, "popped_at": at},
                    [_event(kind) for kind in events],
                )
                for item in items
            ],
            ordered=False,
        )
        return items

    async def end(self, items: Sequence[Fields]) -> None:
        """End a group of requests, and give back what they hold."""
        await self._items.bulk_write(
            [
                UpdateOne(
                    {"_id": item["_id"]}, {"$set": {"state": "completed", "owes": "slot"}, "$inc": {"v": 1}}
                )
                for item in items
            ],
            ordered=False,
        )
        await self._items.bulk_write(
            [UpdateOne({"_id": item["_id"]}, {"$set": {"owes": None}, "$inc": {"v": 1}}) for item in items],
            ordered=False,
        )
        await self._users.bulk_write(
            [UpdateOne({"_id": item["user_id"]}, {"$pull": {"held": item["_id"]}}) for item in items],
            ordered=False,
        )
        await self._counters.update_one({"_id": "queue"}, {"$inc": {"active": -len(items)}})

    async def relay(self) -> int:
        """Note that the events of requests have been sent. Return the number of requests."""
        found = [item async for item in self._items.find({"unsent": 1}).limit(500)]
        if found:
            await self._items.bulk_write(
                [
                    UpdateOne(
                        {"_id": item["_id"], f"events.{len(item['events'])}": {"$exists": False}},
                        {"$set": {"sent": len(item["events"])}, "$unset": {"unsent": 1}},
                    )
                    for item in found
                ],
                ordered=False,
            )
        return len(found)


def _hold(item: Fields) -> UpdateOne:
    free = {"_id": item["user_id"], f"held.{MAX_PER_USER - 1}": {"$exists": False}}
    return UpdateOne(free, {"$push": {"held": item["_id"]}})


def _change(id: str, version: int, fields: Fields, events: list[Fields]) -> UpdateOne:
    return UpdateOne(
        {"_id": id, "v": version},
        {"$set": {**fields, "unsent": 1}, "$inc": {"v": 1}, "$push": {"events": {"$each": events}}},
    )


def _event(kind: str, **fields: Any) -> Fields:
    return {"id": str(uuid.uuid4()), "type": kind, "at": time.time(), "fields": fields}
