"""The slots of the concurrency limits: grants are exact, repeatable and ordered."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.adapters.slots import QueueLimits, SlotStore, SlotUsage
from flowkit.models import Slot, SlotRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

NONE = QueueLimits()
AT = 1_763_788_905.25
SLOT = Slot(node_id="n", epoch=1, role="slow")


@pytest.fixture
async def slots(db: Any) -> SlotStore:
    """The slots of one queue."""
    store = SlotStore(db, namespace_id="ns", queue="q")
    await store.prepare()
    return store


def asked(task_id: str, node_id: str = "n", epoch: int = 1, role: str = "slow", **fields: Any) -> SlotRequest:
    """Return a request for a slot."""
    return SlotRequest(
        task_id=task_id, run_id=f"run of {task_id}", node_id=node_id, epoch=epoch, role=role, **fields
    )


async def order(slots: SlotStore, **options: Any) -> list[str]:
    """Return the tasks whose requests wait, in order."""
    return [request.task_id for request in await slots.waiting(**options)]


async def test_grants_stop_at_the_limit_of_the_role_and_at_the_limit_of_all(slots: SlotStore) -> None:
    limits = QueueLimits(total=3, by_role={"slow": 1, "a.b": 2})
    roles = ("slow", "slow", "a.b", "a.b", "other")
    granted = [await slots.grant(asked(f"t{n}", role=role), limits, AT) for n, role in enumerate(roles)]
    assert granted == [True, False, True, True, False]
    assert await slots.usage() == SlotUsage(total=3, by_role={"slow": 1, "a.b": 2})


async def test_repeated_grant_uses_no_second_slot(slots: SlotStore) -> None:
    limits = QueueLimits(total=1)
    assert [await slots.grant(asked("t"), limits, AT) for _ in range(3)] == [True] * 3
    assert (await slots.usage()).total == 1
    assert await slots.renew(asked("t"))
    assert not await slots.renew(asked("t", epoch=2))


async def test_role_may_be_a_number(slots: SlotStore) -> None:
    limits = QueueLimits(by_role={"12": 1})
    assert [await slots.grant(asked(task, role="12"), limits, AT) for task in "ab"] == [True, False]
    assert (await slots.usage()).by_role == {"12": 1}


async def test_release_frees_the_slot_once(slots: SlotStore) -> None:
    await slots.grant(asked("t"), NONE, AT)
    await slots.grant(asked("u"), NONE, AT)
    assert [await slots.release("t", SLOT) for _ in range(2)] == [True, False]
    assert not await slots.release("u", replace(SLOT, epoch=2))
    assert await slots.usage() == SlotUsage(total=1, by_role={"slow": 1})
    assert [holder.key for holder in await slots.holders()] == [("u", "n", 1)]


async def test_check_for_leaks_cannot_free_a_slot_that_its_attempt_has_asked_for_again(
    slots: SlotStore,
) -> None:
    for _ in range(2):
        await slots.grant(asked("t"), NONE, AT)
        (seen,) = await slots.holders()
        assert await slots.renew(asked("t"))
        assert not await slots.release_unused(seen)
        (seen,) = await slots.holders()
        assert await slots.release_unused(seen)
        assert await slots.usage() == SlotUsage(total=0, by_role={"slow": 0})


async def test_lower_limit_lets_holders_keep_their_slots(slots: SlotStore) -> None:
    for task in "abc":
        await slots.grant(asked(task), QueueLimits(by_role={"slow": 3}), AT)
    lower = QueueLimits(by_role={"slow": 1})
    assert not await slots.grant(asked("d"), lower, AT)
    for task in "ab":
        await slots.release(task, SLOT)
    assert not await slots.grant(asked("d"), lower, AT)
    await slots.release("c", SLOT)
    assert await slots.grant(asked("d"), lower, AT)


async def test_holders_are_stored_with_their_run_role_and_time(slots: SlotStore) -> None:
    await slots.grant(asked("t"), NONE, AT)
    (holder,) = await slots.holders()
    assert (holder.run_id, holder.role, holder.at) == ("run of t", "slow", AT)


async def test_end_of_a_task_frees_its_slots_and_withdraws_its_requests(slots: SlotStore) -> None:
    for node in ("a", "b"):
        await slots.grant(asked("t", node), NONE, AT)
    await slots.grant(asked("u"), NONE, AT)
    await slots.enqueue(asked("t", "c"), AT)
    assert await slots.release_task("t") == 2
    assert [holder.task_id for holder in await slots.holders()] == ["u"]
    assert await order(slots) == []


async def test_requests_wait_by_turn_then_priority_then_time(slots: SlotStore) -> None:
    for number, priority in enumerate((0, 5, -5, 5)):
        await slots.enqueue(asked(f"t{number}", priority=priority), AT + number)
    assert await order(slots) == ["t1", "t3", "t0", "t2"]
    first = asked("t1", priority=5)
    await slots.grant(first, NONE, AT)
    await slots.dequeue(first)
    await slots.enqueue(asked("t1", "next", priority=5), AT + 9)
    assert await order(slots) == ["t3", "t0", "t2", "t1"], "the next turn of t1 is after the others"


async def test_request_of_a_task_and_role_replaces_the_earlier_one_and_keeps_its_place(
    slots: SlotStore,
) -> None:
    await slots.enqueue(asked("t", "a"), AT)
    await slots.enqueue(asked("u"), AT + 1)
    await slots.enqueue(asked("t", "b"), AT + 2)
    await slots.enqueue(asked("t", "b", role="fast"), AT + 3)
    waiting = [(request.task_id, request.node_id, request.role) for request in await slots.waiting()]
    assert waiting == [("t", "b", "slow"), ("u", "n", "slow"), ("t", "b", "fast")]
    assert await order(slots, without={"slow"}) == ["t"]


async def test_grant_of_an_earlier_request_keeps_the_one_that_replaced_it(slots: SlotStore) -> None:
    await slots.enqueue(asked("t", "a"), AT)
    await slots.enqueue(asked("t", "b"), AT)
    await slots.dequeue(asked("t", "a"))
    assert [request.node_id for request in await slots.waiting()] == ["b"]


async def test_request_that_arrives_late_does_not_replace_a_later_one(slots: SlotStore) -> None:
    withdrawn, later = asked("t", "a", asked_at=AT), asked("t", "b", asked_at=AT + 1)
    await slots.release("t", replace(SLOT, node_id="a", withdrawn=True))
    for request in (later, withdrawn, later):
        await slots.enqueue(request, AT)
        assert await slots.waiting() == [later]


async def test_release_of_a_cancelled_attempt_withdraws_its_request(slots: SlotStore) -> None:
    await slots.enqueue(asked("t"), AT)
    await slots.release("t", replace(SLOT, withdrawn=True))
    assert await order(slots) == []


async def test_queues_and_namespaces_have_slots_of_their_own(db: Any, slots: SlotStore) -> None:
    await slots.grant(asked("t"), NONE, AT)
    await slots.enqueue(asked("u"), AT)
    for namespace, queue in (("ns", "other"), ("other", "q")):
        other = SlotStore(db, namespace_id=namespace, queue=queue)
        await other.prepare()
        assert (await other.usage(), await order(other)) == (SlotUsage(), [])


async def test_requests_can_be_read_in_parts(slots: SlotStore) -> None:
    assert not await slots.is_used()
    for number in range(30):
        await slots.enqueue(asked(f"t{number:02}"), AT)
    assert await slots.is_used()
    first = await slots.requests_after("")
    second = await slots.requests_after(first[-1][0])
    assert [task for _, task in first + second] == [f"t{number:02}" for number in range(30)]
    assert await slots.requests_after(second[-1][0]) == []


async def test_one_engine_at_a_time_checks_for_leaks(slots: SlotStore) -> None:
    assert await slots.take_turn("one", 4)
    assert not await slots.take_turn("two", 4)
    assert await slots.take_turn("one", 4)


@pytest.mark.parametrize("limits", [QueueLimits(total=4), QueueLimits(by_role={"slow": 3})])
async def test_concurrent_grants_and_releases_never_exceed_the_limit(
    server_db: Any, limits: QueueLimits
) -> None:
    slots = SlotStore(server_db, namespace_id="ns", queue="q")
    await slots.prepare()
    most = limits.total or limits.by_role["slow"]
    chance, held = random.Random(7), 0

    async def attempt(number: int) -> None:
        nonlocal held
        request = asked(f"t{number}")
        while not await slots.grant(request, limits, AT):
            await slots.usage()
        held += 1
        assert held <= most
        await asyncio.gather(*_pauses(slots.usage, chance.randrange(3)))
        held -= 1
        assert await slots.release(request.task_id, SLOT)

    await asyncio.gather(*(attempt(number) for number in range(20)))
    assert await slots.usage() == SlotUsage(total=0, by_role={"slow": 0})
    assert await slots.holders() == []


def _pauses(call: Callable[[], Awaitable[Any]], count: int) -> list[Awaitable[Any]]:
    return [call() for _ in range(count)]
