"""What a client of the gateway does with responses that are not those of a gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from flowkit.errors import ConfigError
from flowkit.gateway.client import GatewayClient, GatewayUnavailable
from flowkit.gateway.http_client import UnusableResponse, read_body

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def elsewhere() -> AsyncIterator[tuple[str, list[str]]]:
    """A server that redirects `/away` to `/taken`: its address, and the paths of the requests."""
    paths: list[str] = []

    async def respond(request: web.Request) -> web.Response:
        paths.append(request.path)
        if request.path == "/long":
            return web.Response(body=b"x" * 1_000)
        if request.path == "/away":
            return web.Response(status=307, headers={"Location": "/taken"})
        return web.json_response({"jsonrpc": "2.0", "id": 1, "result": {}})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", respond)
    async with TestServer(app) as server:
        yield f"http://user:password@127.0.0.1:{server.port}/away?key=word", paths


@pytest.mark.parametrize("how", ["call", "events"])
async def test_a_redirect_is_not_followed(elsewhere: tuple[str, list[str]], how: str) -> None:
    url, paths = elsewhere
    async with GatewayClient(url) as client:
        with pytest.raises(GatewayUnavailable, match="redirects the request") as raised:
            await (client.call("context.list") if how == "call" else anext(client.events(3, 40)))
    assert paths == ["/away"]
    assert not any(part in str(raised.value) for part in ("user", "word"))


async def test_an_invalid_address_is_shown_without_credentials() -> None:
    with pytest.raises(ConfigError, match="must begin with http") as wrong_scheme:
        GatewayClient("ftp://user:password@host/")
    async with GatewayClient("http://user:password@host:99999/") as client:
        with pytest.raises(GatewayUnavailable, match="no valid URL") as wrong_port:
            await client.call("context.list")
    assert not any("password" in str(raised.value) for raised in (wrong_scheme, wrong_port))


async def test_a_response_may_be_as_large_as_its_limit(elsewhere: tuple[str, list[str]]) -> None:
    long = elsewhere[0].replace("/away", "/long")
    async with aiohttp.ClientSession() as session:
        async with session.get(long) as response:
            assert len(await read_body(response, 1_000)) == 1_000
        async with session.get(long) as response:
            with pytest.raises(UnusableResponse, match="returns more than 999 bytes"):
                await read_body(response, 999)
