"""Two event loops: Temporal's worker has its own, the database and handlers stay on the caller's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


class HomeLoop:
    """The loop that owns the database handle and runs handlers (Motor objects are bound to one loop)."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.get_running_loop()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the home loop and wait for it; a cancel reaches it."""
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def call(self, function: Any, *args: Any) -> None:
        """Call `function` soon on the home loop, from any thread."""
        self._loop.call_soon_threadsafe(function, *args)
