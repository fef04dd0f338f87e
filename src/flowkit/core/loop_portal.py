"""Runs code across two event loops: Temporal's worker has its own; the database and handlers use the caller's."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine
    from concurrent.futures import Future

T = TypeVar("T")

IGNORED_SEC = 5.0
"""How long a task may take to end after a cancel, before it is cancelled again or left alone."""


def cancel_until_done(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and again every IGNORED_SEC until it ends: user code may have ignored a cancel.

    A task that no longer runs user code would otherwise go on, for example wait for a database whose client is closed.
    Its outcome does not matter any more, so asyncio does not log that its error was never read.
    """
    if not task.done():
        task.cancel()
        task.get_loop().call_later(IGNORED_SEC, cancel_until_done, task)
    elif not task.cancelled():
        task.exception()


async def outcome_of_call(running: Future[T]) -> T:
    """Return the result of a call that a cancel cannot end, because it runs on a thread or in another process.

    After a cancel, wait until the call has ended, and raise CancelledError. A second cancel ends the wait.
    """
    try:
        return await asyncio.wrap_future(running)
    except asyncio.CancelledError:
        if not running.done():
            await asyncio.gather(asyncio.wrap_future(running), return_exceptions=True)
        raise


async def wait_for_calls(running: Collection[Future[Any]]) -> int:
    """Wait up to IGNORED_SEC for calls whose callers no longer do. Return how many still run."""
    ends = asyncio.gather(*map(asyncio.wrap_future, running), return_exceptions=True)
    await asyncio.wait([ends], timeout=IGNORED_SEC)
    return sum(not each.done() for each in running)


class LoopPortal:
    """Access to the loop that owns the database handle and runs handlers. Motor objects are bound to one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.get_running_loop()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the portal's loop and return its result. Cancelling this call also cancels `work`."""
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Start `work` on the portal's loop, and return its outcome on the current one.

        After a cancel, the outcome is how `work` ends. A second cancel ends the future at once. `work` that has ignored
        the first one is then cancelled until it ends.
        """
        if asyncio.get_running_loop() is self._loop:
            return asyncio.create_task(work)
        return _RemoteTask(self._loop, work)

    def cancel(self, work: asyncio.Future[Any], before: Callable[[], None]) -> None:
        """Call `before` on the portal's loop and cancel `work`, which `start` has returned, as one step.

        Work that waits for what `before` changes would otherwise go on first, and the cancel would reach its clean-up.
        """
        if isinstance(work, _RemoteTask):
            work.cancel_after(before)
        else:
            before()
            work.cancel()

    def call(self, function: Any, *args: Any) -> None:
        """Schedule a call of `function` on the portal's loop. This method is safe to call from any thread."""
        self._loop.call_soon_threadsafe(function, *args)


class _RemoteTask(asyncio.Future[T]):
    """The outcome of a coroutine that runs as a task on the loop of another thread."""

    def __init__(self, remote: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._remote = remote
        self._task: asyncio.Task[T] | None = None
        """The task, once it has begun. Only the remote loop uses it."""
        self._is_cancelling = False
        remote.call_soon_threadsafe(self._begin, work)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task, which may still end otherwise. When called again, wait no longer for its end."""
        if self.done():
            return False
        first, self._is_cancelling = not self._is_cancelling, True
        with suppress(RuntimeError):  # The remote loop is closed.
            self._remote.call_soon_threadsafe(self._cancel_task if first else self._abandon_task)
        return first or super().cancel(msg)

    def cancel_after(self, before: Callable[[], None]) -> None:
        """Call `before` and cancel the task, without a step of the task in between."""
        self._is_cancelling = True
        with suppress(RuntimeError):  # The remote loop is closed.
            self._remote.call_soon_threadsafe(self._cancel_task_after, before)

    def _begin(self, work: Coroutine[Any, Any, T]) -> None:
        self._task = self._remote.create_task(work)
        self._task.add_done_callback(self._end)

    def _cancel_task_after(self, before: Callable[[], None]) -> None:
        before()
        self._cancel_task()

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _abandon_task(self) -> None:
        if self._task is not None:
            cancel_until_done(self._task)

    def _end(self, task: asyncio.Task[T]) -> None:
        with suppress(RuntimeError):  # The loop of the caller is closed.
            self.get_loop().call_soon_threadsafe(self._settle, task)

    def _settle(self, task: asyncio.Task[T]) -> None:
        """Take over the outcome of the task, unless a second cancel has ended the wait."""
        if self.done():
            cancel_until_done(task)  # Marks its error as read.
        elif task.cancelled():
            super().cancel()
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())
