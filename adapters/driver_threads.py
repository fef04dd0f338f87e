"""The threads on which Motor calls MongoDB, for FlowKit's own reads and writes.

Motor passes each call to an executor of the standard library, whose futures have locks of their own, and are copied to
futures of the event loop. Here, a thread resolves the future of the event loop itself. A small write then takes the
program a fifth less of processor time.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from contextvars import Context, copy_context
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import TYPE_CHECKING, Any

from motor.core import AgnosticDatabase
from motor.frameworks import asyncio as motors
from motor.metaprogramming import create_class_with_framework

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    Job = tuple[asyncio.Future[Any], Context, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class CallThreads:
    """Calls functions on at most `limit` threads, which start when they are needed and never end."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.forget()

    def forget(self) -> None:
        """Start anew, in a process that a fork has made: it has none of the threads."""
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._idle: SimpleQueue[None] = SimpleQueue()
        """Has an item for each thread that waits for a job."""
        self._threads = 0
        self._starting = threading.Lock()

    def call(
        self, loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> asyncio.Future[Any]:
        """Call a function on a thread, in the context of the caller. Return its outcome, on the caller's `loop`.

        After a cancel before the call has begun, it does not happen. A later cancel only ends the wait.
        """
        future = loop.create_future()
        self._jobs.put((future, copy_context(), function, args, kwargs))
        try:
            self._idle.get_nowait()
        except Empty:
            self._start_thread()
        return future

    def _start_thread(self) -> None:
        with self._starting:
            if self._threads == self._limit:
                return
            self._threads += 1
            name = f"flowkit-mongo_{self._threads}"
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _serve(self) -> None:
        jobs, idle = self._jobs, self._idle
        while True:
            self._run(*jobs.get(), idle=idle)

    @staticmethod
    def _run(
        future: asyncio.Future[Any],
        context: Context,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        idle: SimpleQueue[None],
    ) -> None:
        """Call the function. Then note that the thread is idle, and resolve the future on its loop."""
        settle: Callable[[asyncio.Future[Any], Any], None] = _set_result
        outcome: Any = None
        try:
            if not future.cancelled():
                outcome = context.run(function, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - passed to the code that awaits the call
            settle, outcome = _set_error, error
        idle.put(None)
        with suppress(RuntimeError):  # The loop is closed.
            future.get_loop().call_soon_threadsafe(settle, future, outcome)


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_error(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


_threads = CallThreads(motors.max_workers)
os.register_at_fork(after_in_child=_threads.forget)

_framework = ModuleType("flowkit_motor_framework", "Motor's own framework for asyncio, with other threads.")
_framework.__dict__.update(
    {name: value for name, value in vars(motors).items() if not name.startswith("__")},
    run_on_executor=_threads.call,
)
_Database = create_class_with_framework(AgnosticDatabase, _framework, "motor.motor_asyncio")


def on_own_threads(given: Any) -> Any:
    """Return a handle on the same database that calls MongoDB on these threads; another driver's as it is."""
    if not isinstance(given, AgnosticDatabase):
        return given
    return _Database(given.client, given.name, _delegate=given.delegate)
