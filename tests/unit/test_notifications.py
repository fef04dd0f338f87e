"""Within a process: artifact notifications wake their subscribers, and readers of batches share a memory budget."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, nullcontext
from typing import TYPE_CHECKING

import pytest
from tests.integration.harness import EVENT_TIMEOUT_SEC as TIMEOUT_SEC
from tests.integration.harness import wait_seconds

from flowkit.activities.batches.puller import ByteBudget
from flowkit.adapters.entries import Entry
from flowkit.adapters.notifier import MOST_KEPT, ArtifactNotifier, Listener, waits_for_others

if TYPE_CHECKING:
    from collections.abc import Coroutine

LONG = 3_600.0


async def let_tasks_run() -> None:
    """Run everything that is ready."""
    for _ in range(20):
        await wait_seconds(0)


async def in_time(work: Coroutine[None, None, None] | asyncio.Task[None]) -> None:
    """Wait for something that should happen soon."""
    await asyncio.wait_for(work, TIMEOUT_SEC)


async def is_notified(subscription: Listener[Entry]) -> bool:
    """Return whether a notification has arrived."""
    waiting = asyncio.create_task(subscription.wait(LONG))
    await let_tasks_run()
    waiting.cancel()
    return waiting.done()


# --- notifications ----------------------------------------------------------------------------------------------


async def test_notification_ends_the_wait() -> None:
    subscription = Listener[Entry]()
    waiting = asyncio.create_task(subscription.wait(LONG))
    await let_tasks_run()
    assert not waiting.done()
    subscription.notify("a", None)
    await in_time(waiting)


async def test_notification_before_the_wait_is_not_missed() -> None:
    subscription = Listener[Entry]()
    subscription.notify("a", None)
    await in_time(subscription.wait(LONG))


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancel_is_not_lost_if_a_notification_arrives_at_the_same_time(turns: int) -> None:
    subscription, over = Listener[Entry](), asyncio.Event()

    async def follow() -> None:
        await subscription.wait(LONG)
        await over.wait()

    following = asyncio.create_task(follow())
    await let_tasks_run()
    subscription.notify("a", None)
    for _ in range(turns):
        await wait_seconds(0)
    following.cancel()
    await let_tasks_run()
    assert following.cancelled()


async def test_wait_without_a_notification_ends_at_its_maximum() -> None:
    await in_time(Listener[Entry]().wait(0.05))
    await in_time(Listener[Entry]().wait(0))


async def test_wait_that_is_cut_short_asks_for_a_read() -> None:
    subscription = Listener[Entry]()
    token = waits_for_others.set(lambda: nullcontext(0.01))
    try:
        await in_time(subscription.wait(LONG))
    finally:
        waits_for_others.reset(token)
    assert subscription.take() == ([], True)


async def test_notification_is_taken_once() -> None:
    subscription = Listener[Entry]()
    subscription.notify("a", Entry("b1", 7))
    subscription.notify("b", None)
    await in_time(subscription.wait(LONG))
    assert subscription.take() == ([("a", Entry("b1", 7))], True)
    assert subscription.take() == ([], False)
    assert not await is_notified(subscription)


async def test_subscription_keeps_a_limited_number_of_rows_and_asks_for_a_read_of_the_others() -> None:
    subscription = Listener[Entry]()
    for number in range(MOST_KEPT + 5):
        subscription.notify("a", Entry(f"b{number}", 7))
    rows, must_read = subscription.take()
    assert (len(rows), must_read) == (MOST_KEPT, True)


async def test_subscriber_gets_notifications_of_its_nodes_only() -> None:
    room = ArtifactNotifier()
    with room.listener("t", ["a", "b"]) as subscription:
        for task_id, node in (("t", "c"), ("other", "a"), ("", "")):
            room.notify(task_id, node)
        assert not await is_notified(subscription)
        room.notify("t", "b", Entry("b1", 7))
        await in_time(subscription.wait(LONG))
        assert subscription.take() == ([("b", Entry("b1", 7))], False)


async def test_all_subscribers_of_a_node_are_notified() -> None:
    room = ArtifactNotifier()
    with room.listener("t", ["a"]) as one, room.listener("t", ["a", "b"]) as other:
        room.notify("t", "a")
        await in_time(one.wait(LONG))
        await in_time(other.wait(LONG))


async def test_unsubscribed_reader_gets_no_notifications_and_leaves_no_entry() -> None:
    room = ArtifactNotifier()
    with room.listener("t", ["a"]) as kept:
        with pytest.raises(ValueError, match="over"), room.listener("t", ["a", "b"]) as gone:
            raise ValueError("over")
        room.notify("t", "a")
        assert not await is_notified(gone)
        await in_time(kept.wait(LONG))
    assert room._listeners == {}


# --- the memory budget --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "readers", "share"), [(100, 4, 25), (100, 0, 100), (3, 10, 1)])
def test_share_is_the_budget_of_one_of_all_readers(limit: int, readers: int, share: int) -> None:
    assert ByteBudget(limit, readers).share == share


async def hold(budget: ByteBudget, size: int, until: asyncio.Event) -> None:
    """Hold a number of bytes until the test releases them."""
    async with budget.hold(size):
        await until.wait()


async def test_reader_that_does_not_fit_waits_until_enough_is_released() -> None:
    budget, release = ByteBudget(100, 1), asyncio.Event()
    first = asyncio.create_task(hold(budget, 60, release))
    await let_tasks_run()
    async with budget.hold(40):
        second = asyncio.create_task(in_time(hold(budget, 50, release)))
        await let_tasks_run()
    await let_tasks_run()
    assert not second.done()
    release.set()
    await in_time(first)
    await in_time(second)


async def test_reader_larger_than_the_budget_is_admitted_alone() -> None:
    budget, release = ByteBudget(100, 1), asyncio.Event()
    small = asyncio.create_task(hold(budget, 1, release))
    await let_tasks_run()
    entered = asyncio.create_task(hold(budget, 10**9, release))
    await let_tasks_run()
    assert not entered.done()
    release.set()
    await in_time(small)
    await in_time(entered)


async def test_early_release_admits_waiting_readers() -> None:
    budget, release = ByteBudget(100, 1), asyncio.Event()
    async with budget.hold(100) as held:
        waiting = asyncio.create_task(hold(budget, 60, release))
        held.keep(50)
        await let_tasks_run()
        assert not waiting.done()
        assert budget._used == 50
        held.keep(40)
        held.keep(70)
        await let_tasks_run()
        assert budget._used == 40 + 60, "a hold never grows"
    release.set()
    await in_time(waiting)
    assert budget._used == 0


async def test_failed_reader_releases_what_it_held() -> None:
    budget = ByteBudget(100, 1)
    with pytest.raises(ValueError, match="broken"):
        async with budget.hold(100):
            raise ValueError("broken")
    await in_time(hold(budget, 100, set_event()))


async def test_reader_that_stops_waiting_reserves_nothing() -> None:
    budget, release = ByteBudget(100, 1), asyncio.Event()
    holder = asyncio.create_task(hold(budget, 100, release))
    await let_tasks_run()
    waiting = asyncio.create_task(hold(budget, 100, release))
    await let_tasks_run()
    waiting.cancel()
    release.set()
    await in_time(holder)
    await in_time(hold(budget, 100, set_event()))


async def test_reader_cancelled_during_its_release_leaves_nothing_reserved() -> None:
    budget, release = ByteBudget(100, 1), asyncio.Event()
    holder = asyncio.create_task(hold(budget, 100, release))
    await let_tasks_run()
    holder.cancel()
    await let_tasks_run()
    await in_time(hold(budget, 100, set_event()))


async def test_many_readers_make_progress_within_the_limit() -> None:
    budget, held, most = ByteBudget(100, 4), 0, 0

    async def read(size: int) -> None:
        nonlocal held, most
        for _ in range(20):
            async with budget.hold(size):
                held += size
                most = max(most, held)
                await let_tasks_run()
                held -= size

    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(asyncio.TaskGroup())
        for size in (10, 25, 40, 90, 100):
            group.create_task(in_time(read(size)))
    assert (held, most <= 100) == (0, True)


def set_event() -> asyncio.Event:
    """Return an event that is set already."""
    event = asyncio.Event()
    event.set()
    return event
