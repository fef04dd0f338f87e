"""Nodes with shards compared with a simple model: random workers die, freeze and return, lose their leases and MongoDB.

Each batch must count once, exactly the bad ones must be set aside, and no row may replace that of a later claim.
`make fuzz MINUTES=10` runs longer, and `SEED=n` repeats a run.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from tests.fuzz.budget import MINUTES, SHARDS_SHARE, chosen_seed, first_of, only_in_fuzz, show
from tests.fuzz.shard_play import ShardPlay
from tests.fuzz.slot_campaign import slot_campaign
from tests.unit.property_examples import examples

from flowkit.activities.batches.puller import SharedPuller
from flowkit.adapters import artifacts
from flowkit.adapters import claims as claims_module
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.claims import Claims
from flowkit.adapters.shards import ShardStates

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable, Iterator

    from flowkit.activities.batches.puller import Delivery
    from flowkit.adapters.claims import Claim
    from flowkit.models import AttemptInput

SEED = 1
_EVENTS_OF_BATCH = 8


def shard_play(chance: random.Random, events: int) -> ShardPlay:
    """Return a play of a node whose number of batches follows from the number of events."""
    return ShardPlay(chance, most=max(1, events // _EVENTS_OF_BATCH))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Do not log the outages."""
    loggers = [logging.getLogger(name) for name in ("flowkit.store", "flowkit.worker")]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    yield
    for logger in loggers:
        logger.setLevel(logging.NOTSET)


@pytest.mark.slow
def test_shards_match_the_model_in_the_same_plays_each_time() -> None:
    figures = slot_campaign(shard_play, SEED, plays=examples(100))
    assert {
        "killed process",
        "returned process",
        "expired lease",
        "outage",
        "handover",
        "failed attempt",
        "fenced attempt",
        "set aside",
        "failed node",
    } <= figures.events.keys()


@only_in_fuzz
@pytest.mark.timeout(MINUTES * 60 * 8 + 120)
def test_shards_match_the_model_in_new_plays_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    seed = chosen_seed()
    show(capsys, f"shards, seed {seed}; `make fuzz SEED={seed}` repeats the plays")
    figures = slot_campaign(shard_play, seed, seconds=60 * MINUTES * SHARDS_SHARE)
    show(capsys, f"shards, seed {seed}: {figures}")


def test_same_seed_gives_the_same_plays() -> None:
    first, second = (slot_campaign(shard_play, SEED, plays=5) for _ in range(2))
    assert first == second


def without_fence(right: Callable[..., Any]) -> Callable[..., Any]:
    """Any row can be replaced."""
    return lambda epoch, fence: {}


def same_fence(right: Callable[..., Any]) -> Callable[..., Any]:
    """A take-over does not raise the fencing number."""

    async def take_over(claims: Claims, attempt: AttemptInput, claim: Claim, at: float) -> int | None:
        taken = await right(claims, attempt, claim, at)
        if taken is None:
            return None
        mine = claims_module._claim_key(attempt, claim.from_node, claim.batch_uid)
        await claims._claims.update_one(mine, {"$set": {"fence": claim.fence}})
        return claim.fence

    return take_over


def leaves_all(right: Callable[..., Any]) -> Callable[..., Any]:
    """No shard takes over what lost ones have left."""

    async def deliver_left(puller: SharedPuller) -> AsyncIterator[Delivery]:
        return
        yield

    return deliver_left


def takes_from_live(right: Callable[..., Any]) -> Callable[..., Any]:
    """Shards take over batches from others that run."""
    return lambda states, attempt: right(states, attempt) + [*(states.live - {attempt.epoch})]


def forgets_uncertain(right: Callable[..., Any]) -> Callable[..., Any]:
    """A shard does not remember what it may have claimed while MongoDB did not respond."""
    return lambda puller, source, page: None


def half_set_aside(right: Callable[..., Any]) -> Callable[..., Any]:
    """A batch is set aside as soon as its artifact says so."""

    async def quarantined(store: ArtifactStore, attempt: AttemptInput) -> set[str]:
        found = store._artifacts.find({**artifacts._set_aside_filter(attempt)})
        return {row["batch_uid"] async for row in found}

    return quarantined


def open_rows(right: Callable[..., Any]) -> Callable[..., Any]:
    """A lost shard can replace rows after the end of the node."""

    async def seal(store: ArtifactStore, attempt: AttemptInput) -> None:
        return

    return seal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    first_of(
        [
            (artifacts, "replaceable_filter", without_fence),
            (Claims, "take_over", same_fence),
            (SharedPuller, "_deliver_left", leaves_all),
            (ShardStates, "list_lost", takes_from_live),
            (SharedPuller, "_note_uncertain", forgets_uncertain),
            (ArtifactStore, "quarantined", half_set_aside),
            (ArtifactStore, "seal", open_rows),
        ]
    ),
)
def test_wrong_rule_is_found_and_shown_with_a_short_play(
    place: object, name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, wrong(getattr(place, name)))
    with pytest.raises(AssertionError, match="a short play") as caught:
        slot_campaign(shard_play, SEED, plays=1_000)
    assert "Difference" in str(caught.value)
