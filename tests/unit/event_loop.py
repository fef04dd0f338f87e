"""Turns of the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.integration.harness import EVENT_TIMEOUT_SEC

if TYPE_CHECKING:
    from collections.abc import Callable


async def let_other_tasks_run() -> None:
    """Return after every other task that was ready has run."""
    turned = asyncio.Event()
    asyncio.get_running_loop().call_soon(turned.set)
    await turned.wait()


async def until(condition: Callable[[], bool]) -> None:
    """Return after `condition` holds. Raise TimeoutError if it never does."""
    async with asyncio.timeout(EVENT_TIMEOUT_SEC):
        while not condition():
            await let_other_tasks_run()
