"""Turns of the event loop."""

from __future__ import annotations

import asyncio


async def others_had_their_turn() -> None:
    """Return when everything that was ready to run has run."""
    turned = asyncio.Event()
    asyncio.get_running_loop().call_soon(turned.set)
    await turned.wait()
