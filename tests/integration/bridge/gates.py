"""A handler of external workers that waits until its test opens it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from flowkit.testing.external import Final, Result

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Gate:
    """Yields one batch, waits until it is opened or cancelled, then yields a second batch and final metrics."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()

    def open(self) -> None:
        """Let all runs continue."""
        self._opened.set()

    async def handler(self, run: Any) -> AsyncIterator[Any]:
        """Run a node."""
        yield Result({"number": 0}, "b0")
        await run.cancellable(self._opened.wait())
        yield Result({"number": 1}, "b1")
        yield Final({"total": 2})
