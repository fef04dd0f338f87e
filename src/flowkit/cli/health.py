"""The health of an engine, a bridge or a worker: a file for the health check of its container, and an HTTP endpoint."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from flowkit.cli.errors import add_remedy
from flowkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_logger = logging.getLogger("flowkit.loops")

_EVERY_SEC = 5.0
_OK, _UNAVAILABLE = 200, 503


class Reported(Protocol):
    """Health of one process or of several: a dataclass whose fields are written as JSON."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def ok(self) -> bool:
        """Whether everything runs."""


@contextmanager
def health_file(path: str | None, health: Callable[[], Reported]) -> Iterator[None]:
    """Write the file every five seconds, and remove it at the end. Do nothing if `path` is None.

    A separate thread writes the file, so a handler that blocks the event loop does not make the process look unhealthy.
    """
    if path is None:
        yield
        return
    file = Path(path)
    polled_mark(file).unlink(missing_ok=True)  # of a process that was killed
    end = threading.Event()
    writer = threading.Thread(target=_write_until, args=(end, file, health), daemon=True)
    writer.start()
    try:
        yield
    finally:
        end.set()
        writer.join()
        for each in (file, polled_mark(file)):
            each.unlink(missing_ok=True)


def polled_mark(file: Path) -> Path:
    """Return the file by which health checks of one process remember that its roles have been polled."""
    return file.with_name(f"{file.name}.polled")


def _write_until(end: threading.Event, path: Path, health: Callable[[], Reported]) -> None:
    while True:
        try:
            _write(path, health())
        except OSError as error:
            _logger.warning("the health file %s cannot be written: %s", path, error)
        if end.wait(_EVERY_SEC):
            return


def _write(path: Path, health: Reported) -> None:
    """Replace the file atomically, so that readers never see a part of it."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(health_json(health), encoding="utf-8")
    os.replace(beside, path)


def health_json(health: Reported) -> str:
    """Return the health and the current time as JSON."""
    return json.dumps({"at": time.time(), "ok": health.ok, **asdict(health)})


@contextmanager
def health_endpoint(host: str, port: int | None, health: Callable[[], Reported]) -> Iterator[None]:
    """Serve the health at `http://host:port/`, any path. Do nothing if `port` is None.

    The status is 200 if the process is healthy and 503 if not; the body is JSON. Separate threads serve it,
    so a handler that blocks the event loop does not make the process look unhealthy. Raise ConfigError if
    the port is not usable.
    """
    if port is None:
        yield
        return
    server = _create_server(host, port, health)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _create_server(host: str, port: int, health: Callable[[], Reported]) -> ThreadingHTTPServer:
    try:
        return _HealthServer((host, port), _create_handler(health))
    except OSError as error:
        problem = ConfigError(f"--health-port {port} is not usable on {host}: {error.strerror or error}")
        raise add_remedy(problem, "choose a free port, and an address of this machine") from None


class _HealthServer(ThreadingHTTPServer):
    """Serves each probe in a thread.

    Ends the connections that take too long, and the oldest one if there are too many.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128
    timeout_sec = 10.0
    max_connections = 50

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._began: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its own thread."""
        with self._lock:
            if len(self._began) >= self.max_connections:
                self._end(next(iter(self._began)))
            self._began[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection. Its thread calls this."""
        with self._lock:
            self._began.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End the connections that take too long. The serving thread calls this several times a second."""
        latest = time.monotonic() - self.timeout_sec
        with self._lock:
            for request in [request for request, began in self._began.items() if began < latest]:
                self._end(request)

    def _end(self, request: socket.socket) -> None:
        """Let the thread of a connection read its end."""
        del self._began[request]
        with suppress(OSError):  # the client has closed it
            request.shutdown(socket.SHUT_RDWR)


def _create_handler(health: Callable[[], Reported]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Returns the health for GET and HEAD."""

        def do_GET(self) -> None:
            """Return status and body."""
            self.wfile.write(self._head())

        def do_HEAD(self) -> None:
            """Return the status only."""
            self._head()

        def _head(self) -> bytes:
            found = health()
            body = health_json(found).encode()
            self.send_response(_OK if found.ok else _UNAVAILABLE)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            return body

        def log_message(self, *_: object) -> None:
            """Log nothing: probes call every few seconds."""

    return Handler
