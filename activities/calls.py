"""Threads for plain functions, which must not block an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from flowkit.adapters.retry import clock_stopped

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_logger = logging.getLogger("flowkit.worker")

_MAX_THREADS = 10_000
"""Thread limit of one executor; high enough that only `slots` limits the calls."""


class Threads:
    """Runs up to `slots` calls at once.

    Python cannot stop a thread. A call whose caller was cancelled keeps its thread until it returns, and `leaked`
    counts that thread until then. The call's slot becomes free at once, so another thread can take its place.
    """

    def __init__(self, slots: int, name: str) -> None:
        self._free = asyncio.Semaphore(slots)
        self._executor = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix=name)
        self._leaked: set[Future[Any]] = set()

    @property
    def leaked(self) -> int:
        """Return the number of threads that still run a call whose caller was cancelled."""
        return len(self._leaked)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function` on a thread and return its result.

        The time spent waiting for a free slot does not count toward the attempt's time limit.
        """
        with clock_stopped():
            await self._free.acquire()
        try:
            return await self._call(function, *args)
        finally:
            self._free.release()

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        context = contextvars.copy_context()
        running = self._executor.submit(context.run, _without_stop_iteration, function, *args)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if not running.done():
                self._record_leak(running)
            raise

    def _record_leak(self, running: Future[Any]) -> None:
        self._leaked.add(running)
        running.add_done_callback(self._leaked.discard)
        _logger.warning(
            "a synchronous function does not stop; its thread stays busy until it returns (leaked threads: %d)",
            self.leaked,
            extra={"event": "worker.thread.leaked", "leaked_threads": self.leaked},
        )

    def close(self) -> None:
        """Shut down without waiting; each thread exits when its current call returns."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _without_stop_iteration(function: Callable[..., T], *args: Any) -> T:
    """Call `function`, and turn a StopIteration into a RuntimeError, because a future cannot hold a StopIteration."""
    try:
        return function(*args)
    except StopIteration as error:
        raise RuntimeError("the function raised StopIteration") from error
