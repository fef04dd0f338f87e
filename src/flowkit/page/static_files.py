"""The files of the page, which are public: they contain no data."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from flowkit.server.rights import HttpRoute, OpenAccess

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from starlette.requests import Request
    from starlette.routing import BaseRoute

POLICY: Final = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Scripts come only from this server, and no page contains one. `wasm-unsafe-eval` allows the layout to run."""

_TYPES: Final[Mapping[str, str]] = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
_HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def static_routes() -> list[BaseRoute]:
    """Return a route for the page, and one for each of its files."""
    return [*_routes()]


def _routes() -> Iterator[BaseRoute]:
    folder = files("flowkit.page") / "static"
    for name in ("", "vendor/"):
        for file in sorted((folder / name if name else folder).iterdir(), key=lambda each: each.name):
            ending = file.name.rpartition(".")[2]
            if file.is_file() and ending in _TYPES:
                path = "/" if file.name == "index.html" else f"/static/{name}{file.name}"
                yield _route(path, file.read_bytes(), _TYPES[ending])


def _route(path: str, content: bytes, media_type: str) -> BaseRoute:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": tag}

    async def respond(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return HttpRoute(path, respond, needs=OpenAccess.NOTHING)
