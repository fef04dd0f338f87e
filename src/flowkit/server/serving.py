"""Serves an ASGI application with uvicorn, on one or several addresses, in the running event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn

from flowkit.attempt.background import Health, error_summary
from flowkit.errors import ConfigError
from flowkit.server.addresses import Address
from flowkit.server.app import BODY_LIMIT, create_app
from flowkit.server.auth import Authenticator
from flowkit.server.protocols import ClientLimits, HttpProtocol, ServerConfig
from flowkit.server.token_store import TokenStore

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp

_logger = logging.getLogger("flowkit.server")

STOP_SEC = 10
"""How long `stop` waits for calls in flight before it cancels them."""

_KEEP_ALIVE_SEC = 30
_PING_SEC = 20.0
_MAX_HEADER_BYTES = 32_768
_BACKLOG = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """The PEM files with the certificate chain of the server and its private key."""

    cert_file: str
    key_file: str


async def serve(
    routes: Sequence[BaseRoute],
    addresses: Sequence[tuple[str, int]],
    *,
    db: Any,
    health: Callable[[], bool],
    certificate: str | None = None,
    key: str | None = None,
) -> HttpServer:
    """Serve routes to callers with tokens at these hosts and ports, and return the running server.

    `certificate` and `key` are PEM files; without a key, the certificate's file has it. Raise ConfigError if other
    machines can reach an address although there is no valid token, or if the server cannot listen on one.
    """
    bound = [Address(host=host, port=port) for host, port in addresses]
    tokens = TokenStore(db)
    await tokens.prepare()
    authenticator = await Authenticator.for_addresses(tokens, bound)
    if not await tokens.exists():
        _logger.warning("there are no tokens, so every call of this machine is that of an operator")
    tls = None if certificate is None else Tls(cert_file=certificate, key_file=key or certificate)
    server = HttpServer(create_app(routes, authenticator=authenticator, health=health), bound, tls=tls)
    await server.start()
    return server


class HttpServer:
    """Serves an application from `start` to `stop`, like the other processes that `flowkit` runs."""

    def __init__(
        self,
        app: ASGIApp,
        addresses: Sequence[Address],
        *,
        tls: Tls | None = None,
        body_limit: int = BODY_LIMIT,
        limits: ClientLimits | None = None,
        stop_sec: int = STOP_SEC,
    ) -> None:
        self._addresses = addresses
        self._tls = tls
        self._config = ServerConfig(
            app,
            limits or ClientLimits(),
            interface="asgi3",
            lifespan="off",
            log_config=None,
            log_level="error",  # below, uvicorn logs what strangers send: query strings, headers and messages
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SEC,
            timeout_graceful_shutdown=stop_sec,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            ws_max_size=body_limit,
            ws_ping_interval=_PING_SEC,
            ws_ping_timeout=_PING_SEC,
            ws_per_message_deflate=False,  # a small message would become a large one in memory
            ssl_certfile=tls.cert_file if tls else None,
            ssl_keyfile=tls.key_file if tls else None,
        )
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._bound: list[Address] = []

    @property
    def bound(self) -> list[Address]:
        """The addresses on which the server listens, with the ports that the system chose for port 0."""
        return list(self._bound)

    async def start(self) -> None:
        """Listen on all addresses, or on none. Raise ConfigError if that is not possible."""
        self._load()
        sockets = await _bind(self._addresses)
        self._bound = [
            Address(host=address.host, port=bound.getsockname()[1])
            for address, bound in zip(self._addresses, sockets, strict=True)
        ]
        self._server = _Server(self._config)
        self._serving = asyncio.create_task(self._server.serve(sockets))
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({ready, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._serving.done():
            self._serving.result()

    def _load(self) -> None:
        try:
            self._config.load()
        except (OSError, ssl.SSLError) as error:
            files = f"{self._tls.cert_file} and {self._tls.key_file}" if self._tls else "the settings"
            raise ConfigError(
                f"TLS cannot use {files}: {error.strerror or error}; name the PEM files of a certificate and its key"
            ) from error

    async def stop(self) -> None:
        """Accept no further calls, finish those in flight, and cancel those that take too long."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait({self._serving})

    async def wait_stopped(self) -> None:
        """Wait until the server stops; raise its error if it failed."""
        if self._serving is not None:
            await asyncio.wait({self._serving})
            self._serving.result()

    def health(self) -> Health:
        """Return whether the server accepts calls."""
        task = self._serving
        failed = task.exception() if task is not None and task.done() and not task.cancelled() else None
        return Health(
            running=task is not None and not task.done(),
            error=error_summary(failed) if failed else None,
        )


class _Server(uvicorn.Server):
    """Uvicorn's server, which leaves signals to the process, and reports that it listens."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        self._config = config
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen as uvicorn does, but with a time limit for TLS handshakes."""
        loop = asyncio.get_running_loop()
        tls = self.config.ssl
        timeout = self._config.limits.header_sec if tls else None
        self.servers = [
            await loop.create_server(
                self._new_protocol, sock=each, ssl=tls, ssl_handshake_timeout=timeout, backlog=_BACKLOG
            )
            for each in sockets or ()
        ]
        self.started = True
        self.ready.set()

    def _new_protocol(self) -> HttpProtocol:
        return HttpProtocol(self._config, self.server_state, {})

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _bind(addresses: Sequence[Address]) -> list[socket.socket]:
    """Return a listening socket for each address. Raise ConfigError, and close them all, if one is not usable."""
    sockets: list[socket.socket] = []
    for address in addresses:
        try:
            sockets.append(await _bind_one(address))
        except OSError as error:
            for each in sockets:
                each.close()
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            raise ConfigError(
                f"the server cannot listen on {address}: {reason}; choose a free port, and an address of this machine"
            ) from None
    return sockets


async def _bind_one(address: Address) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, _, _, _, target = found[0]
    return socket.create_server(target[:2], family=family, backlog=_BACKLOG)
