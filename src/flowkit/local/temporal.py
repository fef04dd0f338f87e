"""A Temporal development server with its Web UI."""

import http.client
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from flowkit.local.ports import HOST, free_port, is_listening
from flowkit.local.process import ServerProcess
from flowkit.local.temporal_cli import temporal_cli

NAMESPACE = "default"
SEARCH_ATTRIBUTES = {"FlowkitPipeline": "Keyword", "FlowkitStatus": "Keyword"}
# A write-ahead log makes the file as fast as memory.
SQLITE_PRAGMAS = {"journal_mode": "WAL", "synchronous": "NORMAL"}
# The server's defaults suit a cluster with many shards. On one shard they hold every task back for 45 ms, now and
# then for 2 s, and round timers up to a second.
DYNAMIC_CONFIG: Mapping[str, object] = {
    "history.transferProcessorMaxPollRPS": 5000,
    "history.timerProcessorMaxPollRPS": 5000,
    "history.visibilityProcessorMaxPollRPS": 5000,
    "history.timerProcessorMaxTimeShift": "10ms",
    "history.maximumBufferedEventsBatch": 10_000,
    "matching.numTaskqueueReadPartitions": 1,
    "matching.numTaskqueueWritePartitions": 1,
}


class TemporalServer(ServerProcess):
    """A Temporal development server, namespace `default`; its state survives stop, kill and restart.

    Ports that are not given are free ones. `dynamic_config` adds to, or replaces, the server's settings, for example
    `{"limit.historyCount.suggestContinueAsNew": 50}`; a changed setting takes effect with the next start.
    """

    name = "temporal"

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        ui_port: int | None = None,
        dynamic_config: Mapping[str, object] | None = None,
    ) -> None:
        self.port = port or free_port()
        self.ui_port = ui_port or free_port()
        self.dynamic_config = {**DYNAMIC_CONFIG, **(dynamic_config or {})}
        self._http_port = free_port()
        super().__init__(folder, self.port, self.ui_port, self._http_port)

    @property
    def address(self) -> str:
        """What a client connects to, as `host:port`."""
        return f"{HOST}:{self.port}"

    @property
    def ui_url(self) -> str:
        """Where a browser finds the Web UI."""
        return f"http://{HOST}:{self.ui_port}"

    @classmethod
    def install(cls) -> None:
        """Fetch or build the Temporal CLI, which is the server too."""
        temporal_cli()

    def command(self) -> list[str]:
        """The development server, as quick as its settings allow."""
        settings = {key: json.dumps(value) for key, value in self.dynamic_config.items()}
        return [
            *(temporal_cli(), "server", "start-dev", "--log-level", "warn"),
            *("--namespace", NAMESPACE, "--db-filename", str(self.folder / "temporal.db")),
            *("--ip", HOST, "--port", str(self.port)),
            *("--ui-port", str(self.ui_port), "--http-port", str(self._http_port)),
            *_repeated("sqlite-pragma", SQLITE_PRAGMAS),
            *_repeated("search-attribute", SEARCH_ATTRIBUTES),
            *_repeated("dynamic-config-value", settings),
        ]

    def is_ready(self) -> bool:
        """Whether the server answers for its namespace, and the Web UI listens."""
        return is_listening(self.ui_port) and _answers(self._http_port, f"/api/v1/namespaces/{NAMESPACE}")


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _repeated(option: str, values: Mapping[str, str]) -> Iterator[str]:
    for key, value in values.items():
        yield f"--{option}"
        yield f"{key}={value}"
