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

_MOST = 10_000
"""Threads of one executor: so many that only `slots` limits the calls."""


class Threads:
    """Runs up to `slots` calls at once.

    Python cannot end a thread. A call that its caller has given up keeps its thread until it returns, but not its
    slot: another thread takes its place, and `leaked` counts the thread until then.
    """

    def __init__(self, slots: int, name: str) -> None:
        self._free = asyncio.Semaphore(slots)
        self._executor = ThreadPoolExecutor(_MOST, thread_name_prefix=name)
        self._leaked: set[Future[Any]] = set()

    @property
    def leaked(self) -> int:
        """Threads that still run a call which nobody waits for."""
        return len(self._leaked)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return what `function` returns. Time spent waiting for a free slot does not count for the attempt."""
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
                self._leave_behind(running)
            raise

    def _leave_behind(self, running: Future[Any]) -> None:
        self._leaked.add(running)
        running.add_done_callback(self._leaked.discard)
        _logger.warning(
            "a plain function does not stop; its thread is left behind until it returns (left behind now: %d)",
            self.leaked,
            extra={"event": "worker.thread.leaked", "leaked_threads": self.leaked},
        )

    def close(self) -> None:
        """Let the threads end, each after the call that it runs."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _without_stop_iteration(function: Callable[..., T], *args: Any) -> T:
    """A future cannot hold a StopIteration; as in a coroutine, it becomes a RuntimeError."""
    try:
        return function(*args)
    except StopIteration as error:
        raise RuntimeError("the function raised StopIteration") from error
