"""The additions of the contract tests to the drivers."""

from __future__ import annotations

import asyncio
import socket

from tests.contract.drivers import closes_cancelled_sockets


async def test_cancelled_connect_leaves_no_socket_open() -> None:
    connect = closes_cancelled_sockets(asyncio.get_running_loop())
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept, given_up = socket.socket(), socket.socket()
        for one in (kept, given_up):
            one.setblocking(False)
        await connect(kept, server.getsockname())
        waiting = connect(given_up, server.getsockname())
        waiting.cancel()
        await asyncio.wait([waiting])
        assert given_up.fileno() == -1
        assert kept.fileno() != -1
        kept.close()
