"""Measure how long each phase of the demo takes."""

from __future__ import annotations

import time


class Stopwatch:
    """Measures consecutive phases."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._laps: list[tuple[str, float]] = []

    def lap(self, phase: str) -> float:
        """End a phase; returns its duration in seconds."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self._laps.append((phase, seconds))
        return seconds

    def __str__(self) -> str:
        phases = " + ".join(f"{phase} {seconds:.1f}" for phase, seconds in self._laps)
        return f"{phases} = {sum(seconds for _, seconds in self._laps):.1f} s"
