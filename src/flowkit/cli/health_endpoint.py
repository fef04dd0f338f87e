"""The HTTP endpoint with the health of a process, for orchestrators and monitoring."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from flowkit.cli.errors import remedied
from flowkit.cli.health_file import health_json
from flowkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flowkit.cli.health_file import Reported

_OK, _UNAVAILABLE = 200, 503


@contextmanager
def health_endpoint(host: str, port: int | None, health: Callable[[], Reported]) -> Iterator[None]:
    """Serve the health at `http://host:port/`, any path. Do nothing if `port` is None.

    The status is 200 if the process is healthy and 503 if not; the body is JSON. Separate threads serve it, so a handler
    that blocks the event loop does not make the process look unhealthy. Raise ConfigError if the port is not usable.
    """
    if port is None:
        yield
        return
    server = _server(host, port, health)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _server(host: str, port: int, health: Callable[[], Reported]) -> ThreadingHTTPServer:
    try:
        return _HealthServer((host, port), _handler(health))
    except OSError as error:
        problem = ConfigError(f"--health-port {port} is not usable on {host}: {error.strerror or error}")
        raise remedied(problem, "choose a free port, and an address of this machine") from None


class _HealthServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


def _handler(health: Callable[[], Reported]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Returns the health for GET and HEAD."""

        timeout = 10

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
