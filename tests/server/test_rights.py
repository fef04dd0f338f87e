"""What each call needs of its caller: the tables that the page on rights shows, and the parts that actors
play in contexts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio
from starlette.responses import Response
from starlette.routing import Mount, Route, WebSocketRoute

from flowkit.connection import TemporalUnavailable
from flowkit.gateway.permissions import EVERY_ACTOR, PERMISSIONS, ActorPart, may_call, parts_of
from flowkit.gateway.secret_box import SecretBox
from flowkit.gateway.service import Gateway, methods
from flowkit.gateway.store import FlowStore
from flowkit.page.api import PageApi, page_routes
from flowkit.server.app import create_app
from flowkit.server.auth import Authenticator, Caller
from flowkit.server.openapi import Operation
from flowkit.server.rights import HttpRoute, SocketRoute
from flowkit.server.rpc import Call, Method, NoParams, PermissionDenied, RpcDispatcher, discovery
from flowkit.server.token_store import TokenStore
from flowkit.server.tokens import Right
from flowkit.testing import memory_database
from reference.rights import METHODS, gateway_routes, permits, queue_routes, sections
from tests.server.servers import Gate, rpc, serving, url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from starlette.requests import Request
    from starlette.routing import BaseRoute
    from starlette.websockets import WebSocket

    from flowkit.server.serving import HttpServer

NONE, UNKNOWN = "no token", "fk_0000000000000000_" + "A" * 43
CONTEXT = {"id": 3, "admins": [1], "executors": [2, 4], "readers": [3]}
PLAYERS = {1: "admin", 2: "executor", 3: "reader", 4: "creator of the flow", 9: "stranger"}


class Unreachable:
    """Temporal, or a supervisor, while it does not respond."""

    def __getattr__(self, name: str) -> Any:
        raise TemporalUnavailable("nothing responds")


def new_gateway() -> Gateway:
    """Return a gateway on an empty database, without Temporal and supervisors."""
    nothing: Any = Unreachable()
    return Gateway(FlowStore(memory_database()), nothing, nothing, SecretBox())


# --- declarations -------------------------------------------------------------------------------------------------


async def endpoint(request: Request) -> Response:
    """Respond."""
    return Response("yes")


async def connect(socket: WebSocket) -> None:
    """Accept a connection."""
    await socket.accept()
    await socket.close()


@pytest.mark.parametrize(
    "route",
    [
        Route("/x", endpoint),
        WebSocketRoute("/x", connect),
        Mount("/x", routes=[HttpRoute("/y", endpoint, needs=Right.FLOWS)]),
    ],
)
def test_a_route_that_declares_nothing_prevents_the_start(route: BaseRoute) -> None:
    authenticator = Authenticator(TokenStore(memory_database()))
    with pytest.raises(TypeError, match="does not declare what its callers need; use HttpRoute"):
        create_app([route], authenticator=authenticator, health=bool)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (HttpRoute, {"path": "/x", "endpoint": endpoint}),
        (SocketRoute, {"path": "/x", "endpoint": connect}),
        (Method, {"name": "x", "params": NoParams, "result": None, "call": endpoint}),
        (Operation, {"method": "GET", "path": "/x", "call": endpoint, "result": NoParams}),
    ],
)
def test_routes_methods_and_operations_must_declare_what_they_need(kind: Any, given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="needs"):
        kind(**given)
    kind(**given, needs=Right.FLOWS)


# --- the table ----------------------------------------------------------------------------------------------------


class Front:
    """A gateway, admission, the page and a WebSocket for `flows` on one server, and a token of each kind."""

    def __init__(self, server: HttpServer, client: aiohttp.ClientSession, tokens: dict[str, str]) -> None:
        self.server = server
        self.client = client
        self.tokens = tokens

    def headers(self, token: str) -> dict[str, str]:
        """Return the headers of a caller."""
        return {} if token == NONE else {"Authorization": f"Bearer {self.tokens.get(token, token)}"}

    async def outcome(self, call: str, token: str) -> int:
        """Make a call of the table. Return 401 or 403 if it is refused, and otherwise 0."""
        verb, _, path = call.strip("`").partition(" ")
        if not path:
            return await self._outcome_of_method(verb, token)
        if verb == "WebSocket":
            return await self._outcome_of_socket(path, token)
        body: dict[str, Any] | None = {} if verb in ("POST", "PUT") else None
        async with self.client.request(
            verb, url(self.server, path.replace("{id}", "x")), headers=self.headers(token), json=body
        ) as response:
            if response.status == 403:
                assert (await response.json())["error"]["code"] == "permission_denied"
            return response.status if response.status in (401, 403) else 0

    async def _outcome_of_method(self, method: str, token: str) -> int:
        async with self.client.post(
            url(self.server), json=rpc(method, {}), headers=self.headers(token)
        ) as response:
            if response.status != 200:
                return response.status
            error = (await response.json()).get("error", {})
            return 403 if error.get("code") == PermissionDenied.code else 0

    async def _outcome_of_socket(self, path: str, token: str) -> int:
        try:
            async with self.client.ws_connect(url(self.server, path), headers=self.headers(token)):
                return 0
        except aiohttp.WSServerHandshakeError as error:
            return error.status


@pytest_asyncio.fixture
async def front() -> AsyncIterator[Front]:
    """A server with everything."""
    nothing: Any = None
    store = TokenStore(memory_database())
    tokens = {right.value: (await store.create(actor=7, rights={right}))[1] for right in Right}
    # `/` and `/health` are in both parts of the table, and an application has each path once.
    routes = [
        *gateway_routes(new_gateway()),
        *queue_routes(),
        *page_routes(PageApi(nothing, nothing, web_ui=None, read_only=False)),
        SocketRoute("/flows", connect, needs=Right.FLOWS),
    ]
    async with aiohttp.ClientSession() as client, serving(store, Gate(), routed=routes) as server:
        yield Front(server, client, tokens)


async def test_every_call_is_permitted_to_the_tokens_of_the_table_and_to_no_others(front: Front) -> None:
    rows = [row for section in sections().values() for row in section]
    wrong = []
    for row in rows:
        for token in (NONE, UNKNOWN, *Right):
            right = None if token in (NONE, UNKNOWN) else Right(token)
            expected = 0 if permits(row.needs, right) else 401 if right is None else 403
            found = await front.outcome(row.call, token)
            wrong += [(row.call, token, found)] if found != expected else []
    assert wrong == []
    assert len(rows) > 40


async def test_the_table_has_every_method_that_the_gateway_serves(front: Front) -> None:
    async with front.client.post(
        url(front.server), json=rpc("rpc.discover"), headers=front.headers("admission")
    ) as response:
        served = {each["name"] for each in (await response.json())["result"]["methods"]}
    listed = {row.call.strip("`") for row in sections()[METHODS]}
    assert listed == served | {"rpc.discover"}


async def test_a_connection_needs_its_right_before_it_is_accepted(front: Front) -> None:
    found = {token: await front.outcome("WebSocket /flows", token) for token in (NONE, *Right)}
    assert found == {right: 403 for right in Right} | {NONE: 401, Right.OPERATOR: 0, Right.FLOWS: 0}


async def test_the_refusal_of_a_method_names_the_right_before_the_parameters_are_read(front: Front) -> None:
    calls = [rpc("flow.start", {"wrong": 1}), rpc("actor.create", {}, 2), rpc("no.such", {}, 3)]
    async with front.client.post(
        url(front.server), json=calls, headers=front.headers("admission")
    ) as response:
        flow, actor, unknown = [each["error"] for each in await response.json()]
    assert flow["data"] == {"method": "flow.start", "right": "flows"}
    assert "flow.start: the token lacks the right flows; create one with" in flow["message"]
    assert actor["data"] == {"method": "actor.create", "right": "operator"}
    assert unknown["code"] == -32601


# --- parts in contexts --------------------------------------------------------------------------------------------


def params_for(actor: int) -> dict[str, dict[str, Any]]:
    """Return valid parameters of each method, for what this actor would create."""
    own = {"caller_id": actor, "context_id": 3}
    flow, by_job = {"context_id": 3, "id": 40}, {"context_id": 3, "id": 5, "caller_id": 4}
    message = {"context_id": 3, "caller_id": 4, "id": "none"}
    in_context = {"context_id": 3}
    return {
        "actor.create": {"actor": {"id": actor}},
        "actor.load": {"id": 1},
        "actor.list": {},
        "context.create": {"context": CONTEXT},
        "context.load": {"id": 3},
        "context.list": {},
        "runner.create": {**in_context, "runner": {"id": 71, "address": "http://127.0.0.1:1"}},
        "runner.load": {**in_context, "id": 71},
        "runner.list": in_context,
        "runner.ping": {**in_context, "id": 71},
        "job.create": {**in_context, "job": {**own, "id": 6, "script": "s", "executor": "e"}},
        "job.load": by_job,
        "job.list": in_context,
        "job.result": {**by_job, "flow_id": 40},
        "job.logs": {**by_job, "flow_id": 40},
        "flow.create": {**in_context, "flow": {**own, "id": 100 + actor, "jobs": [5]}},
        "flow.replace": {**in_context, "flow": {**own, "id": 40, "jobs": [5]}},
        "flow.add_nodes": {**flow, "nodes": [{"id": 7}]},
        "flow.list": in_context,
        **dict.fromkeys(("flow.load", "flow.start", "flow.status", "flow.dag", "flow.cancel"), flow),
        **dict.fromkeys(("flow.retry", "flow.subscribe"), flow),
        "node.satisfy": {**flow, "prerequisite": "p"},
        "message.create": {**in_context, "message": {**own, "id": 8, "message": "text"}},
        "message.load": message,
        "message.list": in_context,
        "message.status": message,
        "rpc.discover": {},
    }


class Closed:
    """A WebSocket connection that has closed already."""

    async def notify(self, *given: Any) -> None:
        """Send nothing."""

    def subscribe(self, subject: str, work: Coroutine[Any, Any, None]) -> bool:
        """Run nothing."""
        work.close()
        return True


async def code_of(dispatcher: RpcDispatcher, method: str, params: Any, caller: Caller) -> int:
    """Return the code of the error of a call; 0 if there is none."""
    connection: Any = Closed()
    answer = await dispatcher.dispatch(
        json.dumps(rpc(method, params)), Call(caller=caller, connection=connection)
    )
    assert answer is not None
    return answer[1][0]


async def world() -> RpcDispatcher:
    """Return a gateway with a context, a job of each actor and a flow of actor 4."""
    dispatcher = RpcDispatcher([*methods(new_gateway()), discovery({})])
    operator = Caller(actor=None, rights=frozenset({Right.OPERATOR}))
    given = params_for(4)
    job = {**given["job.create"]["job"], "id": 5}
    calls = [
        ("context.create", given["context.create"]),
        ("runner.create", given["runner.create"]),
        *(("job.create", {"context_id": 3, "job": {**job, "caller_id": actor}}) for actor in PLAYERS),
        ("flow.create", given["flow.replace"]),
    ]
    assert {await code_of(dispatcher, *call, operator) for call in calls} == {0}
    return dispatcher


def expected(method: str, actor: int) -> bool:
    """Return whether docs/flows.md permits a method to an actor."""
    needed = ["flow.create", "flow.replace"] if method == "flow.replace" else [method]
    found = parts_of(actor, CONTEXT, creator=4)
    return all(PERMISSIONS[each] == EVERY_ACTOR or may_call(each, found) for each in needed)


def test_every_method_but_a_subscription_can_be_called_over_http() -> None:
    assert [each.name for each in methods(new_gateway()) if each.websocket_only] == ["flow.subscribe"]


@pytest.mark.parametrize("method", [*PERMISSIONS])
async def test_every_method_is_permitted_to_the_parts_of_the_table_and_to_no_others(method: str) -> None:
    dispatcher = await world()
    called = "flow.create" if method == "flow.replace" else method
    permitted = {}
    for actor, name in PLAYERS.items():
        caller = Caller(actor=actor, rights=frozenset({Right.FLOWS}))
        code = await code_of(dispatcher, called, params_for(actor)[method], caller)
        assert code != -32602, "the parameters of the test are valid"
        permitted[name] = code != PermissionDenied.code
    assert permitted == {name: expected(method, actor) for actor, name in PLAYERS.items()}
    assert {*params_for(1)} == {*PERMISSIONS}
    assert ActorPart.CREATOR in parts_of(4, CONTEXT, creator=4)
