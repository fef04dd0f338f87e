"""All checks of `flowkit doctor` together, and its result."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest
from tests.cli.doctor.conftest import create_script
from tests.cli.up.up_process import free_port_base

from flowkit.cli.doctor.checks import ServerReport
from flowkit.cli.doctor.findings import Finding, bad, note, ok
from flowkit.local.ports import listening_process

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.doctor.conftest import Doctor


pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests wait until a connection to an unreachable address times out."""
    monkeypatch.setattr("flowkit.cli.doctor.servers.TIMEOUT_SEC", 0.5)


def test_without_servers_it_reports_where_flowkit_up_would_get_them(doctor: Doctor, tmp_path: Path) -> None:
    for name in ("temporal", "mongod"):
        create_script(tmp_path / "bin" / name, "")
    base = free_port_base()
    report = doctor(PATH=str(tmp_path / "bin"), FLOWKIT_SERVERS="path", port_base=base)
    assert report.usable
    assert report["temporal"].found == "no Temporal server responds at 127.0.0.1:1"
    assert report["temporal"].remedy == "`flowkit up` starts one"
    assert report["temporal here"].found == f"path: {tmp_path / 'bin' / 'temporal'}"
    assert report["mongo here"].found == f"path: {tmp_path / 'bin' / 'mongod'}"
    assert report["java"].found == "not on PATH; not needed here"
    assert [report[f"port {base + n}"].found for n in range(3)] == [
        "free for Temporal",
        "free for the Web UI",
        "free for MongoDB",
    ]


def test_programs_that_an_installation_needs_are_reported(doctor: Doctor, tmp_path: Path) -> None:
    report = doctor(PATH=str(tmp_path), FLOWKIT_CACHE=str(tmp_path / "cache"), FLOWKIT_SERVERS="")
    assert report["mongo here"].found.endswith("which needs java, javac, mvn")
    assert "flowkit up --install" in report["temporal here"].remedy
    assert {name: report[name].state for name in ("java", "javac", "mvn", "go")} == {
        "java": "bad",
        "javac": "bad",
        "mvn": "bad",
        "go": "ok",
    }
    assert report["cache"].found == f"{tmp_path / 'cache'}, 0 MB"


def test_a_running_container_engine_is_reported(doctor: Doctor, tmp_path: Path) -> None:
    create_script(tmp_path / "bin" / "docker", 'echo "Server: Docker Engine"')
    report = doctor(PATH=str(tmp_path / "bin"), FLOWKIT_SERVERS="")
    assert report.usable
    assert report["containers"].found == "docker is running"
    assert report["mongo here"].found == "container: docker.io/library/mongo:7.0.28 in docker"


@pytest.mark.parametrize("text", ["path", "nowhere"])
def test_unusable_sources_are_reported(doctor: Doctor, tmp_path: Path, text: str) -> None:
    report = doctor(PATH=str(tmp_path), FLOWKIT_SERVERS=text)
    assert not report.usable
    assert report["temporal here"].state == "bad"
    assert "FLOWKIT_SERVERS" in report["temporal here"].found + report["temporal here"].remedy


def test_a_port_in_use_is_reported_with_its_process(doctor: Doctor, tmp_path: Path) -> None:
    create_script(tmp_path / "bin" / "mongod", "")
    base = free_port_base()
    with socket.create_server(("127.0.0.1", base)):
        assert listening_process(base).endswith(f"(process {os.getpid()})")
        report = doctor(port_base=base)
    assert not report.usable
    assert f"needed for Temporal, but in use by {own_process_name()}" in report[f"port {base}"].found
    assert report[f"port {base}"].remedy == "`flowkit up --port-base N` uses N to N+8"
    assert listening_process(base) == "another program"


def own_process_name() -> str:
    """Return name and id of this process, as the system shows them."""
    with open(f"/proc/{os.getpid()}/comm", encoding="utf-8") as name:
        return f"{name.read().strip()} (process {os.getpid()})"


@pytest.mark.parametrize(
    ("connection", "source", "port", "usable"),
    [
        (ok("mongo", "x"), bad("here", "x", "y"), note("port", "x", "y"), True),
        (note("mongo", "x", "y"), ok("here", "x"), ok("port", "x"), True),
        (note("mongo", "x", "y"), note("here", "x", "y"), ok("port", "x"), True),
        (note("mongo", "x", "y"), bad("here", "x", "y"), ok("port", "x"), False),
        (note("mongo", "x", "y"), ok("here", "x"), note("port", "x", "y"), False),
        (bad("mongo", "x", "y"), ok("here", "x"), ok("port", "x"), False),
    ],
)
def test_a_server_is_usable_if_it_responds_or_can_be_started(
    connection: Finding, source: Finding, port: Finding, usable: bool
) -> None:
    assert ServerReport(connection=[connection], source=source, ports=[port]).usable is usable
