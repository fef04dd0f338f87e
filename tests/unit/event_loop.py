"""Turns of the event loop."""

from __future__ import annotations

import asyncio


async def let_other_tasks_run() -> None:
    """Return after every other task that was ready has run."""
    turned = asyncio.Event()
    asyncio.get_running_loop().call_soon(turned.set)
    await turned.wait()
