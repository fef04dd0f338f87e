"""Calls a handler's invoker, which may be coroutines or plain functions; plain ones run on threads of their own."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, Iterable
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from flowkit.activities.threads import Threads

_END = object()


class HandlerInvoker:
    """The two ways of calling a hook; a plain function never blocks the loop."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    async def call(self, hook: Callable[..., Any], *args: Any) -> Any:
        """The hook's answer; a coroutine function is awaited here, a plain one runs on a thread."""
        if inspect.iscoroutinefunction(hook):
            return await hook(*args)
        answer = await self._threads.run(hook, *args)
        return await answer if inspect.isawaitable(answer) else answer

    async def iterate(self, hook: Callable[..., Any], *args: Any) -> AsyncGenerator[Any, None]:
        """What a hook yields: an async or plain generator, or anything iterable that it returns."""
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
        """The items; each is made on a thread, on which a generator is closed as well."""
        while (item := await self._threads.run(next, items, _END)) is not _END:
            try:
                yield item
            except GeneratorExit:
                await self._threads.run(getattr(items, "close", _nothing))
                raise


def _closing(items: AsyncIterable[Any]) -> AbstractAsyncContextManager[Any]:
    """Closes a generator at the end of the block; what is none has nothing to close."""
    return aclosing(items) if inspect.isasyncgen(items) else nullcontext()


def _nothing() -> None:
    """How items are closed that have nothing to close."""
