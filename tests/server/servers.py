"""An HTTP server with a few methods, on free ports of this machine, and what its tests call."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, SecretStr

from flowkit.errors import StoreRefused, StoreUnavailable
from flowkit.server.addresses import Address
from flowkit.server.app import create_app
from flowkit.server.auth import Authenticator
from flowkit.server.rights import HttpRoute, OpenAccess
from flowkit.server.rpc import (
    AlreadyExists,
    Call,
    InvalidRequest,
    Method,
    NoParams,
    NotFound,
    Params,
    rpc_routes,
)
from flowkit.server.serving import HttpServer
from flowkit.server.tokens import Right

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

    from flowkit.server.connection import Connection
    from flowkit.server.token_store import TokenStore

HOST = "127.0.0.1"
PASSWORD = "hunter2-hunter2"


class Node(Params):
    """A nested object."""

    id: int
    secret: str = ""


class Flow(Params):
    """An object with a list of objects."""

    nodes: tuple[Node, ...] = ()
    key: SecretStr | None = None


class Add(Params):
    """Two numbers."""

    a: int
    b: int = 0
    flow: Flow | None = None


class Sum(BaseModel):
    """A number."""

    total: int


class Named(Params):
    """A model with a field that has the name of the member of a call."""

    params: dict[str, int]


class Failing(Params):
    """Which error to raise."""

    error: str


class Gate:
    """Holds calls until it opens, and counts those that wait."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.waiting = 0
        self.ended: list[str] = []


async def add(call: Call, params: Add) -> Sum:
    """Add two numbers.

    The second one may be left out.
    """
    return Sum(total=params.a + params.b)


async def named(call: Call, params: Named) -> dict[str, int]:
    """Return what the field `params` contains."""
    return params.params


async def who(call: Call, params: NoParams) -> dict[str, Any]:
    """Return the caller."""
    return {"actor": call.caller.actor, "operator": call.caller.is_operator}


ERRORS: dict[str, Exception] = {
    "not found": NotFound(f"there is no flow {7}", {"flow": 7}),
    "down": StoreUnavailable(f"no server responds at {PASSWORD}"),
    "refused": StoreRefused(f"cannot store {PASSWORD}"),
    "unexpected": KeyError(PASSWORD),
}


async def fail(call: Call, params: Failing) -> None:
    """Raise an error."""
    raise ERRORS[params.error]


async def unwritable(call: Call, params: NoParams) -> Any:
    """Return a value that is not JSON."""
    return object()


def flooding(gate: Gate | None) -> Method:
    """Return a method that sends notifications without end."""

    async def notify(connection: Connection) -> None:
        assert gate is not None
        try:
            while not connection.closed:
                await connection.notify("event", {"text": " " * 1_000_000})
        finally:
            gate.ended.append("flood")

    async def flood(call: Call, params: NoParams) -> bool:
        """Send notifications without end."""
        assert call.connection is not None
        call.connection.spawn(notify(call.connection))
        return True

    return Method(
        name="flood", needs=Right.FLOWS, params=NoParams, result=bool, call=flood, websocket_only=True
    )


def methods(gate: Gate | None = None) -> list[Method]:
    """Return the methods; those that wait for `gate` need one."""

    async def wait(call: Call, params: NoParams) -> str:
        """Wait until the gate opens."""
        assert gate is not None
        gate.waiting += 1
        await gate.opened.wait()
        return "done"

    async def subscribe(call: Call, params: NoParams) -> bool:
        """Send notifications until the connection closes."""
        connection = call.connection
        assert gate is not None
        assert connection is not None

        async def notify() -> None:
            try:
                for number in range(2):
                    await connection.notify("event", {"number": number})
                await gate.opened.wait()
                await connection.notify("event", {"number": 2})
                await asyncio.Event().wait()
            finally:
                gate.ended.append("subscription")

        async def closed() -> None:
            gate.ended.append("callback")

        connection.on_close(closed)
        connection.spawn(notify())
        return True

    async def break_down(call: Call, params: NoParams) -> bool:
        """Start a task that fails."""

        async def broken() -> None:
            raise ValueError(PASSWORD)

        assert call.connection is not None
        call.connection.spawn(broken())
        return True

    simple = [
        Method(
            name="add", needs=Right.FLOWS, params=Add, result=Sum, call=add, errors=(NotFound, AlreadyExists)
        ),
        Method(name="named", needs=Right.FLOWS, params=Named, result=dict[str, int], call=named),
        Method(name="who", needs=Right.FLOWS, params=NoParams, result=dict[str, Any], call=who),
        Method(
            name="fail",
            needs=Right.FLOWS,
            params=Failing,
            result=None,
            call=fail,
            errors=(NotFound, InvalidRequest),
        ),
        Method(name="unwritable", needs=Right.FLOWS, params=NoParams, result=Any, call=unwritable),
        Method(name="wait", needs=Right.FLOWS, params=NoParams, result=str, call=wait),
    ]
    over_websocket = [
        Method(
            name=name,
            needs=Right.FLOWS,
            params=NoParams,
            result=bool,
            call=call,
            websocket_only=True,
        )
        for name, call in (("subscribe", subscribe), ("break", break_down))
    ]
    return [*simple, *over_websocket, flooding(gate)]


INFO = {"title": "test", "version": "1"}


async def broken(request: Request) -> Response:
    """Raise an error whose text must not reach the log."""
    raise ValueError(PASSWORD)


def routes(gate: Gate, **options: Any) -> list[BaseRoute]:
    """Return the routes of the methods, and one that fails."""
    return [
        *rpc_routes("/", methods(gate), INFO, **options),
        HttpRoute("/broken", broken, needs=OpenAccess.TOKEN),
    ]


@asynccontextmanager
async def serving(
    tokens: TokenStore, gate: Gate, *, clock: Any = None, routed: Any = None, **options: Any
) -> AsyncIterator[HttpServer]:
    """Serve the methods, on a free port unless `addresses` is given."""
    addresses = options.pop("addresses", [Address(host=HOST, port=0)])
    authenticator = Authenticator(
        tokens,
        open_without_tokens=all(each.loopback for each in addresses),
        **({"clock": clock} if clock else {}),
    )
    of_app = ("body_limit", "body_sec", "health", "max_calls", "max_calls_of_token")
    limits = {name: options.pop(name) for name in of_app if name in options}
    app = create_app(
        routed or routes(gate), authenticator=authenticator, **{"health": lambda: True, **limits}
    )
    server = HttpServer(app, addresses, body_limit=limits.get("body_limit", 4_000_000), **options)
    await server.start()
    try:
        yield server
    finally:
        gate.opened.set()
        await server.stop()


def url(server: HttpServer, path: str = "/") -> str:
    """Return the URL of a path on the first address of the server."""
    return f"http://{server.bound[0]}{path}"


def rpc(method: str, params: Any = None, call_id: Any = 1) -> dict[str, Any]:
    """Return a call."""
    return {
        "jsonrpc": "2.0",
        "id": call_id,
        "method": method,
        **({} if params is None else {"params": params}),
    }
