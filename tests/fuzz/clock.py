"""A virtual clock with timers, in place of the workflow's, so that a test decides how much time passes."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from flowkit.workflows import deadlines

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Iterator

_SHORTEST_TIMER_SEC = 0.01
"""A timer for a moment that has passed fires within this time."""


class _Sleep:
    """Suspends a coroutine until a moment."""

    def __init__(self, until: float) -> None:
        self._until = until

    def __await__(self) -> Generator[float, None, None]:
        yield self._until


class _Timer:
    """A task whose coroutine sleeps."""

    def __init__(self, body: Coroutine[float, None, None]) -> None:
        self._body = body
        self.at = body.send(None)

    def fire(self) -> None:
        """Let the coroutine continue to its end."""
        try:
            self._body.send(None)
        except StopIteration:
            return
        raise AssertionError("the timer sleeps again")

    def cancel(self) -> None:
        """Close the coroutine."""
        self.at = float("inf")
        self._body.close()


class Clock:
    """The time of one workflow, and its timers."""

    OPENED_AT = 1_763_788_800.0

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the task was opened."""
        self._timers: list[_Timer] = []

    def fire(self) -> None:
        """Let all timers fire that are due."""
        now = self.OPENED_AT + self.now + _SHORTEST_TIMER_SEC
        due = [timer for timer in self._timers if timer.at <= now]
        self._timers = [timer for timer in self._timers if now < timer.at < float("inf")]
        for timer in due:
            timer.fire()

    def stop_timers(self) -> None:
        """Cancel all timers, because the run of the workflow ends."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the deadlines of tasks use this clock."""
        workflow = SimpleNamespace(now=self._time, sleep=self._sleep)
        with patch.multiple(deadlines, workflow=workflow, asyncio=SimpleNamespace(create_task=self._create)):
            yield
        self.stop_timers()

    def _time(self) -> datetime:
        return datetime.fromtimestamp(self.OPENED_AT + self.now, UTC)

    def _sleep(self, seconds: float, **options: Any) -> _Sleep:
        return _Sleep(self.OPENED_AT + self.now + seconds)

    def _create(self, body: Coroutine[float, None, None]) -> _Timer:
        self._timers.append(_Timer(body))
        return self._timers[-1]
