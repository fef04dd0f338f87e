"""Runs code across two event loops: Temporal's worker has its own; the database and handlers use the caller's."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

IGNORED_SEC = 5.0
"""How long a task may take to end after a cancel, before it is cancelled again or left alone."""


def cancel_until_done(task: asyncio.Task[Any]) -> None:
    """Cancel a task, and again every IGNORED_SEC until it ends: user code may have ignored a cancel.

    A task that no longer runs user code would otherwise go on, for example wait for a database whose client is closed.
    Its outcome does not matter any more, so asyncio does not log that its error was never read.
    """
    if not task.done():
        task.cancel()
        task.get_loop().call_later(IGNORED_SEC, cancel_until_done, task)
    elif not task.cancelled():
        task.exception()


class LoopPortal:
    """Access to the loop that owns the database handle and runs handlers. Motor objects are bound to one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.get_running_loop()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the portal's loop and return its result. Cancelling this call also cancels `work`."""
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def run_to_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` like `run`, but after a cancel wait until it has ended.

        A second cancel ends the wait. `work` that has ignored the first one is then cancelled until it ends.
        """
        if asyncio.get_running_loop() is self._loop:
            return await work
        remote = _RemoteTask(self._loop, work)
        try:
            return await asyncio.shield(remote.ended)
        except asyncio.CancelledError:
            if remote.ended.done():
                raise
            remote.cancel()
            try:
                return await asyncio.shield(remote.ended)
            except asyncio.CancelledError:
                remote.abandon()
                raise

    def call(self, function: Any, *args: Any) -> None:
        """Schedule a call of `function` on the portal's loop. This method is safe to call from any thread."""
        self._loop.call_soon_threadsafe(function, *args)


class _RemoteTask(Generic[T]):
    """A coroutine that runs as a task on the loop of another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._caller = asyncio.get_running_loop()
        self._task: asyncio.Task[T] | None = None
        self.ended: asyncio.Future[T] = self._caller.create_future()
        """The outcome, on the loop of the caller."""
        loop.call_soon_threadsafe(self._begin, work)

    def cancel(self) -> None:
        """Cancel the task."""
        self._loop.call_soon_threadsafe(self._cancel)

    def abandon(self) -> None:
        """Cancel the task until it ends. Nothing waits for it any longer."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._abandon)

    def _abandon(self) -> None:
        if self._task is not None:
            cancel_until_done(self._task)

    def _begin(self, work: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        with suppress(RuntimeError):  # the caller's loop is closed
            self._caller.call_soon_threadsafe(self._settle, task)

    def _settle(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.ended.cancel()
        elif (error := task.exception()) is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(task.result())
