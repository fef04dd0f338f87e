"""Fixtures for local servers and their installation."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from tests.local.release_server import Releases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _no_external_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TEMPORAL_ADDRESS", "MONGO_URL", "KAFKA_BOOTSTRAP_SERVERS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def python() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts another Python process with an open stdin, and kills it after the test."""
    started: list[subprocess.Popen[str]] = []
    pipe = subprocess.PIPE

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, *arguments], stdin=pipe, stdout=pipe, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the whole PATH; the cache is empty too."""
    for name in ("FLOWKIT_TEMPORAL_BIN", "FLOWKIT_SERVERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLOWKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


REFUSING_PROXY = "http://127.0.0.1:1"
"""A proxy that refuses all connections."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("FLOWKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network for Python, Go and Maven, and empty module caches."""
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, REFUSING_PROXY)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOMODCACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("GOPROXY", "https://proxy.golang.org")
    maven = f"-Dmaven.repo.local={tmp_path / 'repository'}"
    monkeypatch.setenv("MAVEN_OPTS", f"{maven} -Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=1")


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a release archive on a local server, reached without a proxy."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Releases) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/temporal.tar.gz"
        server.shutdown()
        thread.join()
