"""Calls the methods of a handler, which may be coroutine functions or plain functions. Plain ones run on threads."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, Iterable
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from flowkit.activities.calls import Threads

_END = object()


class HandlerInvoker:
    """Calls handler methods ("hooks") so that a plain function never blocks the event loop."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    async def call(self, hook: Callable[..., Any], *args: Any) -> Any:
        """Call `hook` and return its result. Coroutine functions run on the current loop, plain ones on a thread."""
        if inspect.iscoroutinefunction(hook):
            return await hook(*args)
        result = await self._threads.run(hook, *args)
        return await result if inspect.isawaitable(result) else result

    async def iterate(self, hook: Callable[..., Any], *args: Any) -> AsyncGenerator[Any, None]:
        """Yield the items of `hook`, which is a generator function or returns an iterable, asynchronous or plain.

        Raise TypeError if it returns anything else.
        """
        if inspect.isasyncgenfunction(hook):
            produced: Any = hook(*args)
        else:
            produced = await self.call(hook, *args)
        if isinstance(produced, AsyncIterable):
            async with _closing(produced):
                async for item in produced:
                    yield item
            return
        if not isinstance(produced, Iterable):
            raise TypeError(f"{hook.__qualname__} must yield batches, not return {type(produced).__name__}")
        async with aclosing(self._stepwise(iter(produced))) as items:
            async for item in items:
                yield item

    async def _stepwise(self, items: Iterator[Any]) -> AsyncGenerator[Any, None]:
        """Yield the items. A plain generator runs, and is closed, on a thread, because it may block."""
        while (item := await self._threads.run(next, items, _END)) is not _END:
            try:
                yield item
            except GeneratorExit:
                await self._threads.run(getattr(items, "close", _nothing))
                raise


def _closing(items: AsyncIterable[Any]) -> AbstractAsyncContextManager[Any]:
    """Return a context manager that closes `items` at its end, if `items` is a generator."""
    return aclosing(items) if inspect.isasyncgen(items) else nullcontext()


def _nothing() -> None:
    """Do nothing, in place of the `close` method of an iterator that has none."""
