"""Both drivers, opened and closed in the same way."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

DRIVERS = ("motor", "pymongo")


@asynccontextmanager
async def connected(driver: str, url: str, **options: Any) -> AsyncIterator[Any]:
    """A client, made in the running loop."""
    if driver == "pymongo":
        async with AsyncMongoClient[dict[str, Any]](url, **options) as client:
            yield client
        return
    motor: AsyncIOMotorClient[dict[str, Any]] = AsyncIOMotorClient(url, **options)
    try:
        yield motor
    finally:
        motor.close()
