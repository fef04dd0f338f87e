"""Open and close both drivers in the same way."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

DRIVERS = ("motor", "pymongo")


@asynccontextmanager
async def connected(driver: str, url: str, **options: Any) -> AsyncIterator[Any]:
    """Return a client that belongs to the running event loop."""
    if driver == "pymongo":
        loop = asyncio.get_running_loop()
        with mock.patch.object(loop, "sock_connect", closes_cancelled_sockets(loop)):
            async with AsyncMongoClient[dict[str, Any]](url, **options) as client:
                yield client
        return
    motor: AsyncIOMotorClient[dict[str, Any]] = AsyncIOMotorClient(url, **options)
    try:
        yield motor
    finally:
        motor.close()


def closes_cancelled_sockets(loop: asyncio.AbstractEventLoop) -> Any:
    """Return a `sock_connect` that closes the socket if it is cancelled.

    pymongo 4.20 leaves that to the garbage collector. If a client is closed while its monitor connects, a later test
    would get the warning about the unclosed socket.
    """
    connect = loop.sock_connect

    def sock_connect(sock: socket.socket, address: Any) -> asyncio.Task[None]:
        connecting = loop.create_task(connect(sock, address))
        connecting.add_done_callback(lambda ended: sock.close() if ended.cancelled() else None)
        return connecting

    return sock_connect
