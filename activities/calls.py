"""Calls the functions of users: plain ones run on threads, so that they do not block an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
from collections.abc import AsyncIterable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from flowkit.adapters.outages import clock_stopped
from flowkit.core.loop_portal import outcome_of_call, wait_for_calls
from flowkit.core.user_code import Contained, ContainedItems, contained, end_if_forked, process_id
from flowkit.text import count_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from flowkit.activities.context import RunContext

T = TypeVar("T")

_logger = logging.getLogger("flowkit.worker")

_MAX_THREADS = 10_000
"""Thread limit of one executor; high enough that only `slots` limits the calls."""

_END = object()
_HANDLERS = "flowkit.activities.handlers"
"""The module with the default hooks of handlers."""


class Threads:
    """Calls functions of users, up to `slots` plain ones at once. All that they raise is an Exception or a cancel.

    Python cannot stop a thread. A caller that is cancelled waits for the end of its call, so that a function that asks
    for the cancel can clean up. A caller that is cancelled again gives the call up: its slot becomes free, so another
    thread can take its place, and `leaked` counts the thread until the call returns.
    """

    def __init__(self, slots: int, name: str) -> None:
        self._free = asyncio.Semaphore(slots)
        self._executor = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix=name)
        self._leaked: set[Future[Any]] = set()

    @property
    def leaked(self) -> int:
        """Return the number of threads that still run a call that was given up."""
        return len(self._leaked)

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function` and return its result.

        A coroutine function runs on the current loop, a plain one on a thread.

        The time spent waiting for a free slot does not count toward the attempt's time limit.
        """
        if _is_default(function):
            return await function(*args, **kwargs)
        if is_coroutine_function(function) or inspect.iscoroutinefunction(type(function).__call__):
            return await Contained(function(*args, **kwargs), name_of(function))
        result = await self._run(functools.partial(function, *args, **kwargs))
        return await Contained(result, name_of(function)) if inspect.isawaitable(result) else result

    async def iterate(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """Yield the items of `function`, a generator function or one that returns an iterable, asynchronous or plain.

        Raise TypeError if it returns anything else.
        """
        if is_async_generator_function(function):
            produced: Any = function(*args, **kwargs)
        else:
            produced = await self.call(function, *args, **kwargs)
        if isinstance(produced, AsyncIterable):
            async with aclosing(ContainedItems(aiter(produced))) as contained_items:
                async for item in contained_items:
                    yield item
            return
        if not isinstance(produced, Iterable):
            raise TypeError(
                f"{function.__qualname__} must yield batches, not return {type(produced).__name__}"
            )
        async with aclosing(self._iterate_on_thread(iter(produced))) as items:
            async for item in items:
                yield item

    async def _iterate_on_thread(self, items: Iterator[Any]) -> AsyncGenerator[Any, None]:
        """Yield the items. A plain generator runs, and is closed, on a thread, because it may block."""
        while (item := await self._run(next, items, _END)) is not _END:
            try:
                yield item
            except GeneratorExit:
                if (close := getattr(items, "close", None)) is not None:
                    await self._run(close)
                raise

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        with clock_stopped():
            await self._free.acquire()
        try:
            return await self._run_on_thread(function, *args)
        finally:
            self._free.release()

    async def _run_on_thread(self, function: Callable[..., T], *args: Any) -> T:
        context = contextvars.copy_context()
        running = self._executor.submit(context.run, _call_contained, function, *args)
        try:
            return await outcome_of_call(running)
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

    async def close(self) -> None:
        """Shut down. Wait up to five seconds for calls that were given up; their threads exit when they return."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if left := await wait_for_calls([*self._leaked]):
            counted = count_of(left, "synchronous function")
            _logger.warning("the process ends without %s that did not stop", counted)


def _is_default(function: Any) -> bool:
    """Return whether it is a hook that the user's handler has not overridden, so that there is nothing to contain."""
    return (
        isinstance(function, MethodType)
        and function.__module__ == _HANDLERS
        and is_coroutine_function(function)
    )


def is_coroutine_function(function: Any) -> bool:
    """Return `inspect.iscoroutinefunction(function)`, which takes longer than a short hook, at little cost."""
    return _has_flag(function, inspect.CO_COROUTINE) or inspect.iscoroutinefunction(function)


def is_async_generator_function(function: Any) -> bool:
    """Return `inspect.isasyncgenfunction(function)` in the same way."""
    return _has_flag(function, inspect.CO_ASYNC_GENERATOR) or inspect.isasyncgenfunction(function)


def _has_flag(function: Any, flag: int) -> bool:
    """Return whether a function or a method has the flag in its code."""
    if isinstance(function, MethodType):
        function = function.__func__
    return isinstance(function, FunctionType) and bool(function.__code__.co_flags & flag)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function or of the type of another object that can be called."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _call_contained(function: Callable[..., T], *args: Any) -> T:
    """Call `function`, and turn a StopIteration into a RuntimeError, because a future cannot hold a StopIteration."""
    pid = process_id()
    try:
        with contained:
            return function(*args)
    except StopIteration as error:
        raise RuntimeError("the function raised StopIteration") from error
    finally:
        end_if_forked(pid)


def context_for(hook: Callable[..., Any], ctx: RunContext) -> dict[str, RunContext]:
    """Return the keyword argument `ctx` for a hook that declares this parameter; `{}` for any other."""
    return {"ctx": ctx} if _declares_ctx(getattr(hook, "__func__", hook)) else {}


@functools.cache
def _declares_ctx(function: Callable[..., Any]) -> bool:
    """Return whether a function has a parameter `ctx` that can be passed by name. Cached: a handler has many calls."""
    try:
        parameter = inspect.signature(function).parameters.get("ctx")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind in (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
