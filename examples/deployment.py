"""Where the examples find FlowKit: at the usual addresses of this machine, or where the environment says."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from motor.motor_asyncio import AsyncIOMotorClient

from flowkit import Coordinator, CoordinatorConfig

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def coordinator() -> Coordinator:
    """A client of the tasks there; TEMPORAL_ADDRESS and the like it reads by itself."""
    mongo: Any = AsyncIOMotorClient(os.environ.get("MONGO_URL", "mongodb://localhost:27017"), tz_aware=True)
    queue = os.environ.get("FLOWKIT_QUEUE", "flowkit")
    return Coordinator(
        db=mongo[os.environ.get("MONGO_DATABASE", "flowkit")], cfg=CoordinatorConfig(queue=queue)
    )


async def until(look: Callable[[], Awaitable[Any]], seconds: float = 60.0) -> None:
    """Look ten times a second until the answer is true; TimeoutError when it never is."""
    async with asyncio.timeout(seconds):
        while True:
            if await look():
                return
            await asyncio.sleep(0.1)
