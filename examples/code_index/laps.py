"""How long each part of the demo took."""

from __future__ import annotations

import time


class Laps:
    """A stopwatch that is read at the end of every part."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._laps: list[tuple[str, float]] = []

    def lap(self, part: str) -> float:
        """End `part`; answers its seconds."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self._laps.append((part, seconds))
        return seconds

    def __str__(self) -> str:
        parts = " + ".join(f"{part} {seconds:.1f}" for part, seconds in self._laps)
        return f"{parts} = {sum(seconds for _, seconds in self._laps):.1f} s"
