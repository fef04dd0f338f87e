"""What admission stores: requests, what each user and tenant holds, and the counters of each queue.

The collections `admission_items`, `admission_holders`, `admission_queues` and `admission_limits`. Each method changes
single documents, in one call where several are given; the order in which they are called makes the limits exact
(`flowkit.admission.queue` explains why).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from cachetools import FIFOCache
from pymongo import ASCENDING, DESCENDING, ReturnDocument, UpdateOne
from pymongo.errors import BulkWriteError, DuplicateKeyError

from flowkit.adapters.mongo import (
    Database,
    aggregated,
    duplicate_indexes,
    durable,
    ensure_index,
    translate_errors,
)
from flowkit.admission import rules
from flowkit.admission.models import ENDED, Limits, Override, State
from flowkit.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from flowkit.core.utils import Fields
    from flowkit.models import CloseTask


_LOOK_AGAIN_SEC: Final = 10.0
"""How often an engine looks whether a queue has been created."""
_WITHOUT_BODY: Final = {"body": 0}
_BRIEF: Final = {**_WITHOUT_BODY, "events": 0}
"""The long fields of a request, read only where they are needed: what it asks for, and the events about it."""
KEPT_SERVICES: Final = 50
"""How many recent service times a queue keeps."""
_MANY: Final = 500
_KNOWN_HOLDERS: Final = 100_000
LISTED: Final = 200_000
"""As many requests are counted for a list, at most."""
COUNTED: Final = 10_000
"""As many requests are counted for reports, at most."""
_SECRET_BYTES: Final = 32
_COUNTERS: Final[Fields] = {
    "pending": 0,
    "active": 0,
    "bands": {},
    "seq": 0,
    "sessions": {},
    "doubt": {},
    "services": [],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemUpdate:
    """A change of one request, which applies only if the request is as expected. It counts as its next version."""

    id: str
    version: int
    """The version that the request must have."""
    set: Fields = field(default_factory=dict)
    events: Sequence[Fields] = ()
    """Events that the request gets with the change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold:
    """An entry in a list of a holder: `held` for pending and active requests, `active` for active ones."""

    holder: str
    list: str
    entry: str
    cap: int | None = None
    """The list gets no longer than this; None for any length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CounterChange:
    """One change of the counters of a queue."""

    session: str
    """Who makes the change. Nothing changes if this session has been closed."""
    taken: Mapping[int, int] = field(default_factory=dict)
    """How many places for pending requests are taken, by rank. Each gets the next number of arrival."""
    returned: Mapping[int, int] = field(default_factory=dict)
    """How many such places are given back, by rank."""
    shifted: Mapping[int, int] = field(default_factory=dict)
    moved: Mapping[int, int] = field(default_factory=dict)
    """Changes of the numbers of pending requests, by rank, that leave their sum as it is."""
    active: int = 0
    """How many slots are taken."""
    freed: int = 0
    """How many slots are given back."""
    max_pending: int | None = None
    """The change is made only if it leaves at most so many pending."""
    max_active: int | None = None
    doubt: Mapping[str, Fields] = field(default_factory=dict)
    """The steps that begin with the change, by token. Nothing changes if one has begun already."""
    ended: Collection[str] = ()
    """The tokens of the steps that end with the change. Nothing changes if one has ended already."""
    services: Sequence[float] = ()
    """Service times of requests that have ended, in seconds."""
    renewal: int | None = None
    """The number of this renewal of the session; None if the change does not renew it."""


class AdmissionStore:
    """The collections of admission for one queue. Raises StoreUnavailable if MongoDB does not respond."""

    def __init__(self, db: Database, *, queue: str) -> None:
        stored = durable(db)
        self.queue = queue
        self._key = queue.replace("%", "%25").replace("/", "%2F")
        """The name of the queue as the ids of its holders begin. It has no slash, so no other queue's
        begins with it."""
        self._items = stored.admission_items
        self._holders = stored.admission_holders
        self._queues = stored.admission_queues
        self._limits = stored.admission_limits
        self._known_holders: FIFOCache[str, bool] = FIFOCache(_KNOWN_HOLDERS)

    @translate_errors
    async def prepare(self) -> None:
        """Create the indexes and the counters of the queue."""
        up = ASCENDING
        await asyncio.gather(
            self._index(
                [("queue", up), ("state", up), ("lane", up), ("rank", up), ("seq", up)], "ix_admission_order"
            ),
            self._index([("queue", up), ("due_at", up)], "ix_admission_due"),
            self._index([("queue", up), ("requested_at", DESCENDING)], "ix_admission_requested"),
            self._index([("queue", up), ("user_id", up), ("requested_at", DESCENDING)], "ix_admission_user"),
            self._index([("queue", up), ("owes", up)], "ix_admission_owes"),
            self._index([("queue", up), ("started_at", up)], "ix_admission_started"),
            self._index(
                [("queue", up), ("queued_at", up)],
                "ix_admission_waiting",
                partialFilterExpression={"state": State.QUEUED.value},
            ),
            self._index([("unsent", up)], "ix_admission_unsent", sparse=True),
            self._index([("purge_at", up)], "ttl_admission_items", expireAfterSeconds=0, sparse=True),
        )
        try:
            fresh = {**_COUNTERS, "key_secret": secrets.token_hex(_SECRET_BYTES)}
            await self._queues.update_one({"_id": self.queue}, {"$setOnInsert": fresh}, upsert=True)
        except DuplicateKeyError:
            return  # another process has just created it

    async def _index(self, keys: list[tuple[str, int]], name: str, **options: Any) -> None:
        await ensure_index(self._items, keys, name, **options)

    # --- limits

    @translate_errors
    async def limits(self) -> Limits:
        """Return the limits of the queue: those that are stored, else the defaults."""
        stored = await self._limits.find_one({"_id": self.queue}, {"_id": 0}) or {}
        overrides: Fields = {
            name: {_named(key): Override(**each) for key, each in (stored.get(name) or {}).items()}
            for name in ("tenants", "users")
        }
        return Limits(**{**stored, **overrides})

    @translate_errors
    async def set_limits(self, limits: Limits) -> None:
        """Store the limits of the queue. Every process uses them within two seconds."""
        stored = asdict(limits)
        for name in ("tenants", "users"):
            stored[name] = {_field(key): each for key, each in stored[name].items()}
        await self._limits.replace_one({"_id": self.queue}, stored, upsert=True)

    # --- keys

    @translate_errors
    async def key_secret(self) -> bytes:
        """Return the secret with which ids are derived from idempotency keys.

        It stays the same as long as the queue exists.
        """
        found = await self._queues.find_one({"_id": self.queue}, {"key_secret": 1})
        if found is None:
            raise StoreUnavailable(f"MongoDB has no queue {self.queue!r} any more; restart the process")
        return bytes.fromhex(found["key_secret"])

    # --- requests
    #
    # The stand-in for MongoDB reads a document again after it has selected it. The document may then have a later
    # version, which no longer matches the query, so what the queue acts on is checked again.

    @translate_errors
    async def insert(self, items: Sequence[Fields]) -> set[str]:
        """Store new requests. Return the ids of those that were not stored, because their id exists."""
        try:
            await self._items.insert_many([dict(item) for item in items], ordered=False)
        except BulkWriteError as error:
            return {items[place]["_id"] for place in duplicate_indexes(error)}
        return set()

    @translate_errors
    async def load(self, ids: Collection[str], *, events: bool = False) -> dict[str, Fields]:
        """Return those of these requests that exist, by id, without their bodies: with their events, or without."""
        shown = dict(_WITHOUT_BODY if events else _BRIEF)
        return {item["_id"]: item async for item in self._by_id(ids, shown)}

    @translate_errors
    async def bodies(self, ids: Collection[str]) -> dict[str, Fields]:
        """Return what requests ask for, by id. It is empty for one whose body is no longer kept."""
        return {item["_id"]: item["body"] async for item in self._by_id(ids, {"body": 1})}

    def _by_id(self, ids: Collection[str], shown: Fields) -> Any:
        wanted = {"$in": list(ids)} if len(ids) > 1 else next(iter(ids), None)
        return self._items.find({"_id": wanted}, shown).limit(max(1, len(ids)))

    @translate_errors
    async def update(self, updates: Sequence[ItemUpdate], marker: tuple[str, Any]) -> set[str]:
        """Apply changes, and return the ids of the requests that have changed.

        Every change must set the field of `marker` to its value, which no other change does: it shows afterwards which
        of them were applied. Repeating a call is harmless.
        """
        if not updates:
            return set()
        writes = [UpdateOne({"_id": each.id, "v": each.version}, self._operators(each)) for each in updates]
        done = await self._items.bulk_write(writes, ordered=False)
        ids = [each.id for each in updates]
        if done.matched_count == len(updates):
            return set(ids)
        name, value = marker
        found = self._items.find({"_id": {"$in": ids}, name: value}, {"_id": 1}).limit(len(ids))
        return {item["_id"] async for item in found}

    @translate_errors
    async def change(self, update: ItemUpdate) -> Fields | None:
        """Apply one change, and return the request as it is then, without body and events; None if it was
        not as expected.
        """
        changed: Fields | None = await self._items.find_one_and_update(
            {"_id": update.id, "v": update.version},
            self._operators(update),
            projection=dict(_BRIEF),
            return_document=ReturnDocument.AFTER,
        )
        return changed

    def _operators(self, update: ItemUpdate) -> Fields:
        operators: Fields = {"$set": dict(update.set), "$inc": {"v": 1}}
        if update.events:
            operators["$push"] = {"events": {"$each": list(update.events)}}
        return operators

    @translate_errors
    async def first_ready(self, limit: int, *, with_body: bool = True) -> list[Fields]:
        """Return the first requests that wait for nothing but a slot: by band, then by arrival.

        Ask for their bodies only if all of them can start at once.
        """
        ready = {"queue": self.queue, "state": State.QUEUED.value, "lane": None}
        shown = None if with_body else dict(_WITHOUT_BODY)
        found = self._items.find(ready, shown).sort([("rank", ASCENDING), ("seq", ASCENDING)]).limit(limit)
        return [item async for item in found if item["state"] == State.QUEUED and item["lane"] is None]

    @translate_errors
    async def waiting_before(
        self, places: Mapping[str | None, tuple[int, int]], *, known: Collection[str]
    ) -> list[Fields]:
        """Return requests in these lanes that wait before a place, given as rank and number, but for the known ones.

        It is one read, so it does not miss those that move between the lanes. Lane None has those that are ready.
        """
        waiting = {"queue": self.queue, "state": State.QUEUED.value}
        ready = {"_id": {"$nin": list(known)}}
        earlier = [
            {**waiting, "lane": lane, **before, **({} if lane else ready)}
            for lane, (rank, seq) in places.items()
            for before in ({"rank": {"$lt": rank}}, {"rank": rank, "seq": {"$lt": seq}})
        ]
        shown = {"state": 1, "tenant": 1, "user_id": 1, "rank": 1, "seq": 1}
        found = self._items.find({"$or": earlier}, shown).limit(_MANY)
        return [item async for item in found if item["state"] == State.QUEUED and item["_id"] not in known]

    @translate_errors
    async def count_before(self, item: Fields) -> int:
        """Return how many waiting requests start before this one."""
        waiting = {"queue": self.queue, "state": State.QUEUED.value}
        first = {**waiting, "rank": {"$lt": item["rank"]}}
        beside = {**waiting, "rank": item["rank"], "seq": {"$lt": item["seq"]}}
        counts = await asyncio.gather(self._items.count_documents(first), self._items.count_documents(beside))
        return sum(counts)

    @translate_errors
    async def due(self, at: float, limit: int = _MANY) -> list[Fields]:
        """Return requests whose time `due_at` has come, the earliest first."""
        due = {"queue": self.queue, "due_at": {"$lte": at}}
        found = self._items.find(due, dict(_BRIEF)).sort("due_at", ASCENDING).limit(limit)
        return [item async for item in found if item["due_at"] is not None and item["due_at"] <= at]

    @translate_errors
    async def in_state(self, *states: State, after: str = "", limit: int = _MANY) -> list[Fields]:
        """Return requests in one of these states, in the order of their ids, from after an id on."""
        wanted = {
            "queue": self.queue,
            "state": {"$in": [each.value for each in states]},
            "_id": {"$gt": after},
        }
        found = self._items.find(wanted, dict(_BRIEF)).sort("_id", ASCENDING).limit(limit)
        return [item async for item in found if item["state"] in states]

    @translate_errors
    async def page(self, wanted: Fields, *, skip: int, limit: int) -> tuple[list[Fields], int]:
        """Return some requests without their bodies, newest first, and the number of all that match, up to `LISTED`."""
        query = {"queue": self.queue, "state": {"$ne": State.RESERVING.value}, **wanted}
        found = self._items.find(query, dict(_BRIEF)).sort("requested_at", DESCENDING).skip(skip).limit(limit)
        return [item async for item in found], await self._items.count_documents(query, limit=LISTED)

    # --- lanes: where requests wait whose user or tenant has all the active ones that it may have
    #
    # A lane only spares dispatchers from reading such requests. It is no part of what a request is, so a
    # change that was planned with an earlier lane is still valid.

    @translate_errors
    async def park(self, holder: str, keep: Collection[str]) -> None:
        """Let the ready requests of a holder wait until it may have another one active, apart from the ids `keep`.

        Those of a user that wait for its tenant wait for the user from now on.
        """
        kind, tenant, *user_id = holder.split("/", 2)
        ready: Fields = {"queue": self.queue, "state": State.QUEUED.value, "lane": None, "tenant": tenant}
        if kind == "u":
            ready |= {"lane": {"$in": [None, rules.tenant_holder(tenant)]}, "user_id": user_id[0]}
        await self._items.update_many({**ready, "_id": {"$nin": list(keep)}}, {"$set": {"lane": holder}})

    @translate_errors
    async def unpark(self, holder: str, most: int | None) -> int:
        """Let the first requests that wait for a holder become ready, or all of them. Return their number."""
        waiting: Fields = {"queue": self.queue, "state": State.QUEUED.value, "lane": holder}
        if most is not None:
            order = [("rank", ASCENDING), ("seq", ASCENDING)]
            first = self._items.find(waiting, {"_id": 1}).sort(order).limit(most)
            waiting["_id"] = {"$in": [item["_id"] async for item in first]}
        done = await self._items.update_many(waiting, {"$set": {"lane": None}})
        return int(done.modified_count)

    @translate_errors
    async def lanes(self) -> list[str]:
        """Return the holders for which requests wait."""
        waiting = {"queue": self.queue, "state": State.QUEUED.value, "lane": {"$ne": None}}
        return [lane for lane in await self._items.distinct("lane", waiting) if lane]

    # --- what requests owe, and what sessions have left behind

    @translate_errors
    async def owing(self, limit: int) -> list[Fields]:
        """Return requests that have ended and owe their place or slot."""
        owing = {"queue": self.queue, "owes": {"$in": ["place", "slot"]}}
        found = self._items.find(owing, dict(_BRIEF)).limit(limit)
        return [item async for item in found if item.get("owes")]

    @translate_errors
    async def freeze(self, ids: Collection[str], marker: tuple[str, Any]) -> dict[str, Fields]:
        """Raise the version of those of the requests that lack the marker, and return all of them.

        A change that was planned with the earlier version has no effect any more.
        """
        name, value = marker
        lacking = {"_id": {"$in": list(ids)}, name: {"$ne": value}}
        await self._items.update_many(lacking, {"$inc": {"v": 1}})
        return await self.load(ids)

    @translate_errors
    async def drop_bodies(self, ids: Collection[str], at: float) -> None:
        """Drop what ended requests asked for that were due at a time, unless they have been submitted again."""
        if ids:
            ended = {"_id": {"$in": list(ids)}, "due_at": {"$lte": at}, "ended_at": {"$ne": None}}
            await self._items.update_many(ended, {"$set": {"body": {}, "due_at": None}})

    @translate_errors
    async def delete(self, id: str, version: int) -> None:
        """Delete a request that has this version."""
        await self._items.delete_one({"_id": id, "v": version})

    async def open_items(self, tenants: Collection[str], limit: int = _MANY) -> AsyncIterator[list[Fields]]:
        """Yield the requests of tenants that have a place or a slot, some at a time, without their bodies."""
        states = [State.QUEUED.value, State.STARTING.value, State.ACTIVE.value]
        open_ones = [{"state": {"$in": states}}, {"owes": {"$in": ["place", "slot"]}}]
        after = ""
        while tenants and (items := await self._open_after(sorted(tenants), open_ones, after, limit)):
            yield items
            after = items[-1]["_id"]

    @translate_errors
    async def _open_after(
        self, tenants: list[str], open_ones: list[Fields], after: str, limit: int
    ) -> list[Fields]:
        wanted = {"queue": self.queue, "tenant": {"$in": tenants}, "$or": open_ones, "_id": {"$gt": after}}
        found = self._items.find(wanted, dict(_BRIEF)).sort("_id", ASCENDING).limit(limit)
        return [item async for item in found]

    # --- holders

    @translate_errors
    async def hold(self, holds: Sequence[Hold]) -> list[bool]:
        """Add each entry to its holder if the holder's list is shorter than the cap. Return which are in the list."""
        if not holds:
            return []
        while True:
            await self._create_holders({each.holder for each in holds})
            together = [self._add(same, entries) for same, entries in _together(holds)]
            if await self._all_match(together):
                return [True] * len(holds)
            if len(together) < len(holds) and await self._all_match(
                [self._add(each, [each.entry]) for each in holds]
            ):
                return [True] * len(holds)
            found = await self._held_by({each.holder for each in holds})
            # Another process may have deleted a holder, and created it again, since this one knew it.
            if not any(_has_room(found.get(each.holder), each) for each in holds):
                return [each.entry in found[each.holder].get(each.list, ()) for each in holds]
            for holder in {each.holder for each in holds} - found.keys():
                self._known_holders.pop(holder, None)

    async def _all_match(self, writes: Sequence[UpdateOne]) -> bool:
        """Make changes of holders. Return whether each of them has found its holder as it expects it."""
        done = await self._holders.bulk_write(list(writes), ordered=False)
        return bool(done.matched_count == len(writes))

    def _add(self, hold: Hold, entries: Sequence[str]) -> UpdateOne:
        """Return the change that adds entries to the list of a hold: all of them, or none if they are more than fit."""
        holder: Fields = {"_id": self._holder_id(hold.holder)}
        if hold.cap is None:
            return UpdateOne(holder, {"$addToSet": {hold.list: {"$each": list(entries)}}})
        new = {hold.list: {"$nin": list(entries)}}
        free = {f"{hold.list}.{hold.cap - len(entries)}": {"$exists": False}}
        return UpdateOne({**holder, **new, **free}, {"$push": {hold.list: {"$each": list(entries)}}})

    def _holder_id(self, holder: str) -> str:
        return f"{self._key}/{holder}"

    async def _create_holders(self, holders: Collection[str]) -> None:
        """Create the documents that are missing. A process remembers those that exist."""
        missing = sorted(set(holders) - self._known_holders.keys())
        if missing:
            documents = [{"_id": self._holder_id(holder), "held": [], "active": []} for holder in missing]
            try:
                await self._holders.insert_many(documents, ordered=False)
            except BulkWriteError as error:
                duplicate_indexes(error)
            self._known_holders.update(dict.fromkeys(missing, True))

    async def _held_by(self, holders: Collection[str]) -> dict[str, Fields]:
        """Return the lists of those of these holders that exist."""
        ids = sorted(map(self._holder_id, holders))
        found = self._holders.find({"_id": {"$in": ids}}, {"held": 1, "active": 1}).limit(len(ids))
        return {each["_id"].removeprefix(f"{self._key}/"): each async for each in found}

    @translate_errors
    async def release(self, holds: Iterable[tuple[str, str, str]]) -> None:
        """Remove entries from lists of holders: holder, list and entry. Entries that are missing are ignored."""
        pulls: dict[str, dict[str, list[str]]] = {}
        for holder, name, entry in holds:
            pulls.setdefault(self._holder_id(holder), {}).setdefault(name, []).append(entry)
        writes = [
            UpdateOne({"_id": id}, {"$pull": {name: {"$in": entries} for name, entries in lists.items()}})
            for id, lists in pulls.items()
        ]
        if writes:
            await self._holders.bulk_write(writes, ordered=False)

    @translate_errors
    async def active_counts(self, holders: Collection[str]) -> dict[str, int]:
        """Return how many requests each of these holders has active."""
        ids = [self._holder_id(holder) for holder in holders]
        found = self._holders.find({"_id": {"$in": ids}}, {"active": 1}).limit(max(1, len(ids)))
        return {each["_id"].removeprefix(f"{self._key}/"): len(each["active"]) async for each in found}

    @translate_errors
    async def top_users(self, most: int) -> list[tuple[str, int, int]]:
        """Return the users with the most requests: how many they have, pending and active together, and active."""
        users = self._range("u/")
        pipeline: list[Fields] = [
            {"$match": {"_id": users, "held.0": {"$exists": True}}},
            {"$project": {"held": {"$size": "$held"}, "active": {"$size": "$active"}}},
            {"$sort": {"held": -1, "_id": 1}},
            {"$limit": most},
        ]
        found = await aggregated(self._holders, pipeline)
        return [(each["_id"].removeprefix(f"{self._key}/"), each["held"], each["active"]) for each in found]

    async def all_holders(self) -> AsyncIterator[tuple[str, dict[str, list[str]]]]:
        """Yield each holder with its lists."""
        after = ""
        while page := await self._holders_after(after):
            for each in page:
                after = each["_id"].removeprefix(f"{self._key}/")
                yield after, {name: each.get(name, []) for name in ("held", "active")}

    @translate_errors
    async def _holders_after(self, holder: str) -> list[Fields]:
        wanted = {**self._range(""), "$gt": self._holder_id(holder)}
        found = self._holders.find({"_id": wanted}, {"held": 1, "active": 1}).sort("_id", ASCENDING)
        return [each async for each in found.limit(_MANY)]

    @translate_errors
    async def drop_idle_holders(self) -> None:
        """Delete the holders that hold nothing. They are created again when they are needed."""
        await self._holders.delete_many({"_id": self._range(""), "held": [], "active": []})

    def _range(self, kind: str) -> Fields:
        """Return the condition that an id is that of a holder of this queue, of a kind."""
        prefix = f"{self._key}/{kind}"
        return {"$gte": prefix, "$lt": f"{prefix[:-1]}0"}

    # --- counters

    @translate_errors
    async def counters(self) -> Fields:
        """Return the counters of the queue."""
        found: Fields = await self._queues.find_one({"_id": self.queue}, {"key_secret": 0}) or dict(_COUNTERS)
        return found

    @translate_errors
    async def used(self) -> Fields:
        """Return how many requests the counters have as `pending` and `active`."""
        found: Fields | None = await self._queues.find_one({"_id": self.queue}, {"pending": 1, "active": 1})
        return found or dict(_COUNTERS)

    @translate_errors
    async def count(self, change: CounterChange) -> Fields | None:
        """Change the counters, and return them; None if a condition of the change is not met.

        A change that begins or ends a step is made once, however often it is called.
        """
        counters: Fields | None = await self._queues.find_one_and_update(
            {"_id": self.queue, **_conditions(change)},
            _increments(change),
            projection={"key_secret": 0},
            return_document=ReturnDocument.AFTER,
        )
        return counters

    @translate_errors
    async def open_session(self, session: str) -> None:
        """Begin a session, which has no renewals yet."""
        await self._queues.update_one({"_id": self.queue}, {"$set": {f"sessions.{session}": 0}})

    @translate_errors
    async def close_session(self, session: str, renewal: int | None = None) -> bool:
        """End a session, so that it changes no counters any more; with `renewal`, unless it was renewed again since."""
        same = {"_id": self.queue, f"sessions.{session}": {"$exists": True} if renewal is None else renewal}
        done = await self._queues.update_one(same, {"$unset": {f"sessions.{session}": 1}})
        return bool(done.modified_count)

    # --- events

    @translate_errors
    async def send_events(self) -> None:
        """Let the events of requests from now on be kept until a process has sent them."""
        await self._queues.update_one({"_id": self.queue}, {"$set": {"sends_events": True}})

    @translate_errors
    async def sends_events(self) -> bool:
        """Return whether the events of requests are to be sent."""
        found = await self._queues.find_one({"_id": self.queue}, {"sends_events": 1}) or {}
        return bool(found.get("sends_events"))

    @translate_errors
    async def unsent(self, limit: int = _MANY) -> list[Fields]:
        """Return requests with events that have not been sent, without their bodies."""
        found = self._items.find({"unsent": self.queue}, dict(_WITHOUT_BODY)).limit(limit)
        return [item async for item in found]

    @translate_errors
    async def mark_sent(self, sent: Mapping[tuple[str, str], int]) -> None:
        """Note up to which number the events of requests, given with their places, have been sent.

        Further events may have been added meanwhile. A request that was submitted again has another place.
        """
        if not sent:
            return
        all_sent = [
            UpdateOne(
                {"_id": id, "place": place, f"events.{number}": {"$exists": False}},
                {"$set": {"sent": number}, "$unset": {"unsent": 1}},
            )
            for (id, place), number in sent.items()
        ]
        done = await self._items.bulk_write(all_sent, ordered=False)
        if done.matched_count < len(sent):
            some_sent = [
                UpdateOne({"_id": id, "place": place, "sent": {"$lt": number}}, {"$set": {"sent": number}})
                for (id, place), number in sent.items()
            ]
            await self._items.bulk_write(some_sent, ordered=False)

    # --- reports

    @translate_errors
    async def oldest(self) -> float | None:
        """Return when the oldest waiting request was submitted."""
        waiting = {"queue": self.queue, "state": State.QUEUED.value, "queued_at": {"$gt": 0}}
        found = self._items.find(waiting, {"queued_at": 1}).sort("queued_at", ASCENDING).limit(1)
        async for item in found:
            return float(item["queued_at"])
        return None

    @translate_errors
    async def count_items(self, wanted: Fields) -> int:
        """Return the number of requests that match, at most `COUNTED`."""
        return int(await self._items.count_documents({"queue": self.queue, **wanted}, limit=COUNTED))


class AdmittedTasks:
    """Ends the requests of tasks that close. It costs nothing in a database in which no queue has been used."""

    def __init__(self, db: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._db = durable(db)
        self._clock = clock
        self._look_again_at: float | None = 0.0
        """When to look again whether there is a queue; None if there is one."""

    @translate_errors
    async def end(self, close: CloseTask) -> None:
        """End the request of a task that has closed. It then owes its slot."""
        task_id, place, at = close.task_id, close.admitted_as, close.at
        if place is None or not await self._is_used():
            return
        item = await self._db.admission_items.find_one({"_id": task_id}, dict(_BRIEF))
        if item is None or item["place"] != place or State(item["state"]) in ENDED:
            return
        report = rules.report_of(close.status, close.reason)
        unsent = {"unsent": item["queue"]} if item.get("relayed") else {}
        open_states = {"$in": [State.STARTING.value, State.ACTIVE.value]}
        await self._db.admission_items.update_one(
            {"_id": task_id, "place": place, "state": open_states},
            {
                "$set": {**rules.ending(item, report, at), **unsent},
                "$push": {"events": rules.ended(item, at, report.state, close.reason or "")},
                "$inc": {"v": 1},
            },
        )

    async def _is_used(self) -> bool:
        if self._look_again_at is not None and self._clock() >= self._look_again_at:
            used = await self._db.admission_queues.find_one({}, {"_id": 1}) is not None
            self._look_again_at = None if used else self._clock() + _LOOK_AGAIN_SEC
        return self._look_again_at is None


def _together(holds: Iterable[Hold]) -> Iterator[tuple[Hold, list[str]]]:
    """Yield the entries of each list, with a hold that says which.

    Those of a list that cannot have all come one by one.
    """
    groups: dict[Hold, list[str]] = {}
    for each in holds:
        groups.setdefault(replace(each, entry=""), []).append(each.entry)
    for same, entries in groups.items():
        if same.cap is None or len(entries) <= same.cap:
            yield same, entries
        else:
            yield from ((same, [entry]) for entry in entries)


def _has_room(holder: Fields | None, hold: Hold) -> bool:
    """Return whether an entry is not in the list of its holder, and would fit."""
    entries = [] if holder is None else holder.get(hold.list, [])
    return hold.entry not in entries and (holder is None or hold.cap is None or len(entries) < hold.cap)


def _field(name: str) -> str:
    """Return a name as the name of a field, which has no dots."""
    return name.replace("%", "%25").replace(".", "%2E").replace("$", "%24")


def _named(name: str) -> str:
    return name.replace("%24", "$").replace("%2E", ".").replace("%25", "%")


def _conditions(change: CounterChange) -> Fields:
    met: Fields = {f"sessions.{change.session}": {"$exists": True}}
    met |= {f"doubt.{token}": {"$exists": False} for token in change.doubt}
    met |= {f"doubt.{token}": {"$exists": True} for token in change.ended}
    if change.max_pending is not None:
        met["pending"] = {"$lte": change.max_pending - _net(change)}
    if change.max_active is not None:
        met["active"] = {"$lte": change.max_active - change.active + change.freed}
    return met


def _net(change: CounterChange) -> int:
    return sum(change.taken.values()) - sum(change.returned.values())


def _increments(change: CounterChange) -> Fields:
    steps = {
        "pending": _net(change),
        "active": change.active - change.freed,
        "seq": sum(change.taken.values()),
    }
    for sign, ranks in ((1, change.taken), (-1, change.returned), (1, change.shifted), (1, change.moved)):
        for rank, number in ranks.items():
            steps[f"bands.{rank}"] = steps.get(f"bands.{rank}", 0) + sign * number
    update: Fields = {"$inc": {name: step for name, step in steps.items() if step} or {"seq": 0}}
    values: Fields = {f"doubt.{token}": entry for token, entry in change.doubt.items()}
    if change.renewal is not None:
        values[f"sessions.{change.session}"] = change.renewal
    if values:
        update["$set"] = values
    if change.ended:
        update["$unset"] = {f"doubt.{token}": 1 for token in change.ended}
    if change.services:
        update["$push"] = {"services": {"$each": list(change.services), "$slice": -KEPT_SERVICES}}
    return update
