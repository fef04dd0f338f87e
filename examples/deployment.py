"""Where the examples find FlowKit: at the usual addresses of this machine, or where the environment says."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from motor.motor_asyncio import AsyncIOMotorClient

from flowkit import Coordinator, CoordinatorConfig

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine


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


def run(main: Coroutine[Any, Any, None]) -> NoReturn:
    """`asyncio.run`, and the end of the process.

    Python's own way out is aborted now and then: threads of Temporal's client outlive it (a known fault of its SDK).
    """
    asyncio.run(main)
    sys.stdout.flush()
    os._exit(0)
