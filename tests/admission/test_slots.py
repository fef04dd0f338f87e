"""Who gets a slot: order and limits of users and tenants, also while limits come and go."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.admission.models import Door, Kind, Limits, Override, Report, Request, State
from flowkit.admission.queue import LIMITS_SEC, AdmissionQueue
from flowkit.admission.store import AdmissionStore
from flowkit.models.admission import Priority
from flowkit.testing import memory_database
from tests.admission.memory import MemoryStore, Shared

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterable, Sequence
    from typing import Self

    from flowkit.admission.store import Hold


class Clock:
    """A clock that tests set forward."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


class Play:
    """A queue in memory, used by one process at a time."""

    def __init__(self, limits: Limits) -> None:
        self.shared, self.clock, self._sessions = Shared(), Clock(), 0
        self.shared.limits = limits
        self.queue = self.new_process()

    def new_process(self, kind: type[MemoryStore] = MemoryStore) -> AdmissionQueue:
        """Return the queue as another process sees it."""
        store: Any = kind(self.shared)
        return AdmissionQueue(store, clock=self.clock, steady=self.clock, new_id=self._new_id)

    async def prepared(self) -> Self:
        """Create what the store needs."""
        return self

    def _new_id(self) -> str:
        self._sessions += 1
        return f"s{self._sessions}"

    async def submit(self, *ids: str, tenant: str = "default") -> list[bool]:
        """Submit requests, whose first letter is their user. Return which were accepted."""
        tickets = []
        for id in ids:
            request = Request(
                execution_id=id, user_id=id[0], tenant=tenant, door=Door.PYTHON, kind=Kind.EXECUTION, body={}
            )
            tickets.append(await self.queue.submit(request))
        return [ticket.accepted for ticket in tickets]

    async def dispatch(self, times: int = 1) -> list[str]:
        """Return the ids of the requests that got slots."""
        return [item["_id"] for _ in range(times) for item in await self.queue.dispatch()]

    async def end(self, ids: Iterable[str]) -> None:
        """Let requests end at once."""
        await asyncio.gather(*(self.queue.report(id, Report(state=State.COMPLETED)) for id in ids))

    def set_limits(self, limits: Limits) -> None:
        """Change the limits, and let the time pass after which every process uses them."""
        self.shared.limits = limits
        self.clock.now += LIMITS_SEC


class StoredPlay(Play):
    """The same with the store of MongoDB, on a database in memory."""

    def __init__(self, limits: Limits) -> None:
        self._database = memory_database()
        super().__init__(limits)

    def new_process(self, kind: object = None) -> AdmissionQueue:
        """Return the queue as another process sees it."""
        store = LimitsOf(self._database, queue="q")
        store.shared = self.shared
        return AdmissionQueue(store, clock=self.clock, steady=self.clock, new_id=self._new_id)

    async def prepared(self) -> Self:
        """Create what the store needs."""
        await self.queue.store.prepare()
        return self


class LimitsOf(AdmissionStore):
    """A store whose limits are those of a play."""

    shared: Shared

    async def limits(self) -> Limits:
        """Return the limits."""
        return self.shared.limits


on_both_stores = pytest.mark.parametrize("kind", [Play, StoredPlay], ids=["memory", "mongodb"])
"""For tests that compare the two stores."""


def ids(letter: str, numbers: Sequence[int]) -> list[str]:
    """Return the ids of some requests of a user."""
    return [f"{letter}{number}" for number in numbers]


async def test_all_slots_that_a_user_gives_back_together_go_to_its_next_requests() -> None:
    play = Play(Limits(max_active=10, max_active_per_user=8))
    await play.submit(*ids("a", range(30)))
    assert await play.dispatch(2) == ids("a", range(8))
    await play.submit(*ids("b", range(12)))
    assert await play.dispatch() == ["b0", "b1"]
    await play.end(ids("a", range(8)))
    assert await play.dispatch(2) == ids("a", range(8, 16))


@pytest.mark.parametrize("limits", [Limits(max_active=100, max_active_per_user=50), Limits(max_active=100)])
async def test_a_limit_that_is_raised_or_removed_frees_all_at_once(limits: Limits) -> None:
    play = Play(Limits(max_active=100, max_active_per_user=1))
    await play.submit(*ids("a", range(70)))
    assert await play.dispatch(3) == ["a0"]
    play.set_limits(limits)
    allowed = limits.max_active_per_user or 70
    assert await play.dispatch() == ids("a", range(1, allowed))


@on_both_stores
async def test_the_next_user_of_a_tenant_starts_if_the_first_one_is_full(kind: type[Play]) -> None:
    limits = Limits(max_active=9, max_active_per_user=2, tenants={"shop": Override(max_active=3)})
    play = await kind(limits).prepared()
    await play.submit("b0", *ids("a", range(40)), *ids("c", range(2)), tenant="shop")
    assert await play.dispatch() == ["b0", "a0", "a1"]
    await play.end(["b0"])
    assert await play.dispatch(2) == ["c0"]


@on_both_stores
async def test_a_request_that_ends_while_it_is_next_leaves_its_turn_to_the_one_after_it(
    kind: type[Play],
) -> None:
    play = await kind(Limits(max_active=2, max_active_per_user=1)).prepared()
    await play.submit("a0", "a1", "a2", "b0")
    assert await play.dispatch() == ["a0", "b0"]
    await play.submit("c0")
    await play.end(["a0"])
    await play.queue.cancel("a1", reason="test", by="me")
    assert await play.dispatch(2) == ["a2"]


class EndsBeforeItCounts(MemoryStore):
    """A store in which requests end after a process has read what is ready, and before it reads what is active."""

    ends: Sequence[str] = ()

    async def active_counts(self, holders: Collection[str]) -> dict[str, int]:
        """Let the requests end at another process, which wakes the next ones."""
        ended, self.ends = self.ends, ()
        if ended:
            other: Any = MemoryStore(self._shared)
            queue = AdmissionQueue(other, clock=lambda: 1_000.0, new_id=lambda: "other")
            await asyncio.gather(*(queue.report(id, Report(state=State.COMPLETED)) for id in ended))
        return await super().active_counts(holders)


@pytest.mark.parametrize("holder", ["user", "tenant"])
async def test_a_request_that_is_woken_during_a_dispatch_starts_before_a_later_one(holder: str) -> None:
    own = {"default": Override(max_active=1)} if holder == "tenant" else {}
    play = Play(Limits(max_active=9, max_active_per_user=None if own else 1, tenants=own))
    await play.submit("a1", "a2")
    assert await play.dispatch(2) == ["a1"]
    await play.submit("a3")
    play.queue = play.new_process(EndsBeforeItCounts)
    store: Any = play.queue.store
    store.ends = ["a1"]
    assert await play.dispatch() == ["a2"]
    assert await play.dispatch() == []


@on_both_stores
async def test_what_waits_before_a_place_is_found_where_it_waits(kind: type[Play]) -> None:
    play = await kind(Limits(max_active=1, max_active_per_user=1)).prepared()
    await play.submit("a1", "a2", "a3", "b1", "b2", "c1")
    assert await play.dispatch(2) == ["a1"]
    store, rank = play.queue.store, Priority.NORMAL.rank
    await store.park("u/default/a", keep=[])
    found = await store.waiting_before({"u/default/a": (rank, 3), None: (rank, 6)}, known=["b1"])
    assert {item["_id"] for item in found} == {"a2", "b2"}
    assert not await store.waiting_before({"u/default/a": (rank, 2), None: (rank - 1, 6)}, known=())


class RefusesTheFirst(MemoryStore):
    """A store in which the first entry of a user does not fit, and the user has room for the next one."""

    refuses = False

    async def hold(self, holds: Sequence[Hold]) -> list[bool]:
        """Add the entries, but for the first one."""
        if not self.refuses or holds[0].list != "active":
            return await super().hold(holds)
        return [False, *await super().hold(holds[1:])]


async def test_a_request_does_not_start_if_an_earlier_one_of_its_user_got_no_room_with_it() -> None:
    play = Play(Limits(max_active=9, max_active_per_user=2))
    play.queue = play.new_process(RefusesTheFirst)
    store: Any = play.queue.store
    await play.submit("a1", "a2", "b1")
    store.refuses = True
    assert await play.dispatch() == ["b1"]
    store.refuses = False
    assert await play.dispatch() == ["a1", "a2"]


# --- new limits


async def test_a_request_that_waits_apart_starts_before_a_later_one_of_its_user_though_no_end_has_woken_it() -> (
    None
):
    play = Play(Limits(max_active=9, max_active_per_user=1))
    await play.submit("a1", "a2")
    assert await play.dispatch(2) == ["a1"]
    # A process ends a1, and stops before it lets a2 become ready.
    await play.end(["a1"])
    play.shared.items["a2"]["lane"] = "u/default/a"
    play.shared.lanes["u/default/a"].append((3, play.shared.items["a2"]["seq"], "a2"))
    await play.submit("a3")
    assert await play.dispatch() == ["a2"]
    assert await play.dispatch() == []
    await play.end(["a2"])
    assert await play.dispatch() == ["a3"]


@on_both_stores
async def test_a_new_limit_of_a_user_counts_what_is_active(kind: type[Play]) -> None:
    play = await kind(Limits(max_active=10)).prepared()
    await play.submit("a0", "a1")
    assert await play.dispatch() == ["a0", "a1"]
    await play.submit("a2", "a3")
    play.set_limits(Limits(max_active=10, max_active_per_user=2))
    play.queue = play.new_process()
    assert await play.dispatch(2) == []
    await play.end(["a1"])
    assert await play.dispatch(2) == ["a2"]


@on_both_stores
@pytest.mark.parametrize("restarts", [False, True])
async def test_a_new_limit_of_a_tenant_counts_what_waits_and_is_active(
    kind: type[Play], restarts: bool
) -> None:
    play = await kind(Limits(max_active=3)).prepared()
    await play.submit(*ids("a", range(5)), tenant="shop")
    assert await play.dispatch() == ids("a", range(3))
    play.set_limits(Limits(max_active=9, tenants={"shop": Override(max_total=6, max_active=3)}))
    if restarts:
        play.queue = play.new_process()
        await play.queue.keep_records()
    assert await play.submit("b0", "b1", tenant="shop") == [True, False]
    assert await play.dispatch(2) == []
    await play.end(["a0", "a1"])
    assert await play.dispatch(2) == ["a3", "a4"]
    assert await play.submit("b2", "b3", "b4", tenant="shop") == [True, True, False]


async def test_what_a_process_starts_that_does_not_know_a_new_limit_yet_is_counted_later() -> None:
    play = Play(Limits(max_active=9))
    late = play.new_process()
    await play.queue.keep_records()
    await late.limits()
    play.clock.now += LIMITS_SEC / 2
    play.shared.limits = Limits(max_active=9, tenants={"shop": Override(max_active=1)})
    first, play.queue = play.queue, late
    await play.submit("a0", tenant="shop")
    play.clock.now += LIMITS_SEC / 2 - 0.1
    assert await play.dispatch() == ["a0"]
    play.queue = first
    play.clock.now += 0.2
    await play.queue.keep_records()
    play.clock.now += 2 * LIMITS_SEC
    await play.queue.keep_records()
    await play.submit("a1", tenant="shop")
    assert await play.dispatch() == []


class EndsMeanwhile(MemoryStore):
    """A store in which requests end after a process has read that they are open."""

    async def open_items(self, tenants: Any) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield the requests, and let them end."""
        async for items in super().open_items(tenants):
            other: Any = MemoryStore(self._shared)
            queue = AdmissionQueue(other, clock=lambda: 1_000.0)
            for item in items:
                await queue.report(item["_id"], Report(state=State.COMPLETED))
            await queue.dispatch()
            yield items


async def test_a_request_that_ends_while_it_is_recorded_holds_nothing() -> None:
    play = Play(Limits())
    await play.submit("a0", tenant="shop")
    await play.dispatch()
    play.set_limits(Limits(tenants={"shop": Override(max_active=1)}))
    await play.new_process(EndsMeanwhile).keep_records()
    assert not play.shared.holders["t/shop"]["active"]


# --- entries that are left behind


class OpensMeanwhile(MemoryStore):
    """A store whose process opens its session, and adds an entry, while another one sweeps."""

    opens: Any

    async def all_holders(self) -> AsyncIterator[tuple[str, dict[str, list[str]]]]:
        """Let the other process begin, then yield the holders."""
        await self.opens()
        async for found in super().all_holders():
            yield found


class Halted(MemoryStore):
    """A store whose process halts between the entry for a slot and the change of its request."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()

    async def update(self, updates: Any, marker: tuple[str, Any]) -> set[str]:
        """Wait, if it is about slots."""
        if marker[0] == "slot":
            self.begun.set()
            await self.goes_on.wait()
        return await super().update(updates, marker)


async def test_a_sweep_leaves_the_entries_of_a_process_that_has_just_begun() -> None:
    play = Play(Limits(max_active=9, max_active_per_user=1))
    await play.submit("a0", "a1")
    other, sweeper = play.new_process(Halted), play.new_process(OpensMeanwhile)
    stores: Any = other.store, sweeper.store
    pops: list[asyncio.Task[Any]] = []

    async def begin() -> None:
        pops.append(asyncio.create_task(other.dispatch()))
        await stores[0].begun.wait()

    stores[1].opens = begin
    assert await sweeper.drop_stray_holds() == 0
    assert await play.dispatch() == []
    stores[0].goes_on.set()
    assert [item["_id"] for item in await pops[0]] == ["a0"]
