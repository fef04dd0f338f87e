"""A local Temporal development server with its Web UI, and the `temporal` program."""

from __future__ import annotations

import http.client
import json
import os
import platform
import shutil
import tarfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flowkit.local import sources
from flowkit.local.container import DATA_FOLDER
from flowkit.local.errors import InstallFailed, NoNetwork, ProgramMissing, WrongHash
from flowkit.local.install import (
    fetch,
    find_installed,
    fingerprint,
    install_once,
    require_program,
    run_command,
)
from flowkit.local.ports import HOST, free_port, is_listening
from flowkit.local.process import LocalServer, container_program
from flowkit.local.sources import Finder, Program, Source
from flowkit.models.temporal_names import SEARCH_ATTRIBUTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

NAME = "temporal-cli"
MODULE = "github.com/temporalio/cli"
RELEASE = "v1.9.1"
"""The release to download. Go cannot build it: its module replaces another one by a folder that Go does not fetch."""
BUILT = "v1.5.1"
"""The version that Go builds."""
# The driver of the built version, v1.34.1, can leave a statement open when a request is cancelled. The server then
# fails every request with "interrupted (9)". The release has the driver below.
SQLITE_DRIVER = "modernc.org/sqlite@v1.51.0"
REMEDY = (
    "put `temporal` on PATH, set FLOWKIT_TEMPORAL_BIN to its path, install Go 1.25 or newer, "
    "or set TEMPORAL_ADDRESS to a running server"
)
RELEASES = f"https://github.com/temporalio/cli/releases/download/{RELEASE}"
# SHA-256 of the archives, as in the release's own list; public projects pin the same values.
ARCHIVES = {
    "linux_amd64": "09a0326a51db84d02735e53542b9ebd8c4758daf47482a9ab0abce15844e60d5",
    "linux_arm64": "6c57c352d52fc3df34412376fd9ba6f74b7e3ace8e426e6cba8600156d36a145",
    "darwin_amd64": "48cdd6c84c56e27ae8e4d9a47052b89289a9c552dee029b49dd312c6fb72873f",
    "darwin_arm64": "41e0425378fcb4fb5766340b97435e20fe47bbff2d7bf644ec2d51f7662b7c56",
}
_MACHINES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


@dataclass(frozen=True, slots=True)
class ReleaseArchive:
    """A release of the Temporal CLI for one platform."""

    url: str
    sha256: str


def temporal_cli() -> str:
    """Return the path of a `temporal` program, and install it if there is none.

    Looks at `FLOWKIT_TEMPORAL_BIN`, PATH and the cache, in this order. Otherwise downloads the program,
    or builds it with Go, which takes minutes. Raises InstallFailed if neither is possible.
    """
    return temporal_on_path() or cached_temporal() or install_temporal()


def temporal_on_path() -> str | None:
    """Return `FLOWKIT_TEMPORAL_BIN` or `temporal` on PATH. InstallFailed if the former is no program."""
    named = os.environ.get("FLOWKIT_TEMPORAL_BIN")
    if named and shutil.which(named) is None:
        raise InstallFailed(
            f"FLOWKIT_TEMPORAL_BIN is {named!r}, which is not an executable program; correct or unset it"
        )
    return named or shutil.which("temporal")


def cached_temporal() -> str | None:
    """Return the path of the program in the cache, the downloaded one if it is there, or None."""
    folder = find_installed(NAME, RELEASE) or find_installed(NAME, _built_version())
    return str(folder / "temporal") if folder else None


def cached_version(program: str) -> str:
    """Return the version of a program in the cache."""
    return Path(program).parent.name.partition("-")[0]


def download_temporal() -> str:
    """Download the release into the cache unless it is there, and return the path of its program."""
    return str(install_once(NAME, RELEASE, _download) / "temporal")


def install_temporal() -> str:
    """Download the release, or else build a version with Go, unless it is cached; return the program's path.

    A file with a wrong hash is an error.
    """
    try:
        return download_temporal()
    except WrongHash:
        raise
    except InstallFailed as not_downloaded:
        try:
            return str(install_once(NAME, _built_version(), _build) / "temporal")
        except (NoNetwork, ProgramMissing) as not_built:
            causes = f"{_without_remedy(not_downloaded)}, and {_without_remedy(not_built)}"
            text = f"cannot install the Temporal CLI: {causes}; {REMEDY}"
            raise type(not_downloaded)(text) from not_built


def release_archive() -> ReleaseArchive | None:
    """Return the release for this platform, or None."""
    kind = f"{platform.system().lower()}_{_MACHINES.get(platform.machine().lower(), 'other')}"
    name = f"temporal_cli_{RELEASE.removeprefix('v')}_{kind}.tar.gz"
    return ReleaseArchive(f"{RELEASES}/{name}", ARCHIVES[kind]) if kind in ARCHIVES else None


def _download(folder: Path) -> None:
    release = release_archive()
    if release is None:
        raise InstallFailed(f"there is no release for {platform.system()} on {platform.machine()}")
    packed = folder / "temporal.tar.gz"
    fetch(release.url, packed, sha256=release.sha256)
    with tarfile.open(packed) as archived, (folder / "temporal").open("wb") as program_file:
        member = archived.extractfile("temporal")
        assert member is not None
        shutil.copyfileobj(member, program_file)
    (folder / "temporal").chmod(0o755)
    packed.unlink()


def _build(folder: Path) -> None:
    """Build the program with a newer SQLite driver than its own, which `go install` cannot do."""
    go = require_program("go", remedy="install it to build the Temporal CLI")
    module = folder / "module"
    module.mkdir()
    environment = {**os.environ, "GOFLAGS": "-mod=mod", "GOWORK": "off"}
    for arguments in _go_commands(folder / "temporal"):
        run_command([go, *arguments], folder=module, env=environment)
    shutil.rmtree(module)


def _go_commands(program: Path) -> Sequence[Sequence[str]]:
    # Go's checksum database pins the modules, unless the user's Go settings disable it.
    return (
        ("mod", "init", "flowkit/temporal-cli"),
        ("get", f"{MODULE}@{BUILT}", SQLITE_DRIVER),
        ("build", "-buildvcs=false", "-trimpath", "-o", str(program), f"{MODULE}/cmd/temporal"),
    )


def _built_version() -> str:
    return f"{BUILT}-{fingerprint(SQLITE_DRIVER)}"


def _without_remedy(error: InstallFailed) -> str:
    """Return the first part of the message, which says what is wrong."""
    return error.headline.partition(";")[0]


IMAGE = f"docker.io/temporalio/temporal:{RELEASE.removeprefix('v')}"
CONTAINER_PORTS = (7233, 8233, 7243)
"""Ports inside a container: server, Web UI, HTTP API."""
NAMESPACE = "default"
# With a write-ahead log, the file is as fast as memory.
SQLITE_PRAGMAS = {"journal_mode": "WAL", "synchronous": "NORMAL"}
# The server's defaults suit a cluster with many shards. On a single shard they delay each task by 45 ms,
# sometimes by 2 s, and round timers up to a second.
ALLOWED_HOSTS = "frontend.httpAllowedHosts"
DYNAMIC_CONFIG: Mapping[str, object] = {
    # The HTTP API checks no token, no Origin and no Content-Type, so any web page could start a task. No browser sends
    # a host of this domain, which exists nowhere; FlowKit and the Web UI use gRPC.
    ALLOWED_HOSTS: ["flowkit.invalid"],
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
        self.http_port = http_port or free_port()
        super().__init__(folder, self.port, self.ui_port, self.http_port)

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
        ports = (self.port, self.ui_port, self.http_port)
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
        hosts = self.dynamic_config[ALLOWED_HOSTS]
        assert isinstance(hosts, list)
        path = f"/api/v1/namespaces/{NAMESPACE}"
        return is_listening(self.ui_port) and _responds(self.http_port, hosts[0], path)


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


def _responds(port: int, host: str, path: str) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=2)
    try:
        connection.request("GET", path, headers={"Host": host})
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _repeated(option: str, values: Mapping[str, str]) -> Iterator[str]:
    for key, value in values.items():
        yield f"--{option}"
        yield f"{key}={value}"
