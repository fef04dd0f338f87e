"""The ASGI application of the server: routes behind authentication, limits, a request log and `/health`.

`_Entrance` is plain ASGI middleware, which costs a call a few microseconds. Endpoints find the `Caller` as
`request.user`. Those that take long call `check` of the scope now and then: it raises HttpError if the token is no
longer valid.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from flowkit.core.utils import dumps
from flowkit.errors import StoreUnavailable
from flowkit.server.errors import HttpError, Unauthorized, log_unexpected
from flowkit.server.rights import HttpRoute, OpenAccess, public_paths
from flowkit.text import printable, printed, truncate
from flowkit.validation.web_pages import (
    FETCH_HEADERS,
    SITE,
    comes_from_another_page,
    names_loopback,
    opens_a_page,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from starlette.requests import Request
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from flowkit.server.auth import Authenticator, Caller

BODY_LIMIT = 4_000_000
"""Maximum size of a request's body and of a WebSocket message, in bytes."""

BODY_SEC = 30.0
"""Within this time, a client must have sent the body of its request."""

CALLER_SEC = 10.0
"""How long the check of a token may take."""

MAX_CALLS = 500
"""Maximum number of calls in flight, WebSocket connections included; beyond it, the server returns status 503."""

MAX_CALLS_OF_TOKEN = 250
"""Maximum number of them with one token, so that a token leaves calls to others."""

HEALTH_PATH = "/health"

_MAX_PATH_CHARS = 200
_POLICY_VIOLATION, _INTERNAL_ERROR, _TRY_AGAIN_LATER = 1008, 1011, 1013
"""Close codes of WebSocket connections."""

_CHECKED = (b"host", b"origin", b"content-type", *(each.encode() for each in FETCH_HEADERS))
"""The headers that show which web page has caused a call."""

_logger = logging.getLogger("flowkit.server")


def create_app(
    routes: Sequence[BaseRoute],
    *,
    authenticator: Authenticator,
    health: Callable[[], bool],
    body_limit: int = BODY_LIMIT,
    body_sec: float = BODY_SEC,
    max_calls: int = MAX_CALLS,
    max_calls_of_token: int = MAX_CALLS_OF_TOKEN,
) -> Starlette:
    """Return the application with the given routes, to which only authenticated calls come, and `/health`.

    Raise TypeError if a route does not declare what it needs (`flowkit.server.rights`).
    `health` says whether the process is healthy: `/health` returns 200 or 503, and needs no token. A body of more than
    `body_limit` bytes gets status 413, and one that takes more than `body_sec` seconds 408. While `max_calls` are in
    flight, or `max_calls_of_token` with the same token, others get 503, except those of `/health`.
    """

    async def respond_health(request: Request) -> Response:
        ok = health()
        return _json_response(200 if ok else 503, {"ok": ok})

    served = [*routes, HttpRoute(HEALTH_PATH, respond_health, needs=OpenAccess.NOTHING)]
    entrance = Middleware(
        _Entrance,
        authenticator=authenticator,
        public=public_paths(served),
        body_limit=body_limit,
        body_sec=body_sec,
        max_calls=max_calls,
        max_calls_of_token=max_calls_of_token,
    )
    return Starlette(
        routes=served,
        middleware=[entrance],
        exception_handlers={HTTPException: _respond_http_exception},
    )


def _json_response(status: int, value: Any, headers: Any = None) -> Response:
    return Response(dumps(value), status, headers, media_type="application/json")


async def _respond_http_exception(request: Request, error: Exception) -> Response:
    """Return Starlette's own errors, such as 404 and 405, as JSON."""
    assert isinstance(error, HTTPException)
    code = error.detail.lower().replace(" ", "_")
    found = {"code": code, "message": f"{request.method} {_shown_path(request.scope)}: {error.detail}"}
    return _json_response(error.status_code, {"error": found}, error.headers)


class _Entrance:
    """Middleware: authenticates, limits bodies, turns errors into JSON, and logs each request."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticator: Authenticator,
        public: frozenset[str],
        body_limit: int,
        body_sec: float,
        max_calls: int,
        max_calls_of_token: int,
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._public = public
        self._body_limit = body_limit
        self._body_sec = body_sec
        self._max_calls = max_calls
        self._max_calls_of_token = max_calls_of_token
        self._calls = 0
        self._calls_of: Counter[str] = Counter()
        """Calls in flight by the id of their token."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request or one WebSocket connection."""
        began = time.perf_counter()
        response = _Response(send)
        try:
            await self._admit(scope, receive, response)
        except HttpError as error:
            await response.refuse(scope, error)
        finally:
            _log_request(scope, response.status, time.perf_counter() - began)

    async def _admit(self, scope: Scope, receive: Receive, response: _Response) -> None:
        """Run the application. Raise HttpError for every error, so that none reaches uvicorn's log."""
        try:
            await self._run(scope, receive, response)
        except HttpError:
            raise
        except asyncio.CancelledError:  # only the stopping server cancels a request
            raise HttpError(503, "stopping", "the server has stopped during the call; try again") from None
        except (
            ClientDisconnect
        ):  # during the body; nobody reads the response, and it is no error of the server
            raise HttpError(400, "incomplete_body", "the body is incomplete; send it again") from None
        except Exception as error:
            reference = log_unexpected(error, _shown_path(scope))
            message = f"unexpected error {reference}; the log of the server has more"
            raise HttpError(500, "internal_error", message) from error

    async def _run(self, scope: Scope, receive: Receive, response: _Response) -> None:
        """Let the request in, with its caller in the scope as `user`. Raise HttpError if it is not acceptable."""
        if scope["type"] == "http" and scope["path"] in self._public:
            _refuse_other_pages(scope, opens_page=True)
            return await self._app(scope, receive, response.send)
        if self._calls >= self._max_calls:
            raise _too_many(f"{self._max_calls} calls are in flight; try again later")
        self._calls += 1
        try:
            await self._run_counted(scope, receive, response)
        finally:
            self._calls -= 1

    async def _run_counted(self, scope: Scope, receive: Receive, response: _Response) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        caller = await self._find_caller(headers)
        if caller.token_id is None:
            _refuse_web_pages(scope, headers)
        scope["user"] = caller
        scope["check"] = check = partial(self._find_caller, headers, still=caller)
        with self._counted(caller.token_id):
            if scope["type"] == "websocket":
                connection = _CheckedConnection(receive, response.send, check)
                return await self._app(scope, connection.receive, connection.send)
            body = _Body(receive, self._body_limit, self._body_sec)
            body.check_length(headers.get(b"content-length"))
            return await self._app(scope, body.receive, response.send)

    @contextmanager
    def _counted(self, token_id: str | None) -> Iterator[None]:
        """Count a call of a token. Raise HttpError if too many are in flight."""
        if token_id is None:
            yield
            return
        if self._calls_of[token_id] >= self._max_calls_of_token:
            raise _too_many(
                f"{self._max_calls_of_token} calls with token {token_id} are in flight; try again later, or use "
                "another token"
            )
        self._calls_of[token_id] += 1
        try:
            yield
        finally:
            self._calls_of[token_id] -= 1
            if not self._calls_of[token_id]:
                del self._calls_of[token_id]

    async def _find_caller(self, headers: dict[bytes, bytes], still: Caller | None = None) -> Caller:
        """Return the caller. Raise HttpError if there is none, or if it is not `still` the same one."""
        given = headers.get(b"authorization")
        try:
            async with asyncio.timeout(CALLER_SEC):
                caller = await self._authenticator.find_caller(
                    None if given is None else given.decode("latin-1")
                )
        except (StoreUnavailable, TimeoutError) as error:
            _logger.warning("tokens cannot be checked (%s)", type(error).__name__)
            raise HttpError(
                503, StoreUnavailable.code, "MongoDB is unavailable; try the call again"
            ) from None
        if still is not None and caller != still:
            raise Unauthorized("the token has changed; connect again")
        return caller


def _too_many(text: str) -> HttpError:
    return HttpError(503, "too_many_calls", text, ((b"connection", b"close"),))


def _refuse_web_pages(scope: Scope, headers: dict[bytes, bytes]) -> None:
    """Raise HttpError for a call that a web page in a browser of this machine may have caused.

    A server that needs no token would otherwise obey every page: one that sends a form, one that opens a WebSocket,
    and one whose host name resolves to this machine (DNS rebinding).
    """
    _refuse_repeated(scope)
    _refuse_other_pages(scope)
    host = headers.get(b"host", b"").decode("latin-1")
    if not names_loopback(host):
        raise HttpError(
            403,
            "host_not_allowed",
            f"the header Host is {printed(host)}; without tokens, the server only responds to localhost and loopback "
            "addresses",
        )
    origin = headers.get(b"origin")
    if origin is not None and origin.decode("latin-1").lower() not in _own_origins(host):
        raise HttpError(
            403,
            "origin_not_allowed",
            f"the header Origin is {printed(origin.decode('latin-1'))}; without tokens, the server rejects calls of "
            "other web pages",
        )
    if scope.get("method") == "POST" and _media_type(headers) != b"application/json":
        raise HttpError(415, "unsupported_media_type", "send the header 'Content-Type: application/json'")


def _refuse_other_pages(scope: Scope, *, opens_page: bool = False) -> None:
    """Raise HttpError for a request of a page of another server. With `opens_page`, a link may lead to this one."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    if comes_from_another_page(headers) and not (opens_page and opens_a_page(scope["method"], headers)):
        raise HttpError(
            403,
            "site_not_allowed",
            f"the header Sec-Fetch-Site is {printed(headers[SITE])}; the server rejects requests of other web pages",
        )


def _refuse_repeated(scope: Scope) -> None:
    """Raise HttpError for a header that occurs twice, of which the check and a proxy might read different ones."""
    names = Counter(name for name, _ in scope["headers"])
    if repeated := [name.decode() for name in _CHECKED if names[name] > 1]:
        raise HttpError(400, "repeated_header", f"the header {repeated[0]} occurs twice; send it once")


def _own_origins(host: str) -> tuple[str, str]:
    return f"http://{host}".lower(), f"https://{host}".lower()


def _media_type(headers: dict[bytes, bytes]) -> bytes:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower()


class _Body:
    """Receives the body of a request. Raises HttpError if it is too large or arrives too slowly."""

    def __init__(self, receive: Receive, limit: int, seconds: float) -> None:
        self._receive = receive
        self._limit = limit
        self._seconds = seconds
        self._left = limit
        self._complete = False
        self._deadline: float | None = None

    def check_length(self, declared: bytes | None) -> None:
        """Refuse a body whose `Content-Length` is too large, before it is read."""
        if declared is not None and int(declared) > self._limit:
            raise self._too_large()

    async def receive(self) -> Message:
        """Return the next message. The time limit ends with the body: afterwards, the client only disconnects."""
        if self._complete:
            return await self._receive()
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            slow = f"the body did not arrive within {self._seconds:g} s; send it again"
            raise HttpError(408, "body_too_slow", slow, ((b"connection", b"close"),)) from None
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise self._too_large()
        self._complete = not message.get("more_body", False)
        return message

    def _too_large(self) -> HttpError:
        return HttpError(
            413, "body_too_large", f"the body is larger than {self._limit:,} bytes; send less at once"
        )


class _CheckedConnection:
    """A WebSocket connection that ends when its token does: each message in either direction checks the token.

    The cache of the authenticator makes the checks cheap.
    """

    def __init__(self, receive: Receive, send: Send, check: Callable[[], Any]) -> None:
        self._receive = receive
        self._send = send
        self._check = check
        self._refused = False

    async def receive(self) -> Message:
        """Return the next message, or a disconnect if the token is no longer valid."""
        message = await self._receive()
        if message["type"] == "websocket.receive" and not await self._is_valid():
            return {"type": "websocket.disconnect", "code": _POLICY_VIOLATION}
        return message

    async def send(self, message: Message) -> None:
        """Send a message. Raise OSError, as for a connection that was lost, if the token is no longer valid."""
        if message["type"] == "websocket.send" and not await self._is_valid():
            raise OSError("the token of the connection is no longer valid")
        await self._send(message)

    async def _is_valid(self) -> bool:
        if self._refused:
            return False
        try:
            await self._check()
        except HttpError as error:
            self._refused = True
            code = _POLICY_VIOLATION if isinstance(error, Unauthorized) else _TRY_AGAIN_LATER
            await self._send({"type": "websocket.close", "code": code, "reason": error.code})
        return not self._refused


class _Response:
    """Sends the response of a request, and remembers its status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        """0 until the response has begun; 101 for an accepted WebSocket connection."""

    async def send(self, message: Message) -> None:
        """Send a message of the application."""
        if not self.status:
            self.status = _status_of(message)
        await self._send(message)

    async def refuse(self, scope: Scope, error: HttpError) -> None:
        """Send an error as JSON. If the response has begun already, only end the connection."""
        if self.status:
            if scope["type"] == "websocket":
                with suppress(RuntimeError, OSError):  # the connection is closed already
                    await self._send({"type": "websocket.close", "code": _INTERNAL_ERROR})
            return
        prefix = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
        body = error.body
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *error.headers,
        ]
        await self.send({"type": f"{prefix}.start", "status": error.status, "headers": headers})
        await self.send({"type": f"{prefix}.body", "body": body})


def _status_of(message: Message) -> int:
    if message["type"] == "websocket.accept":
        return 101
    return int(message.get("status", 403 if message["type"] == "websocket.close" else 0))


def _log_request(scope: Scope, status: int, seconds: float) -> None:
    level = logging.DEBUG if scope["path"] == HEALTH_PATH else logging.INFO
    if _logger.isEnabledFor(level):
        method = scope.get("method", "WEBSOCKET")
        actor = scope.get("user", "-")
        _logger.log(
            level, "%s %s %d %.1f ms, actor %s", method, _shown_path(scope), status, seconds * 1_000, actor
        )


def _shown_path(scope: Scope) -> str:
    return printable(truncate(scope["path"], _MAX_PATH_CHARS))
