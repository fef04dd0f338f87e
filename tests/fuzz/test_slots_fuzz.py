"""Concurrency limits compared with an independent model: random tasks, engines that die, late and repeated calls.

`make fuzz MINUTES=10` runs longer, and `SEED=n` repeats a run.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pymongo import ASCENDING
from tests.fuzz.budget import MINUTES, SLOTS_SHARE, chosen_seed, first_of, only_in_fuzz, show
from tests.fuzz.slot_campaign import engine_play, slot_campaign, workflow_play
from tests.unit.property_examples import examples

from flowkit.adapters import slots as store
from flowkit.adapters.slots import QueueLimits
from flowkit.engine import slot_grants, slot_leaks
from flowkit.workflows import slots as workflow_slots
from flowkit.workflows.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flowkit.adapters.slots import SlotStore
    from flowkit.models import Slot, SlotRequest

SEED = 1


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Do not log the slots that the engines free."""
    logger = logging.getLogger("flowkit.engine.limits")
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(logging.NOTSET)


@pytest.mark.slow
def test_slots_match_the_model_in_the_same_plays_each_time() -> None:
    figures = slot_campaign(engine_play, SEED, plays=examples(40))
    assert figures.events["slot after a wait"] and figures.events["leaked slot"]


@pytest.mark.slow
def test_tasks_share_their_limits_in_the_same_plays_each_time() -> None:
    figures = slot_campaign(workflow_play, SEED, plays=examples(20))
    assert {"attempt", "cancelled node", "stopped task", "continued task"} <= figures.events.keys()


@only_in_fuzz
@pytest.mark.timeout(MINUTES * 60 * 8 + 120)
def test_slots_match_the_model_in_new_plays_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    seed = chosen_seed()
    show(capsys, f"slots, seed {seed}; `make fuzz SEED={seed}` repeats the plays")
    for play_of in (engine_play, workflow_play):
        figures = slot_campaign(play_of, seed, seconds=60 * MINUTES * SLOTS_SHARE / 2)
        show(capsys, f"slots, seed {seed}: {figures}")


def test_same_seed_gives_the_same_plays() -> None:
    first, second = (slot_campaign(play_of, SEED, plays=2) for play_of in [engine_play] * 2)
    assert first == second
    first, second = (slot_campaign(play_of, SEED, plays=2) for play_of in [workflow_play] * 2)
    assert first == second


def without_limits(right: Callable[..., Any]) -> Callable[..., Any]:
    """A grant does not check the limits."""
    return lambda slots, request, limits, at: right(slots, request, QueueLimits(), at)


def without_turns(right: Callable[..., Any]) -> Callable[..., Any]:
    """A grant does not begin a turn, so that a task with priority is always first."""

    async def dequeue(slots: SlotStore, request: SlotRequest) -> None:
        await slots._requests.delete_many({"task_id": request.task_id, "node_id": request.node_id})

    return dequeue


def overtaking(right: Callable[..., Any]) -> Callable[..., Any]:
    """An attempt that asks gets a free slot although others wait for it."""

    async def is_first(engine: slot_grants.SlotGrants, slots: SlotStore, role: str) -> bool:
        return await engine._may_grant(role)

    return is_first


def without_withdrawals(right: Callable[..., Any]) -> Callable[..., Any]:
    """A release leaves the request of a cancelled attempt."""
    return lambda slots, task_id, slot: right(slots, task_id, replace(slot, withdrawn=False))


def twice(right: Callable[..., Any]) -> Callable[..., Any]:
    """A repeated release frees a second slot of the role."""

    async def release(slots: SlotStore, task_id: str, slot: Slot) -> bool:
        if await right(slots, task_id, slot):
            return True
        counter = store._counter(slot.role)
        await slots._slots.update_one({"total": {"$gt": 0}}, {"$inc": {"total": -1, counter: -1}})
        return False

    return release


def to_all(right: Callable[..., Any]) -> Callable[..., Any]:
    """Roles without workers get slots."""

    async def may_grant(engine: slot_grants.SlotGrants, role: str) -> bool:
        return True

    return may_grant


def never_unused(right: Callable[..., Any]) -> Callable[..., Any]:
    """The check for leaks believes that a running workflow uses its slots."""

    def use_of(*args: Any) -> slot_leaks.Use:
        use: slot_leaks.Use = right(*args)
        return slot_leaks.Use.IN_FLIGHT if use is slot_leaks.Use.UNUSED else use

    return use_of


def soon_unused(right: Callable[..., Any]) -> Callable[..., Any]:
    """The check for leaks overlooks attempts in flight."""

    def use_of(*args: Any) -> slot_leaks.Use:
        use: slot_leaks.Use = right(*args)
        return slot_leaks.Use.UNUSED if use is slot_leaks.Use.IN_FLIGHT else use

    return use_of


def undelivered(right: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing repeats a report of a slot that an engine could not send before it died."""

    def use_of(*args: Any) -> slot_leaks.Use:
        use: slot_leaks.Use = right(*args)
        return slot_leaks.Use.IN_FLIGHT if use is slot_leaks.Use.UNDELIVERED else use

    return use_of


def without_priority(right: object) -> object:
    """Requests wait by turn and time alone."""
    return [("turn", ASCENDING), ("since", ASCENDING)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    first_of(
        [
            (store.SlotStore, "grant", without_limits),
            (store.SlotStore, "dequeue", without_turns),
            (store.SlotStore, "release", without_withdrawals),
            (store.SlotStore, "release", twice),
            (store, "_ORDER", without_priority),
            (slot_grants.SlotGrants, "_is_first", overtaking),
            (slot_grants.SlotGrants, "_may_grant", to_all),
            (slot_leaks, "use_of", never_unused),
            (slot_leaks, "use_of", soon_unused),
            (slot_leaks, "use_of", undelivered),
        ]
    ),
)
def test_wrong_rule_is_found_and_shown_with_a_short_play(
    place: object, name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, wrong(getattr(place, name)))
    with pytest.raises(AssertionError) as caught:
        slot_campaign(engine_play, SEED, plays=300)
    short = str(caught.value).partition("a short play:\n")[2]
    assert "Difference" in short
    assert len(short.splitlines()) <= 100


def loses_grants(right: Callable[..., Any]) -> Callable[..., Any]:
    """A slot of a task that becomes free does not reach the node that waits for it."""
    return lambda slots, role: right(slots, role)[1:]


def without_windows(right: Callable[..., Any]) -> Callable[..., Any]:
    """The limits of a task itself have no effect."""

    def try_acquire(slots: Slots, role: str) -> bool:
        slots._used[role] += 1
        return True

    return try_acquire


def keeps_slot(right: Callable[..., Any]) -> Callable[..., Any]:
    """The end of an attempt frees the slot of its task alone."""

    async def leave(slot: workflow_slots.TakenSlot, *_: object) -> None:
        await slot._taken.aclose()

    return leave


class OpenTurn(asyncio.Lock):
    """Lets several nodes of a role wait in the engine."""

    async def acquire(self) -> Literal[True]:
        """Return at once."""
        return True

    def release(self) -> None:
        """Do nothing."""


def without_turn(right: Callable[..., Any]) -> Callable[..., Any]:
    """Each node of a role has a request in the engine, so that they replace each other."""
    return lambda **fields: right(turn=OpenTurn(), **fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    first_of(
        [
            (Slots, "release", loses_grants),
            (Slots, "try_acquire", without_windows),
            (workflow_slots.TakenSlot, "__aexit__", keeps_slot),
            (workflow_slots, "_WaitingRole", without_turn),
        ]
    ),
)
def test_wrong_use_of_slots_by_a_task_is_found(
    place: object, name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, wrong(getattr(place, name)))
    with pytest.raises(AssertionError, match="Difference"):
        slot_campaign(workflow_play, SEED, plays=100)
