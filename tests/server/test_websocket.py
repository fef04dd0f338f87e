"""JSON-RPC over WebSocket: concurrent calls, notifications, limits, and the end of a connection."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio
from uvicorn.server import ServerState

from flowkit.server.auth import CACHE_SEC
from flowkit.server.connection import MAX_CONCURRENT_CALLS
from flowkit.server.protocols import ClientLimits, ServerConfig, WebSocketProtocol
from flowkit.server.token_store import TokenStore
from flowkit.server.tokens import Right
from flowkit.testing import memory_database
from tests.integration.harness import eventually
from tests.server.servers import PASSWORD, Gate, routes, rpc, serving, url
from tests.server.test_auth import Clock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.server.serving import HttpServer

LIMIT = 10_000
CONNECTIONS = 2
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Front:
    """A server with a clock for the cache of its tokens, and a client of it."""

    def __init__(self, server: HttpServer, tokens: TokenStore, clock: Clock, gate: Gate) -> None:
        self.server = server
        self.tokens = tokens
        self.clock = clock
        self.gate = gate
        self.text = ""

    def connect(self, client: aiohttp.ClientSession) -> Any:
        """Open a connection with the token."""
        return client.ws_connect(url(self.server), headers={"Authorization": f"Bearer {self.text}"})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Front]:
    """The server of this module."""
    tokens, clock, gate = TokenStore(memory_database()), Clock(), Gate()
    routed = routes(gate, max_connections=CONNECTIONS)
    async with serving(tokens, gate, clock=clock, routed=routed, body_limit=LIMIT) as server:
        yield Front(server, tokens, clock, gate)


@pytest_asyncio.fixture(loop_scope="module")
async def front(shared: Front) -> Front:
    """The server with a new token and a closed gate."""
    _, shared.text = await shared.tokens.create(actor=7, rights={Right.FLOWS})
    shared.gate.opened.clear()
    shared.gate.waiting = 0
    shared.gate.ended.clear()
    return shared


@pytest_asyncio.fixture(loop_scope="module")
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """A client."""
    async with aiohttp.ClientSession() as session:
        yield session


async def test_calls_run_concurrently_and_responses_come_as_they_finish(
    front: Front, client: aiohttp.ClientSession
) -> None:
    async with front.connect(client) as connection:
        await connection.send_json(rpc("wait", call_id="slow"))
        await connection.send_json([rpc("who", call_id="fast"), rpc("add", {"a": 1}, "b")])
        fast = await connection.receive_json()
        assert [each["id"] for each in fast] == ["fast", "b"]
        assert fast[0]["result"] == {"actor": 7, "operator": False}
        front.gate.opened.set()
        assert (await connection.receive_json())["id"] == "slow"


async def test_number_of_concurrent_calls_is_bounded(front: Front, client: aiohttp.ClientSession) -> None:
    async with front.connect(client) as connection:
        for number in range(MAX_CONCURRENT_CALLS + 4):
            await connection.send_json(rpc("wait", call_id=number))

        async def full() -> bool:
            return front.gate.waiting >= MAX_CONCURRENT_CALLS

        await eventually(full)
        assert front.gate.waiting == MAX_CONCURRENT_CALLS
        front.gate.opened.set()
        ids = {(await connection.receive_json())["id"] for _ in range(MAX_CONCURRENT_CALLS + 4)}
        assert ids == {*range(MAX_CONCURRENT_CALLS + 4)}


async def test_messages_that_are_no_calls_have_errors_and_notifications_have_no_response(
    front: Front, client: aiohttp.ClientSession
) -> None:
    async with front.connect(client) as connection:
        await connection.send_bytes(json.dumps(rpc("who")).encode())
        error = (await connection.receive_json())["error"]
        assert (error["code"], error["message"]) == (-32600, "the message is binary; send JSON as text")
        await connection.send_str("{")
        assert (await connection.receive_json())["error"]["code"] == -32700
        await connection.send_json({"jsonrpc": "2.0", "method": "who"})
        await connection.send_json([{"jsonrpc": "2.0", "method": "who"}])
        await connection.send_json(rpc("who", call_id="next"))
        assert (await connection.receive_json())["id"] == "next"


async def test_message_over_the_limit_closes_the_connection(
    front: Front, client: aiohttp.ClientSession
) -> None:
    async with front.connect(client) as connection:
        await connection.send_str(" " * (LIMIT + 1))
        assert (await connection.receive()).type is aiohttp.WSMsgType.CLOSE
        assert connection.close_code == 1009


async def test_text_that_is_not_utf8_closes_the_connection_without_a_line_in_the_log(
    front: Front, client: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with front.connect(client) as connection:
        await connection.send_frame(b"\xff", aiohttp.WSMsgType.TEXT)
        assert (await connection.receive()).type is aiohttp.WSMsgType.CLOSE
        assert connection.close_code == 1007
    assert caplog.records == []


async def test_client_that_does_not_read_is_cut_off() -> None:
    gate = Gate()
    limits = ClientLimits(read_sec=0.3)
    async with (
        aiohttp.ClientSession() as session,
        serving(TokenStore(memory_database()), gate, limits=limits) as server,
        session.ws_connect(url(server), max_msg_size=0) as connection,
    ):
        await connection.send_json(rpc("flood"))
        await eventually(lambda: has_ended(gate))


async def test_pongs_for_a_client_that_does_not_read_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig(None, ClientLimits(), log_config=None)
    protocol = WebSocketProtocol(config, ServerState(), {})
    sent: list[bytes] = []
    transport: Any = SimpleNamespace(write=sent.append, is_closing=lambda: False, abort=lambda: None)
    protocol.transport = transport
    protocol.pause_writing()
    for number in range(3):
        monkeypatch.setattr(protocol.conn, "data_to_send", lambda number=number: [b"pong %d" % number])
        protocol.handle_ping()
    assert sent == []
    protocol.resume_writing()
    protocol.handle_ping()
    assert sent == [b"pong 2", b"pong 2"]


async def has_ended(gate: Gate) -> bool:
    """Return whether the notifications have ended."""
    return gate.ended == ["flood"]


async def test_subscription_notifies_until_its_connection_closes(
    front: Front, client: aiohttp.ClientSession
) -> None:
    async with front.connect(client) as connection:
        await connection.send_json(rpc("subscribe"))
        received = [await connection.receive_json() for _ in range(3)]
        assert {"jsonrpc": "2.0", "id": 1, "result": True} in received
        events = [each["params"] for each in received if "method" in each]
        assert events == [{"number": 0}, {"number": 1}]

    async def ended() -> bool:
        return front.gate.ended == ["subscription", "callback"]

    await eventually(ended)


async def test_task_that_fails_closes_its_connection(
    front: Front, client: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with front.connect(client) as connection:
        await connection.send_json(rpc("break"))
        messages = [message async for message in connection]
        assert len(messages) <= 1
        assert connection.close_code == 1011
    assert "in a task of a WebSocket connection:\nbuiltins.ValueError" in caplog.text
    assert PASSWORD not in caplog.text


async def test_connection_ends_with_its_token(front: Front, client: aiohttp.ClientSession) -> None:
    async with front.connect(client) as caller, front.connect(client) as subscriber:
        await subscriber.send_json(rpc("subscribe"))
        for _ in range(3):
            await subscriber.receive_json()
        for token in await front.tokens.list_tokens():
            await front.tokens.revoke(token.token_id)
        await caller.send_json(rpc("who"))
        assert "result" in await caller.receive_json()
        front.clock.now += CACHE_SEC
        await caller.send_json(rpc("who"))
        assert (await caller.receive()).type is aiohttp.WSMsgType.CLOSE
        assert caller.close_code == 1008
        front.gate.opened.set()
        assert (await subscriber.receive()).type is aiohttp.WSMsgType.CLOSE
        assert subscriber.close_code == 1008


async def test_connection_needs_a_token(front: Front, client: aiohttp.ClientSession) -> None:
    front.text = "nonsense"
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await front.connect(client)
    assert caught.value.status == 401


async def test_number_of_connections_is_bounded(front: Front, client: aiohttp.ClientSession) -> None:
    async def connected() -> bool:
        try:
            async with front.connect(client):
                return True
        except aiohttp.WSServerHandshakeError as error:
            assert error.status == 503
            return False

    await eventually(connected)
    async with front.connect(client), front.connect(client):
        assert not await connected()
    await eventually(connected)
