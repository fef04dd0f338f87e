"""The health of an engine, a bridge or a worker: a file for the health check of its container, and an HTTP endpoint,
which also serves its metrics."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from flowkit import products
from flowkit.cli.errors import add_remedy
from flowkit.errors import ConfigError
from flowkit.text import printed
from flowkit.validation.web_pages import SITE, comes_from_another_page, names_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from email.message import Message

    from flowkit.cli.options import HealthOptions
    from flowkit.products import ProcessMetrics


_logger = logging.getLogger("flowkit.loops")

_EVERY_SEC = 5.0
_OK, _FORBIDDEN, _NOT_FOUND, _UNAVAILABLE = 200, 403, 404, 503
METRICS_PATH = "/metrics"


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
    return json.dumps({"at": time.time(), **health_values(health)})


def health_values(health: Reported) -> dict[str, Any]:
    """Return the health as JSON values."""
    return {"ok": health.ok, **asdict(health)}


def measure(reports: HealthOptions, kind: str, queue: str) -> ProcessMetrics | None:
    """Let this process measure what it does, if its metrics can be read. Call this before it connects to Temporal.

    `kind` is that of the process, such as `engine`.
    """
    found = products.metrics() if reports.measures else None
    return None if found is None else found.start(kind, queue, reports.sdk_metrics)


@dataclass(frozen=True, slots=True)
class _Page:
    """One response of the endpoint."""

    status: int
    content_type: str
    body: bytes


def _health_page(health: Reported) -> _Page:
    return _Page(_OK if health.ok else _UNAVAILABLE, "application/json", health_json(health).encode())


def _metrics_page(wanted: bool, render: Callable[[], bytes] | None) -> _Page:
    """Return the metrics, or why there are none."""
    found = products.metrics()
    if wanted and render is not None and found is not None:
        return _Page(_OK, found.content_type, render())
    off = "metrics are switched off: start the process with --metrics, or without FLOWKIT_METRICS"
    missing = "metrics are not installed: run pip install 'flowkit-temporal[observe]'"
    return _Page(_NOT_FOUND, "text/plain; charset=utf-8", f"{missing if wanted else off}\n".encode())


def _refusal_page(headers: Message, names: Sequence[str]) -> _Page | None:
    """Return why a request is not served: it has the name of a web page as its host, or comes from such a page."""
    sent = {name.lower(): value for name, value in headers.items()}
    hosts = headers.get_all("host", [])
    problem = ""
    if len(hosts) != 1 or not names_server(hosts[0], names):
        shown = printed(", ".join(hosts))
        problem = f"the header Host is {shown}; use an IP address, or name the host with --health-name"
    elif comes_from_another_page(sent):
        problem = (
            f"the header Sec-Fetch-Site is {printed(sent[SITE])}; requests of other web pages are rejected"
        )
    return _Page(_FORBIDDEN, "text/plain; charset=utf-8", f"{problem}\n".encode()) if problem else None


@contextmanager
def health_endpoint(
    reports: HealthOptions, health: Callable[[], Reported], metrics: Callable[[], bytes] | None = None
) -> Iterator[None]:
    """Serve the health at `http://host:port/`, any path but `/metrics`. Do nothing without a port.

    The status is 200 if the process is healthy and 503 if not; the body is JSON. `/metrics` has what `metrics`
    returns; 404 if this is None. A request that a web page may have caused gets 403. Separate threads serve it, so a
    handler that blocks the event loop does not make the process look unhealthy. Raise ConfigError if the port is not
    usable.
    """
    if reports.port is None:
        yield
        return

    names = [reports.host, *reports.known_names]

    def respond(path: str, headers: Message) -> _Page:
        if refused := _refusal_page(headers, names):
            return refused
        if path.partition("?")[0] == METRICS_PATH:
            return _metrics_page(reports.metrics, metrics)
        return _health_page(health())

    server = _create_server(reports.host, reports.port, respond)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _create_server(host: str, port: int, respond: Callable[[str, Message], _Page]) -> ThreadingHTTPServer:
    try:
        return _HealthServer((host, port), _create_handler(respond))
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
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
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


def _create_handler(respond: Callable[[str, Message], _Page]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Returns a page for GET and HEAD."""

        def do_GET(self) -> None:
            """Return status and body."""
            self.wfile.write(self._head())

        def do_HEAD(self) -> None:
            """Return the status only."""
            self._head()

        def _head(self) -> bytes:
            page = respond(self.path, self.headers)
            self.send_response(page.status)
            self.send_header("Content-Type", page.content_type)
            self.send_header("Content-Length", str(len(page.body)))
            self.end_headers()
            return page.body

        def log_message(self, *_: object) -> None:
            """Log nothing: probes call every few seconds."""

    return Handler
