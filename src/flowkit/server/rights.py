"""What a route or a method needs of its caller, and the one place that checks it.

A route that does not declare what it needs is not served: `create_app` accepts only `HttpRoute` and `SocketRoute`, and
`Method` and `Operation` cannot be created without it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from starlette.routing import BaseRoute, Route, WebSocketRoute

from flowkit.server.errors import HttpError
from flowkit.server.tokens import Right

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send
    from starlette.websockets import WebSocket

    from flowkit.server.auth import Caller


class OpenAccess(StrEnum):
    """What a call needs that needs no right."""

    NOTHING = "nothing"
    """Not even a token."""
    TOKEN = "a token"
    """A valid token, whatever its rights."""


Need = Right | OpenAccess
"""What a call needs. An operator has every right."""


def refusal(caller: Caller, needs: Need) -> str | None:
    """Return why a caller may not make a call, and how to change that; None if it may."""
    if isinstance(needs, OpenAccess) or caller.is_operator or needs in caller.rights:
        return None
    if needs is Right.OPERATOR:
        return "only an operator may do this; use a token with the right operator"
    return (
        f"the token lacks the right {needs}; create one with `flowkit token create --actor N --right {needs}`"
    )


class Declared(BaseRoute):
    """A route that declares what its calls need, and lets no other call through."""

    path: str
    needs: Need

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a call, with its caller as `user` in the scope. Raise HttpError if the caller lacks the right."""
        if self.needs is not OpenAccess.NOTHING and (problem := refusal(scope["user"], self.needs)):
            raise HttpError(403, "permission_denied", problem)
        await super().handle(scope, receive, send)


class HttpRoute(Declared, Route):
    """A path for HTTP requests with these methods."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        *,
        needs: Need,
        methods: Sequence[str] = ("GET",),
    ) -> None:
        super().__init__(path, endpoint, methods=[*methods])
        self.needs = needs


class SocketRoute(Declared, WebSocketRoute):
    """A path for WebSocket connections."""

    def __init__(self, path: str, endpoint: Callable[[WebSocket], Awaitable[None]], *, needs: Need) -> None:
        super().__init__(path, endpoint)
        self.needs = needs


def public_paths(routes: Sequence[BaseRoute]) -> frozenset[str]:
    """Return the paths of the routes that need no token. Raise TypeError if a route does not declare what it needs."""
    paths = set()
    for route in routes:
        if not isinstance(route, Declared):
            raise TypeError(
                f"{route!r} does not declare what its callers need; use HttpRoute or SocketRoute with `needs`"
            )
        if route.needs is OpenAccess.NOTHING:
            paths.add(route.path)
    return frozenset(paths)
