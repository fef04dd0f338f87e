"""Uvicorn's protocols with the limits of clients that it has no settings for.

A connection *waits* while it has no call in flight: before its first call, between two of them, and while its client
still sends a body that the response did not need. Connections that wait keep no other client out: if there are too many
connections, the one that has waited longest is closed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

if TYPE_CHECKING:
    import h11
    from uvicorn.server import ServerState

_INVALID_UTF8 = 1007


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientLimits:
    """What clients may occupy, and for how long."""

    connections: int = 600
    """Connections at the same time. Beyond it, those that wait are closed."""
    header_sec: float = 10.0
    """Seconds from the first byte of a call to the end of its headers. A new connection must send it within
    this time."""
    read_sec: float = 60.0
    """Seconds in which a client must read a response, or a message over WebSocket."""


class ServerConfig(uvicorn.Config):
    """Uvicorn's configuration with `limits`, for the protocols of this module."""

    def __init__(self, app: Any, limits: ClientLimits, **settings: Any) -> None:
        super().__init__(app, http=HttpProtocol, ws=WebSocketProtocol, **settings)
        self.limits = limits
        self.waiting: dict[HttpProtocol, None] = {}
        """The connections that wait, first the one that has waited longest."""


class _Deadline:
    """Aborts a connection after some seconds, unless it is stopped before."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def start(self, transport: asyncio.Transport) -> None:
        """Let the time run, unless it does already."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._seconds, transport.abort)

    def stop(self) -> None:
        """Stop the time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _ReadInTime(asyncio.Protocol):
    """A connection that is aborted if its client does not read in time what it is sent."""

    transport: asyncio.Transport
    _reading: _Deadline

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pause for whatever cannot be sent at once, until all is sent."""
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(high=1, low=0)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the deadline."""
        self._reading.stop()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Wait until the client has read everything."""
        super().pause_writing()
        self._reading.start(self.transport)

    def resume_writing(self) -> None:
        """Continue, because the client has read everything."""
        super().resume_writing()
        self._reading.stop()


class HttpProtocol(_ReadInTime, H11Protocol):
    """HTTP with deadlines for headers, for the rest of a body, and for reading a response."""

    def __init__(
        self, config: ServerConfig, server_state: ServerState, app_state: dict[str, Any], **options: Any
    ) -> None:
        super().__init__(config, server_state, app_state, **options)
        self._max_connections = config.limits.connections
        self._waiting = config.waiting
        self._sending = _Deadline(config.limits.header_sec)
        self._reading = _Deadline(config.limits.read_sec)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first call, and close another connection if there are too many."""
        super().connection_made(transport)
        self._waiting[self] = None
        self._sending.start(self.transport)
        if len(self.connections) > self._max_connections:
            self._close_another()

    def _close_another(self) -> None:
        oldest = next(iter(self._waiting))
        if oldest is not self:
            del self._waiting[oldest]
            self.connections.discard(oldest)  # uvicorn does it later, so that several would count as one
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the deadlines."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read a part of a call. The time for its headers runs from the first part to the last."""
        super().data_received(data)
        if self._is_busy():
            self._stop_waiting()
        else:
            self._sending.start(self.transport)

    def on_response_complete(self) -> None:
        """Wait for the next call. Until its first byte, uvicorn's time for idle connections runs."""
        self._waiting[self] = None
        super().on_response_complete()
        if self._is_busy():
            self._stop_waiting()

    def _is_busy(self) -> bool:
        """Return whether a call is in flight, or the connection has become one of WebSocket."""
        in_flight = self.cycle is not None and not self.cycle.response_complete
        return in_flight or self.transport.get_protocol() is not self

    def _stop_waiting(self) -> None:
        self._waiting.pop(self, None)
        self._sending.stop()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Leave the connection to the WebSocket protocol."""
        self._reading.stop()
        super().handle_websocket_upgrade(event)


class WebSocketProtocol(_ReadInTime, WebSocketsSansIOProtocol):
    """WebSocket with a deadline for reading messages. What a client does wrong writes no line to uvicorn's log."""

    def __init__(
        self, config: ServerConfig, server_state: ServerState, app_state: dict[str, Any], **options: Any
    ) -> None:
        super().__init__(config, server_state, app_state, **options)
        self._reading = _Deadline(config.limits.read_sec)
        self._pong = b""

    def resume_writing(self) -> None:
        """Continue, because the client has read everything. Send the pong that has waited for that."""
        super().resume_writing()
        pong, self._pong = self._pong, b""
        if pong and not self.transport.is_closing():
            self.transport.write(pong)

    def handle_ping(self) -> None:
        """Send a pong. For a client that reads slowly, only the last pong is kept, so that they use no memory."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self._pong = b"".join(self.conn.data_to_send())

    def send_receive_event_to_app(self) -> None:
        """Pass on a message. Close the connection if it is no UTF-8, for which uvicorn would log a traceback."""
        if self.curr_msg_data_type == "text" and not _is_utf8(b"".join(self.frames)):
            self.conn.send_close(_INVALID_UTF8)
            self.handle_parser_exception()
        else:
            super().send_receive_event_to_app()

    async def send(self, message: Any) -> None:
        """Send a message of the application. A refusal completes the handshake; uvicorn would log an error."""
        await super().send(message)
        if self.close_sent:
            self.handshake_complete = True


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
