"""Plays many random tasks under limits across tasks, and looks for a short play if one goes wrong."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.fuzz.slot_play import SlotPlay

_EVENTS = 60
_SHORT = (4, 8, 15, 30)
"""Lengths of the plays to try after one has gone wrong, 40 of each length."""


@dataclass(kw_only=True)
class SlotFigures:
    """What a campaign has played."""

    plays: int = 0
    events: Counter[str] = field(default_factory=Counter)
    longest_leak_sec: float = 0.0

    def __str__(self) -> str:
        events = ", ".join(f"{count:,} {kind}" for kind, count in self.events.most_common())
        return f"{self.plays:,} plays; {events}; the longest leak was {self.longest_leak_sec:g} s in virtual time"


def slot_campaign(seed: int, *, seconds: float = 0, plays: int = 0) -> SlotFigures:
    """Play this often, and again until this much time of the processor is used.

    Raise an error with a short history if a play goes wrong.
    """
    return asyncio.run(_campaign(seed, seconds, plays))


async def _campaign(seed: int, seconds: float, plays: int) -> SlotFigures:
    figures, end = SlotFigures(), time.process_time() + seconds
    while figures.plays < plays or time.process_time() < end:
        play, error = await _played(f"{seed}-{figures.plays}", _EVENTS)
        if error is not None:
            short = await _shortest(seed) or _shown(play, error)
            raise AssertionError(
                f"seed {seed}, play {figures.plays}: {error!r}\na short play:\n{short}"
            ) from error
        figures.plays += 1
        figures.events += play.counts
        figures.longest_leak_sec = max(figures.longest_leak_sec, play.longest_leak_sec)
    return figures


async def _played(seed: str, events: int) -> tuple[SlotPlay, Exception | None]:
    play = SlotPlay(random.Random(seed))
    try:
        await play.run(events)
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return play, error
    return play, None


async def _shortest(seed: int) -> str | None:
    for events in _SHORT:
        for number in range(40):
            play, error = await _played(f"{seed}-short-{number}", events)
            if error is not None:
                return _shown(play, error)
    return None


def _shown(play: SlotPlay, error: Exception) -> str:
    return "\n".join([*play.history, repr(error)])
