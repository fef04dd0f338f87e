"""A local Temporal development server with its Web UI."""

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from flowkit.local import sources
from flowkit.local.container import DATA_FOLDER
from flowkit.local.ports import HOST, free_port, is_listening
from flowkit.local.server import LocalServer, container_program
from flowkit.local.sources import Finder, Program, Source
from flowkit.local.temporal_cli import (
    BUILT,
    RELEASE,
    cached_temporal,
    cached_version,
    install_temporal,
    temporal_on_path,
)
from flowkit.temporal_names import SEARCH_ATTRIBUTES

IMAGE = f"docker.io/temporalio/temporal:{RELEASE.removeprefix('v')}"
CONTAINER_PORTS = (7233, 8233, 7243)
"""Ports inside a container: server, Web UI, HTTP API."""
NAMESPACE = "default"
# With a write-ahead log, the file is as fast as memory.
SQLITE_PRAGMAS = {"journal_mode": "WAL", "synchronous": "NORMAL"}
# The server's defaults suit a cluster with many shards. On a single shard they delay each task by 45 ms,
# sometimes by 2 s, and round timers up to a second.
DYNAMIC_CONFIG: Mapping[str, object] = {
    "history.transferProcessorMaxPollRPS": 5000,
    "history.timerProcessorMaxPollRPS": 5000,
    "history.visibilityProcessorMaxPollRPS": 5000,
    "history.timerProcessorMaxTimeShift": "10ms",
    "history.maximumBufferedEventsBatch": 10_000,
    "matching.numTaskqueueReadPartitions": 1,
    "matching.numTaskqueueWritePartitions": 1,
}


class TemporalServer(LocalServer):
    """A Temporal development server with namespace `default`. Its state survives `stop`, `kill`, `restart`.

    The program comes from PATH, a container, the cache or a download; `FLOWKIT_SERVERS` limits and
    orders these sources. The server uses free ports unless they are given. `dynamic_config` adds or
    replaces settings of the server, for example `{"limit.historyCount.suggestContinueAsNew": 50}`; they
    take effect at the next start.
    """

    name = "temporal"

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        ui_port: int | None = None,
        http_port: int | None = None,
        dynamic_config: Mapping[str, object] | None = None,
    ) -> None:
        self.port = port or free_port()
        self.ui_port = ui_port or free_port()
        self.dynamic_config = {**DYNAMIC_CONFIG, **(dynamic_config or {})}
        self._http_port = http_port or free_port()
        super().__init__(folder, self.port, self.ui_port, self._http_port)

    @property
    def address(self) -> str:
        """The address for clients, as `host:port`."""
        return f"{HOST}:{self.port}"

    @property
    def ui_url(self) -> str:
        """The URL of the Web UI."""
        return f"http://{HOST}:{self.ui_port}"

    def find_program(self) -> Program:
        """Return the program from the first source that has one. Raises InstallFailed or ConfigError."""
        return temporal_program(sources.allowed_sources())

    @classmethod
    def install(cls) -> None:
        """Download or build the Temporal CLI, which includes the server, or pull its image."""
        temporal_program(sources.allowed_sources()).install()

    def command(self) -> list[str]:
        """Return the command for the development server, with settings for low latency."""
        program, container = self.program.install(), self.program.container
        ports = (self.port, self.ui_port, self._http_port)
        if container is None:
            return [program, *self._arguments(HOST, ports, self.folder)]
        published = dict(zip(ports, CONTAINER_PORTS, strict=True))
        arguments = self._arguments("0.0.0.0", CONTAINER_PORTS, Path(DATA_FOLDER))
        return self.container_command(container, "temporal", published, self.folder, arguments)

    def _arguments(self, host: str, ports: tuple[int, int, int], folder: Path) -> list[str]:
        port, ui_port, http_port = map(str, ports)
        settings = {key: json.dumps(value) for key, value in self.dynamic_config.items()}
        return [
            *("server", "start-dev", "--log-level", "warn"),
            *("--namespace", NAMESPACE, "--db-filename", str(folder / "temporal.db")),
            *("--ip", host, "--port", port, "--ui-port", ui_port, "--http-port", http_port),
            *_repeated("sqlite-pragma", SQLITE_PRAGMAS),
            *_repeated("search-attribute", dict.fromkeys(SEARCH_ATTRIBUTES, "Keyword")),
            *_repeated("dynamic-config-value", settings),
        ]

    def is_ready(self) -> bool:
        """Whether the server knows its namespace and the Web UI accepts connections."""
        return is_listening(self.ui_port) and _responds(self._http_port, f"/api/v1/namespaces/{NAMESPACE}")


def temporal_program(allowed: Sequence[Source]) -> Program:
    """Return the Temporal server from the first allowed source that has it. Raises InstallFailed."""
    finders: dict[Source, Finder] = {
        Source.PATH: _on_path,
        Source.CONTAINER: partial(container_program, IMAGE),
        Source.CACHE: _in_cache,
        Source.DOWNLOAD: _to_download,
    }
    return sources.select_program("Temporal server", finders, allowed)


def _on_path() -> Program | None:
    found = temporal_on_path()
    return Program(source=Source.PATH, description=found, install=lambda: found) if found else None


def _in_cache() -> Program | None:
    found = cached_temporal()
    if found is None:
        return None
    description = f"Temporal CLI {cached_version(found)}"
    return Program(source=Source.CACHE, description=description, install=lambda: found)


def _to_download() -> Program:
    description = f"Temporal CLI {RELEASE} from github.com, or else {BUILT} built with Go"
    return Program(source=Source.DOWNLOAD, description=description, install=install_temporal)


def _responds(port: int, path: str) -> bool:
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
