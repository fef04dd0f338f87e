"""Leaked slots of the concurrency limits become free within ten seconds, counted in rounds of the engines."""

from __future__ import annotations

import itertools

import pytest
from tests.fuzz.slot_model import Attempt
from tests.fuzz.slot_world import Task, World

from flowkit import CoordinatorConfig

CONFIG = CoordinatorConfig(max_type_concurrency={"slow": 1})
MOST_ROUNDS = 10
"""The bound in docs/concurrency.md: an engine has a round each second."""


async def rounds_until_free(task: Task, *, closed: bool, before: int, survives: int) -> int:
    """Return after how many rounds a slot is free whose attempt has never started.

    The engine that checks for leaks has `before` rounds before the leak and `survives` after it. Then it dies.
    """
    world, attempt = World([task], {"slow"}), Attempt(task.name, "n", 1, "slow")
    with world.installed():
        first, second = world.engine(CONFIG), world.engine(CONFIG)
        assert await first.grants._holds(task.request(attempt), may_grant=True)
        task.in_flight.add(attempt)
        for _ in range(before):
            world.now += 1
            await first.loop._once()
            await second.loop._once()
        task.in_flight.clear()
        task.closed, store = closed, await second.grants.store()
        for number in itertools.count():
            if not await store.holders():
                return number
            world.now += 1
            if number < survives:
                await first.loop._once()
            await second.loop._once()
    raise AssertionError("the loop above has no end")


@pytest.mark.parametrize("before", range(6))
async def test_leaked_slot_is_free_in_time_although_the_checking_engine_dies(before: int) -> None:
    for survives in range(8):
        for closed in [True, False]:
            rounds = await rounds_until_free(Task("t", 0), closed=closed, before=before, survives=survives)
            assert rounds <= MOST_ROUNDS


@pytest.mark.parametrize(("closed", "most"), [(True, 4), (False, 6)])
async def test_two_checks_find_a_leaked_slot_while_the_same_engine_checks(closed: bool, most: int) -> None:
    rounds = [
        await rounds_until_free(Task("t", 0), closed=closed, before=before, survives=MOST_ROUNDS)
        for before in range(6)
    ]
    assert max(rounds) <= most
