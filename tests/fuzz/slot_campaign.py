"""Plays many random tasks, under concurrency limits or with shards, and looks for a short play if one goes wrong."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tests.fuzz.slot_play import SlotPlay
from tests.fuzz.workflow_slots_play import LimitedPlay

if TYPE_CHECKING:
    from collections.abc import Callable

    PlayOf = Callable[[random.Random, int], "AnyPlay"]

_EVENTS = 60
_SHORT = (4, 8, 15, 30)
"""Lengths of the plays to try after one has gone wrong, 40 of each length."""


class AnyPlay(Protocol):
    """One play."""

    counts: Counter[str]
    history: list[str]
    longest_leak_sec: float

    async def run(self) -> None:
        """Play, and raise an error if something goes wrong."""


def engine_play(chance: random.Random, events: int) -> AnyPlay:
    """Return a play of the engine's part alone, which the model predicts."""
    return SlotPlay(chance, events)


def workflow_play(chance: random.Random, events: int) -> AnyPlay:
    """Return a play of the workflow's part and the engine's part. The number of events decides its size."""
    return LimitedPlay(chance, most_nodes=1 + events // 5)


@dataclass(kw_only=True)
class SlotFigures:
    """What a campaign has played."""

    plays: int = 0
    events: Counter[str] = field(default_factory=Counter)
    longest_leak_sec: float = 0.0

    def __str__(self) -> str:
        events = ", ".join(f"{count:,} {kind}" for kind, count in self.events.most_common())
        leak = (
            f"; the longest leak was {self.longest_leak_sec:g} s in virtual time"
            if self.longest_leak_sec
            else ""
        )
        return f"{self.plays:,} plays; {events}{leak}"


def slot_campaign(play_of: PlayOf, seed: int, *, seconds: float = 0, plays: int = 0) -> SlotFigures:
    """Play this often, and again until this much time of the processor is used.

    Raise an error with a short history if a play goes wrong.
    """
    return asyncio.run(_campaign(play_of, seed, seconds, plays))


async def _campaign(play_of: PlayOf, seed: int, seconds: float, plays: int) -> SlotFigures:
    figures, end = SlotFigures(), time.process_time() + seconds
    while figures.plays < plays or time.process_time() < end:
        play, error = await _played(play_of, f"{seed}-{figures.plays}", _EVENTS)
        if error is not None:
            short = await _shortest(play_of, seed) or _shown(play, error)
            raise AssertionError(
                f"seed {seed}, play {figures.plays}: {error!r}\na short play:\n{short}"
            ) from error
        figures.plays += 1
        figures.events += play.counts
        figures.longest_leak_sec = max(figures.longest_leak_sec, play.longest_leak_sec)
    return figures


async def _played(play_of: PlayOf, seed: str, events: int) -> tuple[AnyPlay, Exception | None]:
    play = play_of(random.Random(seed), events)
    try:
        await play.run()
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return play, error
    return play, None


async def _shortest(play_of: PlayOf, seed: int) -> str | None:
    for events in _SHORT:
        for number in range(40):
            play, error = await _played(play_of, f"{seed}-short-{number}", events)
            if error is not None:
                return _shown(play, error)
    return None


def _shown(play: AnyPlay, error: Exception) -> str:
    return "\n".join([*play.history, repr(error)])
