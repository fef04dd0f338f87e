"""A store of admission in memory, whose calls can fail or arrive late, for simulations of many processes in one.

Each method does what that of `AdmissionStore` does, with plain dictionaries. `test_slots` compares the two.
"""

from __future__ import annotations

import asyncio
import copy
import heapq
import sys
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, TypeVar

from flowkit.admission.models import ENDED, PENDING, RUNNING, Limits, State
from flowkit.admission.store import KEPT_SERVICES

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence

    from flowkit.admission.store import CounterChange, Hold, ItemUpdate

Fields = dict[str, Any]
T = TypeVar("T")


async def turn() -> None:
    """Let the other processes of a simulation run."""
    await asyncio.sleep(0)


class Outage(Exception):
    """A call failed. It may have been made, or may be made later."""


class Shared:
    """What all processes share."""

    def __init__(self) -> None:
        self.items: dict[str, Fields] = {}
        self.holders: dict[str, dict[str, list[str]]] = defaultdict(lambda: {"held": [], "active": []})
        self.counters: Fields = {
            "pending": 0,
            "active": 0,
            "seq": 0,
            "bands": {},
            "sessions": {},
            "doubt": {},
            "services": [],
        }
        self.limits = Limits()
        self.ready: list[tuple[int, int, str]] = []
        """A heap of rank, number and id of the requests that may be ready."""
        self.lanes: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        self.owing: dict[str, None] = {}
        self.in_state: dict[str, dict[str, None]] = {state: {} for state in (*PENDING, *RUNNING)}
        """The ids of the requests in each state, without those that have ended."""
        self._states: dict[str, str] = {}
        self.full: Counter[str] = Counter()
        """How often the list `active` of a holder has become full, had no room for an entry, or has lost one."""
        self.parked: Counter[str] = Counter()
        """How often requests were parked in the lane of a holder."""
        self.slots_full = 0
        """How often all slots were taken by a change, or were too few for one."""
        self.late: list[Callable[[], object]] = []
        """Calls that failed at their process, and arrive later."""

    def changed(self, item: Fields) -> None:
        """Keep the indexes up to date after a change of a request."""
        id = item["_id"]
        if item["state"] == State.QUEUED:
            lane = self.ready if item["lane"] is None else self.lanes[item["lane"]]
            heapq.heappush(lane, (item["rank"], item["seq"], id))
        self.owing.pop(id, None)
        if item.get("owes"):
            self.owing[id] = None
        if self._states.get(id) != item["state"]:
            self._forget(id)
            self._states[id] = item["state"]
            self.in_state.get(item["state"], {})[id] = None

    def _forget(self, id: str) -> None:
        self.in_state.get(self._states.pop(id, ""), {}).pop(id, None)

    def delete(self, id: str) -> None:
        """Delete a request that owes nothing."""
        del self.items[id]
        self._forget(id)

    def of(self, *states: State) -> list[Fields]:
        """Return the requests in these states, none of which is an end."""
        return [self.items[id] for state in states for id in self.in_state[state]]

    def known_counters(self) -> Fields:
        """Return the counters as they are now. What a step concerns never changes, so it is not copied."""
        return {
            name: copy.copy(value) if isinstance(value, (dict, list)) else value
            for name, value in self.counters.items()
        }

    def first(self, lane: str | None, limit: int) -> list[Fields]:
        """Return the first waiting requests of a lane."""
        heap = self.ready if lane is None else self.lanes[lane]
        found: list[Fields] = []
        ids: set[str] = set()
        while heap and len(found) < limit:
            rank, seq, id = heapq.heappop(heap)
            item = self.items.get(id)
            if item is None:
                continue
            current = (item["state"], item["lane"], item["rank"], item.get("seq"))
            if current == (State.QUEUED, lane, rank, seq) and id not in ids:
                ids.add(id)
                found.append(item)
        for item in found:
            heapq.heappush(heap, (item["rank"], item["seq"], item["_id"]))
        return found


class MemoryStore:
    """The store as one process sees it.

    With `faults`, each call may fail before or after it is made, or arrive late.
    """

    def __init__(
        self, shared: Shared, *, queue: str = "q", faults: float = 0.0, chance: random.Random | None = None
    ):
        self.queue = queue
        self.faults = faults
        self._shared = shared
        self._chance = chance

    async def _call(self, make: Callable[[], T]) -> T:
        if self._chance is None:
            return make()
        for _ in range(self._chance.randrange(3)):
            await turn()
        if self.faults and self._chance.random() < self.faults:
            fate = self._chance.random()
            if fate < 0.4:
                make()
            elif fate < 0.7:
                self._shared.late.append(make)
            raise Outage
        return make()

    # --- requests

    async def limits(self) -> Limits:
        return self._shared.limits

    async def sends_events(self) -> bool:
        return True

    async def insert(self, items: Sequence[Fields]) -> set[str]:
        def make() -> set[str]:
            known = {item["_id"] for item in items if item["_id"] in self._shared.items}
            for item in items:
                if item["_id"] not in known:
                    self._shared.items[item["_id"]] = {**item, "events": list(item["events"])}
                    self._shared.changed(item)
            return known

        return await self._call(make)

    async def bodies(self, ids: Collection[str]) -> dict[str, Fields]:
        return await self._call(
            lambda: {id: self._shared.items[id]["body"] for id in sorted(ids) if id in self._shared.items}
        )

    async def drop_bodies(self, ids: Collection[str], at: float) -> None:
        def make() -> None:
            for id in ids:
                item = self._shared.items.get(id, {"state": ""})
                if item["state"] in ENDED and (item.get("due_at") or at + 1) <= at:
                    item |= {"body": {}, "due_at": None}

        await self._call(make)

    async def load(self, ids: Collection[str], *, events: bool = False) -> dict[str, Fields]:
        return await self._call(
            lambda: {id: dict(self._shared.items[id]) for id in sorted(ids) if id in self._shared.items}
        )

    def _apply(self, update: ItemUpdate) -> Fields | None:
        item = self._shared.items.get(update.id)
        if item is None or item["v"] != update.version:
            return None
        item |= copy.copy(update.set)
        item["v"] += 1
        if update.events:
            item["events"] += update.events
        self._shared.changed(item)
        return dict(item)

    async def update(self, updates: Sequence[ItemUpdate], marker: tuple[str, Any]) -> set[str]:
        name, value = marker

        def make() -> set[str]:
            for each in updates:
                self._apply(each)
            found = (self._shared.items.get(each.id) for each in updates)
            return {item["_id"] for item in found if item is not None and item.get(name) == value}

        return await self._call(make)

    async def change(self, update: ItemUpdate) -> Fields | None:
        return await self._call(lambda: self._apply(update))

    async def first_ready(self, limit: int, *, with_body: bool = True) -> list[Fields]:
        found = await self._call(lambda: [dict(item) for item in self._shared.first(None, limit)])
        return found if with_body else [_without_body(item) for item in found]

    async def waiting_before(
        self, places: Mapping[str | None, tuple[int, int]], *, known: Collection[str]
    ) -> list[Fields]:
        def make() -> list[Fields]:
            waiting = (item for item in self._shared.of(State.QUEUED) if item["lane"] in places)
            earlier = (each for each in waiting if (each["rank"], each["seq"]) < places[each["lane"]])
            return [dict(item) for item in earlier if item["_id"] not in known]

        return await self._call(make)

    async def count_before(self, item: Fields) -> int:
        def make() -> int:
            key = (item["rank"], item["seq"])
            return sum((each["rank"], each["seq"]) < key for each in self._shared.of(State.QUEUED))

        return await self._call(make)

    async def due(self, at: float, limit: int = 500) -> list[Fields]:
        def make() -> list[Fields]:
            waiting = (State.QUEUED, State.STARTING, State.ACTIVE)
            found = (each for state in waiting for each in self._shared.of(state))
            return [dict(each) for each in found if (each.get("due_at") or at + 1) <= at][:limit]

        return await self._call(make)

    async def in_state(self, *states: State, after: str = "", limit: int = 500) -> list[Fields]:
        def make() -> list[Fields]:
            found = (item for state in states for item in self._shared.of(state) if item["_id"] > after)
            return [dict(item) for item in sorted(found, key=lambda item: str(item["_id"]))][:limit]

        return await self._call(make)

    # --- lanes

    async def park(self, holder: str, keep: Collection[str]) -> None:
        def make() -> None:
            kind, tenant, *user_id = holder.split("/", 2)
            self._shared.parked[holder] += 1
            for item in self._shared.of(State.QUEUED):
                lanes = (None, f"t/{tenant}") if kind == "u" else (None,)
                theirs = item["tenant"] == tenant and (kind == "t" or item["user_id"] == user_id[0])
                if theirs and item["lane"] in lanes and item["_id"] not in keep:
                    item["lane"] = holder
                    self._shared.changed(item)

        await self._call(make)

    async def unpark(self, holder: str, most: int | None) -> int:
        def make() -> int:
            found = self._shared.first(holder, sys.maxsize if most is None else most)
            for item in found:
                item["lane"] = None
                self._shared.changed(item)
            return len(found)

        return await self._call(make)

    async def lanes(self) -> list[str]:
        return await self._call(lambda: [lane for lane in self._shared.lanes if self._shared.first(lane, 1)])

    # --- what requests owe

    async def owing(self, limit: int) -> list[Fields]:
        return await self._call(
            lambda: [dict(self._shared.items[id]) for id in list(self._shared.owing)[:limit]]
        )

    async def freeze(self, ids: Collection[str], marker: tuple[str, Any]) -> dict[str, Fields]:
        name, value = marker

        def make() -> dict[str, Fields]:
            found = {id: self._shared.items[id] for id in sorted(ids) if id in self._shared.items}
            for item in found.values():
                item["v"] += item.get(name) != value
            return {id: dict(item) for id, item in found.items()}

        return await self._call(make)

    async def delete(self, id: str, version: int) -> None:
        def make() -> None:
            item = self._shared.items.get(id)
            if item is not None and item["v"] == version:
                self._shared.delete(id)

        await self._call(make)

    async def open_items(self, tenants: Collection[str]) -> AsyncIterator[list[Fields]]:
        def make() -> list[Fields]:
            found = (item for item in self._shared.items.values() if item["tenant"] in tenants)
            open_states = (State.QUEUED, *RUNNING)
            return [dict(item) for item in found if item["state"] in open_states or item.get("owes")]

        yield await self._call(make)

    # --- holders

    async def hold(self, holds: Sequence[Hold]) -> list[bool]:
        def make() -> list[bool]:
            for each in holds:
                entries = self._shared.holders[each.holder][each.list]
                if each.entry not in entries and (each.cap is None or len(entries) < each.cap):
                    entries.append(each.entry)
                if each.list == "active" and each.cap is not None:
                    self._shared.full[each.holder] += each.entry not in entries or len(entries) >= each.cap
            return [each.entry in self._shared.holders[each.holder][each.list] for each in holds]

        return await self._call(make)

    async def release(self, holds: Any) -> None:
        gone = list(holds)

        def make() -> None:
            for holder, name, entry in gone:
                entries = self._shared.holders[holder][name]
                if entry in entries:
                    entries.remove(entry)
                    self._shared.full[holder] += name == "active"

        await self._call(make)

    async def active_counts(self, holders: Collection[str]) -> dict[str, int]:
        return await self._call(
            lambda: {holder: len(self._shared.holders[holder]["active"]) for holder in sorted(holders)}
        )

    async def drop_idle_holders(self) -> None:
        def make() -> None:
            for holder, lists in list(self._shared.holders.items()):
                if not any(lists.values()):
                    del self._shared.holders[holder]

        await self._call(make)

    async def all_holders(self) -> AsyncIterator[tuple[str, dict[str, list[str]]]]:
        for holder, lists in list(self._shared.holders.items()):
            yield holder, {name: list(entries) for name, entries in lists.items()}

    # --- counters

    async def counters(self) -> Fields:
        return await self._call(self._shared.known_counters)

    async def used(self) -> Fields:
        return await self.counters()

    async def count(self, change: CounterChange) -> Fields | None:
        return await self._call(lambda: self._count(change))

    def _count(self, change: CounterChange) -> Fields | None:
        own = self._shared.counters
        if change.max_active is not None:
            self._shared.slots_full += own["active"] + change.active - change.freed >= change.max_active
        net = sum(change.taken.values()) - sum(change.returned.values())
        met = (
            change.session in own["sessions"]
            and not any(token in own["doubt"] for token in change.doubt)
            and all(token in own["doubt"] for token in change.ended)
            and (change.max_pending is None or own["pending"] <= change.max_pending - net)
            and (
                change.max_active is None or own["active"] <= change.max_active - change.active + change.freed
            )
        )
        if not met:
            return None
        own["pending"] += net
        own["active"] += change.active - change.freed
        own["seq"] += sum(change.taken.values())
        for sign, ranks in ((1, change.taken), (-1, change.returned), (1, change.shifted), (1, change.moved)):
            for rank, number in ranks.items():
                own["bands"][str(rank)] = own["bands"].get(str(rank), 0) + sign * number
        own["doubt"] |= copy.deepcopy(dict(change.doubt))
        for token in change.ended:
            del own["doubt"][token]
        own["services"] = [*own["services"], *change.services][-KEPT_SERVICES:]
        if change.renewal is not None:
            own["sessions"][change.session] = change.renewal
        return self._shared.known_counters()

    async def open_session(self, session: str) -> None:
        await self._call(lambda: self._shared.counters["sessions"].update({session: 0}))

    async def close_session(self, session: str, renewal: int | None = None) -> bool:
        def make() -> bool:
            sessions: Mapping[str, int] = self._shared.counters["sessions"]
            if session in sessions and renewal in (None, sessions[session]):
                del self._shared.counters["sessions"][session]
                return True
            return False

        return await self._call(make)


def _without_body(item: Fields) -> Fields:
    return {name: value for name, value in item.items() if name != "body"}
