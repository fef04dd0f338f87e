"""Retries while MongoDB is unavailable, and a clock that excludes these waits from an attempt's time."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential_jitter

from flowkit.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    Span = tuple[float, float]

T = TypeVar("T")

_logger = logging.getLogger("flowkit.store")

_SHORT_WAIT_SEC = 0.1
"""Waits of at most this many seconds count as time of the attempt."""

_RECHECK_SEC = 0.25


async def retry_while_unavailable(call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `call()`, retrying it without a limit while it raises StoreUnavailable.

    The clock of the current attempt does not run in the meantime. Only the end of the attempt cancels the retries.
    """
    clock = _clock.get()
    wait = clock.stop() if clock is not None else None
    try:
        return await call()
    except StoreUnavailable as error:
        _logger.warning("%s; retrying", error)
        return await _retried(call)
    finally:
        if clock is not None:
            clock.resume(wait)


async def _retried(call: Callable[[], Awaitable[T]]) -> T:
    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(StoreUnavailable),
        wait=wait_exponential_jitter(multiplier=0.1, max=2.0),
        reraise=True,
    ):
        with attempt:
            return await call()
    raise AssertionError("tenacity stopped retrying, although no limit is set")


class AttemptClock:
    """Measures the time that an attempt itself has used, without its waits for MongoDB or for a free thread.

    The clock is thread-safe: the attempt waits on its own event loop, and Temporal's worker reads it on another thread.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._begun = now()
        self._lock = threading.Lock()
        self._waiting: dict[object, float] = {}
        self._waited: list[Span] = []
        """Waits that have ended while another wait was still in progress."""
        self._not_counted = 0.0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock during the block. A block of at most 0.1 s counts after all. Blocks may overlap."""
        wait = self.stop()
        try:
            yield
        finally:
            self.resume(wait)

    def stop(self) -> object:
        """Stop the clock, as `stopped` does, until `resume` is called with the returned object."""
        wait = object()
        with self._lock:
            self._waiting[wait] = self._now()
        return wait

    def resume(self, wait: object) -> None:
        """End a wait that `stop` began."""
        with self._lock:
            since, until = self._waiting.pop(wait), self._now()
            if until - since > _SHORT_WAIT_SEC:
                self._waited.append((since, until))
            if not self._waiting and self._waited:
                self._not_counted += covered(self._waited)
                self._waited.clear()

    def spent(self) -> float:
        """Return the seconds that count toward the attempt's time."""
        with self._lock:
            now = self._now()
            waits = [*self._waited, *((since, now) for since in self._waiting.values())]
            return now - self._begun - self._not_counted - covered(waits)

    def next_check(self, limit: float | None) -> float | None:
        """Return the seconds after which to check `limit` again; None if there is no limit."""
        if limit is None:
            return None
        left = max(0.0, limit - self.spent())
        return max(left, _RECHECK_SEC) if self._waiting else left


def covered(spans: Iterable[Span]) -> float:
    """Return the total time in seconds that at least one of the spans covers."""
    total, end = 0.0, float("-inf")
    for since, until in sorted(spans):
        total += max(0.0, until - max(since, end))
        end = max(end, until)
    return total


_clock: ContextVar[AttemptClock | None] = ContextVar("flowkit_attempt_clock", default=None)


@contextmanager
def measured_by(clock: AttemptClock) -> Iterator[None]:
    """Make `clock` the clock of the current attempt for code that runs or starts in the block."""
    token = _clock.set(clock)
    try:
        yield
    finally:
        _clock.reset(token)


@contextmanager
def clock_stopped() -> Iterator[None]:
    """Stop the clock of the current attempt during the block. Do nothing if there is no clock."""
    clock = _clock.get()
    if clock is None:
        yield
        return
    with clock.stopped():
        yield
