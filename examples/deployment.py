"""Connect the examples to FlowKit: at the default addresses, or at those in the environment variables."""

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
    """Return a client for tasks. It reads TEMPORAL_ADDRESS and Temporal's other variables by itself."""
    mongo: Any = AsyncIOMotorClient(os.environ.get("MONGO_URL", "mongodb://localhost:27017"), tz_aware=True)
    queue = os.environ.get("FLOWKIT_QUEUE", "flowkit")
    return Coordinator(
        db=mongo[os.environ.get("MONGO_DATABASE", "flowkit")], cfg=CoordinatorConfig(queue=queue)
    )


async def wait_until(condition: Callable[[], Awaitable[Any]], timeout_sec: float = 60.0) -> None:
    """Check `condition` ten times a second until it is true; raises TimeoutError after `timeout_sec`."""
    async with asyncio.timeout(timeout_sec):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.1)


def run(main: Coroutine[Any, Any, None]) -> NoReturn:
    """Call `asyncio.run(main)` and exit the process.

    A normal exit of Python can abort, because threads of Temporal's client outlive it (a known bug of the SDK).
    """
    asyncio.run(main)
    sys.stdout.flush()
    os._exit(0)
