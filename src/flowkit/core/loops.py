"""The event loops of FlowKit's processes and threads: uvloop by default, which has less overhead than asyncio's loop.

Set `FLOWKIT_EVENT_LOOP=asyncio` if a handler uses a library that requires asyncio's loop, such as nest_asyncio.
"""

from __future__ import annotations

import asyncio
import logging
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from flowkit.core.loop_portal import IGNORED_SEC
from flowkit.core.user_code import place_of, stops_process
from flowkit.errors import ConfigError
from flowkit.text import count_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

T = TypeVar("T")
Item = TypeVar("Item")

_logger = logging.getLogger("flowkit.worker")

VARIABLE = "FLOWKIT_EVENT_LOOP"
ASYNCIO, UVLOOP = "asyncio", "uvloop"


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop of the type that `FLOWKIT_EVENT_LOOP` names; by default uvloop, if installed.

    Raise ConfigError if the named loop is unknown or not installed.
    """
    if _choose_loop() == ASYNCIO:
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` as `asyncio.run` does, on a loop from `new_event_loop`, and return its result."""
    try:
        runner = asyncio.Runner(loop_factory=new_event_loop)
        runner.get_loop()
    except ConfigError:
        main.close()
        raise
    try:
        return run_to_end(runner, main)
    finally:
        _close(runner)


async def gather_some(call: Callable[[Item], Awaitable[T]], items: Iterable[Item], most: int) -> list[T]:
    """Return the results of a call for each item, in their order. At most `most` calls run at once.

    Raise the first error, after the other calls were cancelled.
    """
    free = asyncio.Semaphore(most)

    async def one(item: Item) -> T:
        async with free:
            return await call(item)

    calls = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return await asyncio.gather(*calls)
    except BaseException:
        for each in calls:
            each.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        raise


def _close(runner: asyncio.Runner) -> None:
    """Close the loop, although tasks of user code may ignore that they are cancelled: asyncio waits for
    them for ever.
    """
    loop = runner.get_loop()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        left = run_to_end(runner, asyncio.wait(left, timeout=IGNORED_SEC))[1]
    if not left:
        runner.close()
        return
    names = ", ".join(sorted(task.get_name() for task in left))
    counted = count_of(len(left), "task")
    _logger.warning("the process ends without %s of user code that ignored a cancel: %s", counted, names)
    loop.close()


def run_to_end(runner: asyncio.Runner, main: Coroutine[Any, Any, T]) -> T:
    """Run `main` as `runner.run` does, and return its result, although user code ends the loop before.

    A SystemExit in a callback or in an `asyncio.Task` leaves the loop, and so does `loop.stop()`. Neither
    loses anything, so the loop runs on. Only the end of `main` and a stop of the process end it.
    """
    if asyncio._get_running_loop() is not None:
        return runner.run(main)  # which refuses this
    task = runner.get_loop().create_task(main)
    while True:
        try:
            return runner.run(_result_of(task))
        except (SystemExit, KeyboardInterrupt, RuntimeError) as error:
            if stops_process(error):
                raise
            if task.done():
                return task.result()
            _log_end(error)


async def _result_of(task: asyncio.Task[T]) -> T:
    return await task


def _log_end(error: BaseException) -> None:
    what, place = type(error).__name__, place_of(error)
    if isinstance(error, RuntimeError):
        what = "a call of its stop()"
    _logger.error(
        "the event loop runs on: user code has ended it with %s%s; use `raise` in the method that FlowKit calls",
        what,
        place and f", at {place}",
        extra={"event": "worker.loop.ended"},
    )


def _choose_loop() -> str:
    installed = find_spec(UVLOOP) is not None
    selected = os.environ.get(VARIABLE) or (UVLOOP if installed else ASYNCIO)
    if selected not in (ASYNCIO, UVLOOP):
        raise ConfigError(f"{VARIABLE} {selected!r} is neither {ASYNCIO!r} nor {UVLOOP!r}; unset it")
    if selected == UVLOOP and not installed:
        raise ConfigError(
            f"{VARIABLE} selects uvloop, which is not installed; unset it, or pip install uvloop"
        )
    return selected
