"""The server over HTTP: tokens, limits, health, errors as JSON, and what it logs."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio
import trustme
from starlette.applications import Starlette
from starlette.responses import StreamingResponse

from flowkit.errors import ConfigError, StoreUnavailable
from flowkit.server.addresses import Address
from flowkit.server.protocols import ClientLimits
from flowkit.server.rights import HttpRoute, OpenAccess
from flowkit.server.serving import HttpServer, Tls
from flowkit.server.token_store import TokenStore
from flowkit.server.tokens import Right
from flowkit.testing import memory_database
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually
from tests.server.servers import HOST, PASSWORD, Gate, rpc, serving, url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from starlette.requests import Request

    from flowkit.cli.running import LongRunning

LIMIT = 10_000
HEALTHY = asyncio.Event()
"""Whether the server of this module reports that it is healthy."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Front:
    """A server with a token, and a client of it."""

    def __init__(self, server: HttpServer, gate: Gate, text: str, client: aiohttp.ClientSession) -> None:
        self.server = server
        self.gate = gate
        self.text = text
        self.client = client

    async def request(
        self, method: str = "POST", path: str = "/", **options: Any
    ) -> tuple[int, Any, dict[str, str]]:
        """Send a request with the token. Return status, JSON body and headers."""
        headers = {"Authorization": f"Bearer {self.text}", **options.pop("headers", {})}
        async with self.client.request(
            method, url(self.server, path), headers=headers, **options
        ) as response:
            body = await response.read()
            return response.status, json.loads(body) if body else None, {**response.headers}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[Front]:
    """The server of this module."""
    tokens = TokenStore(memory_database())
    _, text = await tokens.create(actor=7, rights={Right.FLOWS})
    gate = Gate()
    HEALTHY.set()
    async with (
        aiohttp.ClientSession() as client,
        serving(tokens, gate, body_limit=LIMIT, body_sec=0.3, health=HEALTHY.is_set) as server,
    ):
        yield Front(server, gate, text, client)


def codes(found: tuple[int, Any, Any]) -> tuple[int, str]:
    """Return the status of a response and the code of its error."""
    return found[0], found[1]["error"]["code"]


async def test_call_runs_as_the_actor_of_its_token(front: Front) -> None:
    status, body, headers = await front.request(json=rpc("who"))
    assert (status, body["result"]) == (200, {"actor": 7, "operator": False})
    assert headers["Content-Type"] == "application/json"
    assert "Server" not in headers


async def test_discovery_lists_the_methods(front: Front) -> None:
    _, body, _ = await front.request(json=rpc("rpc.discover"))
    assert "add" in {each["name"] for each in body["result"]["methods"]}


async def test_notification_returns_204(front: Front) -> None:
    assert (await front.request(json={"jsonrpc": "2.0", "method": "who"}))[:2] == (204, None)


@pytest.mark.parametrize("header", ["", "Bearer nonsense", "Basic x"])
async def test_call_without_a_valid_token_returns_401(front: Front, header: str) -> None:
    status, body, headers = await front.request(json=rpc("who"), headers={"Authorization": header})
    assert (status, body["error"]["code"]) == (401, "unauthorized")
    assert headers["WWW-Authenticate"] == 'Bearer realm="flowkit"'


async def test_unknown_path_and_method_are_json_errors(front: Front) -> None:
    assert codes(await front.request(path="/nowhere")) == (404, "not_found")
    assert codes(await front.request("GET")) == (405, "method_not_allowed")
    assert (await front.request(path="/nowhere", headers={"Authorization": ""}))[0] == 401


async def test_health_needs_no_token_and_says_nothing_else(front: Front) -> None:
    for change, healthy, status in ((HEALTHY.clear, False, 503), (HEALTHY.set, True, 200)):
        change()
        found = await front.request("GET", "/health", headers={"Authorization": ""})
        assert found[:2] == (status, {"ok": healthy})


async def test_unexpected_error_has_a_reference_to_the_log(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    status, body, _ = await front.request("GET", "/broken")
    assert (status, body["error"]["code"]) == (500, "internal_error")
    reference = body["error"]["message"].split()[2].rstrip(";")
    assert f"unexpected error {reference} in /broken:\nbuiltins.ValueError\n" in caplog.text
    assert PASSWORD not in caplog.text + str(body)


# --- limits -------------------------------------------------------------------------------------------------------


async def chunks(count: int) -> AsyncIterator[bytes]:
    """Yield a body in parts."""
    for _ in range(count):
        yield b" " * 1_000


@pytest.mark.parametrize(
    "body",
    [lambda: b" " * (LIMIT + 1), lambda: chunks(12), lambda: chunks(2_000)],
    ids=["declared", "chunked", "long"],
)
async def test_body_over_the_limit_returns_413(front: Front, body: Callable[[], Any]) -> None:
    status, found, _ = await front.request(data=body())
    assert (status, found["error"]) == (
        413,
        {"code": "body_too_large", "message": "the body is larger than 10,000 bytes; send less at once"},
    )
    assert (await front.request(json=rpc("who")))[0] == 200


async def test_body_of_the_limit_is_accepted(front: Front) -> None:
    text = json.dumps(rpc("who"))
    for body in (text.ljust(LIMIT).encode(), chunks(10)):
        assert (await front.request(data=body))[0] == 200


async def test_slow_client_does_not_delay_others_and_is_cut_off(front: Front) -> None:
    reader, writer = await asyncio.open_connection(HOST, front.server.bound[0].port)
    head = (
        f"POST / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {front.text}\r\nContent-Length: 100\r\n\r\nhalf"
    )
    writer.write(head.encode())
    await writer.drain()
    assert (await front.request(json=rpc("who")))[0] == 200
    response = (await reader.read()).decode()
    writer.close()
    assert response.startswith("HTTP/1.1 408 ")
    assert "the body did not arrive within 0.3 s; send it again" in response


async def test_client_that_leaves_during_its_body_writes_no_error_to_the_log(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    _, writer = await asyncio.open_connection(HOST, front.server.bound[0].port)
    writer.write(f"POST / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {front.text}\r\n".encode())
    writer.write(b"Content-Length: 10\r\n\r\n{")
    await writer.drain()
    writer.close()
    await eventually(lambda: answered("POST / 400" in caplog.text))
    assert [each.levelname for each in caplog.records] == ["INFO"]


async def test_slow_call_does_not_delay_others(front: Front) -> None:
    slow = asyncio.create_task(front.request(json=rpc("wait")))
    await eventually(lambda: answered(front.gate.waiting > 0))
    assert (await front.request(json=rpc("who")))[0] == 200
    assert not slow.done()
    front.gate.opened.set()
    assert (await slow)[1]["result"] == "done"


async def answered(value: bool) -> bool:
    """Return a value, for `eventually`."""
    return value


# --- clients that occupy the server -------------------------------------------------------------------------------

HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"


async def opened(server: HttpServer, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection on which these bytes were sent."""
    reader, writer = await asyncio.open_connection(HOST, server.bound[0].port)
    writer.write(sent)
    await writer.drain()
    return reader, writer


async def received(reader: asyncio.StreamReader) -> bytes:
    """Return what the server sends until it closes the connection."""
    found = b""
    with suppress(ConnectionResetError):  # what the client has sent since was not read
        while part := await reader.read(65_536):
            found += part
    return found


@pytest.mark.parametrize(
    ("sent", "responses"),
    [
        (b"", 0),
        (HEAD, 0),
        (HEAD + b"\r\n" + HEAD, 1),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n ", 1),
    ],
    ids=["nothing", "first call", "second call", "body after the response"],
)
async def test_client_that_does_not_finish_a_call_is_cut_off(sent: bytes, responses: int) -> None:
    tokens = TokenStore(memory_database())
    await tokens.create(rights={Right.OPERATOR})
    async with serving(tokens, Gate(), limits=ClientLimits(header_sec=0.3)) as server:
        reader, writer = await opened(server, sent)
        ended = asyncio.create_task(received(reader))
        while not ended.done():
            if sent:
                writer.write(b"x")
            await asyncio.wait({ended}, timeout=0.02)
        assert (await ended).count(b"HTTP/1.1 ") == responses
        writer.close()


async def test_connections_that_wait_keep_nobody_out() -> None:
    limits = ClientLimits(connections=3)
    async with (
        aiohttp.ClientSession() as client,
        serving(TokenStore(memory_database()), Gate(), limits=limits) as server,
    ):
        flood = [await opened(server, HEAD) for _ in range(20)]
        front = Front(server, Gate(), "", client)
        assert (await without_token(front, {}))[0] == 200
        assert (await front.request("GET", "/health"))[0] == 200
        closed = [reader for reader, _ in flood[:17]]
        assert [await received(reader) for reader in closed] == [b""] * 17
        for _, writer in flood:
            writer.close()


async def test_health_is_served_while_too_many_calls_are_in_flight() -> None:
    gate = Gate()
    limits = ClientLimits(connections=2)
    async with (
        aiohttp.ClientSession() as client,
        serving(TokenStore(memory_database()), gate, limits=limits, max_calls=2) as server,
    ):
        front = Front(server, gate, "", client)
        calls = [asyncio.create_task(without_token(front, {}, call=rpc("wait"))) for _ in range(2)]
        await eventually(lambda: answered(gate.waiting == 2))
        found = await without_token(front, {})
        assert codes(found) == (503, "too_many_calls")
        assert found[2]["Connection"] == "close"
        for _ in range(3):
            assert (await front.request("GET", "/health"))[:2] == (200, {"ok": True})
        gate.opened.set()
        assert [(await call)[1]["result"] for call in calls] == ["done"] * 2
        assert (await without_token(front, {}))[0] == 200


async def test_one_token_leaves_calls_to_others() -> None:
    gate, tokens = Gate(), TokenStore(memory_database())
    texts = [(await tokens.create(actor=7, rights={Right.FLOWS}))[1] for _ in range(2)]
    async with (
        aiohttp.ClientSession() as client,
        serving(tokens, gate, max_calls_of_token=2) as server,
    ):
        greedy, other = (Front(server, gate, text, client) for text in texts)
        calls = [asyncio.create_task(greedy.request(json=rpc("wait"))) for _ in range(2)]
        await eventually(lambda: answered(gate.waiting == 2))
        status, found, headers = await greedy.request(json=rpc("rpc.discover"))
        assert (status, found["error"]["code"], headers["Connection"]) == (503, "too_many_calls", "close")
        assert "2 calls with token" in found["error"]["message"]
        assert (await other.request(json=rpc("rpc.discover")))[0] == 200
        gate.opened.set()
        assert [(await call)[1]["result"] for call in calls] == ["done"] * 2
        assert (await greedy.request(json=rpc("rpc.discover")))[0] == 200


async def test_client_that_does_not_read_its_response_is_cut_off() -> None:
    ended = asyncio.Event()

    async def flood(request: Request) -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            try:
                for _ in range(20):
                    yield b" " * 1_000_000
            finally:
                ended.set()

        return StreamingResponse(parts())

    limits = ClientLimits(read_sec=0.3)
    async with serving(
        TokenStore(memory_database()),
        Gate(),
        limits=limits,
        routed=[HttpRoute("/", flood, needs=OpenAccess.TOKEN)],
    ) as server:
        _, writer = await opened(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.wait_for(ended.wait(), EVENT_TIMEOUT_SEC)
        writer.close()


# --- the log ------------------------------------------------------------------------------------------------------


async def test_each_request_is_logged_without_its_content(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await front.request(path=f"/?{PASSWORD}", json=rpc("add", {"a": PASSWORD}))
    await front.request(path="/line%0Abreak", headers={"X-Key": PASSWORD})
    await front.request(headers={"Authorization": f"Bearer {PASSWORD}"})
    await front.request("GET", "/health")
    async with front.client.ws_connect(
        url(front.server, f"/?{PASSWORD}"), headers={"Authorization": f"Bearer {front.text}"}
    ) as connection:
        await connection.send_json(rpc("add", {"a": PASSWORD}))
        await connection.receive_json()

    async def logged() -> bool:
        return "WEBSOCKET / 101" in caplog.text

    await eventually(logged)
    lines = [
        record.getMessage().partition(" ms")[0].rpartition(" ")[0] + record.getMessage().partition(" ms")[2]
        for record in caplog.records
        if record.name == "flowkit.server"
    ]
    assert lines == [
        "POST / 200, actor 7",
        r"POST /line\nbreak 404, actor 7",
        "POST / 401, actor -",
        "GET /health 200, actor -",
        "WEBSOCKET / 101, actor 7",
    ]
    assert PASSWORD not in caplog.text
    assert front.text.split("_", 2)[2] not in caplog.text


# --- without tokens -----------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local() -> AsyncIterator[Front]:
    """A server without tokens."""
    gate = Gate()
    async with (
        aiohttp.ClientSession() as client,
        serving(TokenStore(memory_database()), gate) as server,
    ):
        yield Front(server, gate, "", client)


async def without_token(
    local: Front, headers: dict[str, str], call: Any = None
) -> tuple[int, Any, dict[str, str]]:
    """Send a call without a token."""
    given = {"Content-Type": "application/json", **headers}
    async with local.client.post(
        url(local.server), data=json.dumps(call or rpc("who")), headers=given
    ) as response:
        return response.status, await response.json(), {**response.headers}


@pytest.mark.parametrize("host", [None, "localhost", "localhost:1", "[::1]:8080", "127.8.8.8"])
async def test_local_call_without_tokens_acts_as_operator(local: Front, host: str | None) -> None:
    status, body, _ = await without_token(local, {"Host": host} if host else {})
    assert (status, body["result"]) == (200, {"actor": None, "operator": True})


async def test_page_of_the_server_itself_may_call_it(local: Front) -> None:
    assert (await without_token(local, {"Origin": url(local.server, "")}))[0] == 200


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Host": "evil.example"}, 403, "host_not_allowed"),
        ({"Host": "127.0.0.1.evil.example"}, 403, "host_not_allowed"),
        ({"Host": "localhost:x@evil.example"}, 403, "host_not_allowed"),
        ({"Host": "[::1"}, 403, "host_not_allowed"),
        ({"Host": ""}, 403, "host_not_allowed"),
        ({"Host": "localhost:9652.evil.example"}, 403, "host_not_allowed"),
        ({"Origin": "https://evil.example"}, 403, "origin_not_allowed"),
        ({"Origin": "http://localhost:3000"}, 403, "origin_not_allowed"),
        ({"Origin": "null"}, 403, "origin_not_allowed"),
        ({"Sec-Fetch-Site": "cross-site"}, 403, "site_not_allowed"),
        ({"Sec-Fetch-Site": "same-site"}, 403, "site_not_allowed"),
        (
            {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
            403,
            "site_not_allowed",
        ),
        ({"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
    ],
)
async def test_call_of_another_web_page_is_rejected(
    local: Front, headers: dict[str, str], status: int, code: str
) -> None:
    assert codes(await without_token(local, headers)) == (status, code)


async def test_another_web_page_does_not_see_whether_a_server_runs(local: Front) -> None:
    """An image, for example, whose size or error a page could see. A link opens what needs no token."""
    image = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    for headers, status in ((image, 403), (link, 200)):
        async with local.client.get(url(local.server, "/health"), headers=headers) as response:
            assert response.status == status


async def test_header_of_a_web_page_must_not_be_repeated(local: Front) -> None:
    repeated = [("Origin", "https://evil.example"), ("Origin", url(local.server, ""))]
    async with local.client.post(url(local.server), json=rpc("who"), headers=repeated) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (400, "repeated_header")


async def test_websocket_of_another_web_page_is_rejected_with_one_line_in_the_log(
    local: Front, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await local.client.ws_connect(url(local.server), headers={"Origin": "https://evil.example"})
    assert caught.value.status == 403
    lines = [(each.levelname, each.getMessage().partition(" ms")[0][:16]) for each in caplog.records]
    assert lines == [("INFO", "WEBSOCKET / 403 ")]


async def test_outage_of_the_database_returns_503(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unavailable(_: TokenStore, text: str) -> None:
        raise StoreUnavailable(f"no server at {PASSWORD}")

    tokens = TokenStore(memory_database())
    _, text = await tokens.create(rights={Right.OPERATOR})
    monkeypatch.setattr(TokenStore, "find", unavailable)
    async with aiohttp.ClientSession() as client, serving(tokens, Gate()) as server:
        found = await Front(server, Gate(), text, client).request(json=rpc("who"))
    assert codes(found) == (503, "mongo_unavailable")
    assert PASSWORD not in str(found)


# --- addresses ----------------------------------------------------------------------------------------------------


async def test_server_listens_on_several_addresses_until_it_stops() -> None:
    addresses = [Address(host=HOST, port=0), Address(host="localhost", port=0)]
    async with aiohttp.ClientSession() as client:
        async with serving(TokenStore(memory_database()), Gate(), addresses=addresses) as server:
            process: LongRunning = server
            ended = asyncio.create_task(process.wait_stopped())
            assert server.health().ok
            for bound in server.bound:
                async with client.get(f"http://{bound}/health") as response:
                    assert response.status == 200
            assert not ended.done()
        await ended
        assert not server.health().running
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.get(f"http://{server.bound[0]}/health")


async def test_stop_cancels_calls_that_take_too_long(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    async with (
        aiohttp.ClientSession() as client,
        serving(TokenStore(memory_database()), gate, stop_sec=0) as server,
        client.ws_connect(url(server)) as connection,
    ):
        await connection.send_json(rpc("wait"))
        call = asyncio.create_task(without_token(Front(server, gate, "", client), {}, call=rpc("wait")))
        await eventually(lambda: answered(gate.waiting == 2))
        await server.stop()
        assert codes(await call) == (503, "stopping")
        assert (await connection.receive()).type is aiohttp.WSMsgType.CLOSE
    assert "Traceback" not in caplog.text


async def test_port_in_use_is_reported_and_no_address_stays_open() -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        server = HttpServer(Starlette(), [Address(host=HOST, port=0), Address(host=HOST, port=port)])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: .*in use; choose a free"):
            await server.start()
    assert not server.health().running


@pytest.mark.parametrize(("host", "port"), [("no-such-host.invalid", 0), ("192.0.2.1", 0)])
async def test_unusable_address_is_reported(host: str, port: int) -> None:
    server = HttpServer(Starlette(), [Address(host=host, port=port)])
    with pytest.raises(ConfigError, match=f"cannot listen on {host}:{port}: .*; choose a free port"):
        await server.start()


async def test_tls_files_that_cannot_be_used_are_reported(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing")
    for name in (str(empty), "absent.pem"):
        tls = Tls(cert_file=name, key_file=name)
        with pytest.raises(ConfigError, match=f"TLS cannot use {name} and {name}: .*; name the PEM files"):
            await HttpServer(Starlette(), [Address(host=HOST, port=0)], tls=tls).start()


async def test_tls_server_serves_https_and_cuts_off_handshakes(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert(HOST)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.private_key_pem.write_to_path(key)
    for each in issued.cert_chain_pems:
        each.write_to_path(cert, append=True)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    tls = Tls(cert_file=str(cert), key_file=str(key))
    async with (
        aiohttp.ClientSession() as client,
        serving(TokenStore(memory_database()), Gate(), tls=tls) as server,
        client.get(f"https://{server.bound[0]}/health", ssl=trusting) as response,
    ):
        assert await response.json() == {"ok": True}
    limits = ClientLimits(header_sec=0.2)
    async with serving(TokenStore(memory_database()), Gate(), tls=tls, limits=limits) as server:
        reader, writer = await opened(server, b"\x16")
        assert await received(reader) == b""
        writer.close()
