"""`flowkit doctor` tells what is there and what to do about the rest, and its exit code whether tasks can be run."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from tests.cli.up.up_process import four_ports
from tests.local.processes import isolated_environment

from flowkit.cli.doctor.checks import ServerReport, run_checks
from flowkit.cli.doctor.findings import Finding, State, bad, note, ok
from flowkit.cli.doctor.machine import GB, _check_space, check_program
from flowkit.cli.doctor.servers import INDEXES
from flowkit.cli.options import DEFAULT_MONGO_URL, Where
from flowkit.local.listeners import listening_process

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Program
    from tests.integration.world import World


pytestmark = pytest.mark.slow
"""Most ask addresses where nothing answers, for as long as `doctor` does."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found, by name."""

    usable: bool
    findings: dict[str, Finding]

    def __getitem__(self, name: str) -> Finding:
        return self.findings[name]


Doctor = Callable[..., Report]


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Asks the doctor, on a machine without servers of others unless told otherwise."""

    def ask(*, port_base: int | None = None, **env: str) -> Report:
        for name in ("TEMPORAL_ADDRESS", "MONGO_URL"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**nowhere(tmp_path), **env}.items():
            monkeypatch.setenv(name, value)
        where = Where(mongo_url=env.get("MONGO_URL", DEFAULT_MONGO_URL))
        findings, usable = asyncio.run(run_checks(where, port_base or four_ports()))
        assert [each.name for each in findings if each.state is not State.OK and not each.remedy] == []
        return Report(usable=usable, findings={finding.name: finding for finding in findings})

    return ask


def nowhere(folder: Path) -> dict[str, str]:
    """An environment whose Temporal is the one of a profile, where nobody listens: not the usual place."""
    profile = folder / "temporal.toml"
    profile.write_text('[profile.default]\naddress = "127.0.0.1:1"\n')
    return {"TEMPORAL_CONFIG_FILE": str(profile)}


def executable(path: Path, script: str) -> Path:
    """A program that is a shell script."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


# --- servers ----------------------------------------------------------------------------------------------------


@pytest.mark.server
async def test_servers_that_answer_are_told_with_what_flowkit_needs_of_them(
    world: World, program: Program
) -> None:
    said = await program.call("doctor", "--json", env=servers_of(world))
    document = json.loads(said.out)
    assert (said.code, document["ok"]) == (0, True)
    report = Report(usable=True, findings={each["name"]: Finding(**each) for each in document["findings"]})
    address = world.environment["TEMPORAL_ADDRESS"]
    assert report["temporal"] == ok("temporal", f"responds at {address}, namespace default")
    assert report["mongo"].state == "ok"
    assert report["engine"].found == f"no engine polls queue {world.queue}"
    assert report["engine"].remedy == f"start one with `flowkit engine --queue {world.queue}`"
    assert "uniq_task_id" in report["indexes"].found
    assert report["mongo here"].found == "not needed: MONGO_URL names a server"
    assert not [name for name in report.findings if name.startswith("port")]


@pytest.mark.server
async def test_a_running_engine_and_worker_leave_nothing_to_be_told(world: World, program: Program) -> None:
    await world.engine()
    await world.worker()
    said = await program.call("doctor", "--json", env=servers_of(world))
    states = {finding["name"]: finding["state"] for finding in json.loads(said.out)["findings"]}
    names = ("temporal", "search attributes", "engine", "mongo", "indexes")
    assert {name: states[name] for name in names} == dict.fromkeys(names, "ok")
    there = {name async for name in index_names(world.db)}
    assert there == {index for indexes in INDEXES.values() for index in indexes}


def servers_of(world: World) -> dict[str, str]:
    """The part of a world's environment that says where it is."""
    names = ("TEMPORAL_ADDRESS", "MONGO_URL", "MONGO_DATABASE", "FLOWKIT_QUEUE")
    return {name: world.environment[name] for name in names}


async def index_names(db: Any) -> Any:
    """Names of all indexes that somebody has made."""
    for collection in await db.list_collection_names():
        for name in await db[collection].index_information():
            if name != "_id_":
                yield name


def test_addresses_where_nothing_answers_are_told_quickly(doctor: Doctor) -> None:
    """One refuses, the other never answers: it belongs to no machine."""
    begun = time.monotonic()
    report = doctor(TEMPORAL_ADDRESS="192.0.2.1:7233", MONGO_URL="mongodb://me:secret@127.0.0.1:1")
    assert time.monotonic() - begun < 15, (
        "it waits for 2.5 seconds; the rest is Python's start on a busy machine"
    )
    assert not report.usable
    assert report["temporal"].found == "no Temporal server answers at 192.0.2.1:7233"
    assert report["temporal"].remedy.startswith("start it, or correct TEMPORAL_ADDRESS")
    assert report["mongo"].found == "no server responds at mongodb://…@127.0.0.1:1"
    assert (report["temporal"].state, report["mongo"].state) == ("bad", "bad")


def test_an_address_that_is_none_is_told_as_that(doctor: Doctor) -> None:
    report = doctor(MONGO_URL="mangodb://here")
    assert not report.usable
    assert "'mangodb://here' is not a MongoDB address" in report["mongo"].found


# --- servers that would be started ------------------------------------------------------------------------------


def test_without_servers_it_tells_where_they_would_come_from(doctor: Doctor, tmp_path: Path) -> None:
    for name in ("temporal", "mongod"):
        executable(tmp_path / "bin" / name, "")
    base = four_ports()
    report = doctor(PATH=str(tmp_path / "bin"), FLOWKIT_SERVERS="path", port_base=base)
    assert report.usable
    assert report["temporal"].found == "no Temporal server answers at 127.0.0.1:1"
    assert report["temporal"].remedy == "`flowkit up` starts one"
    assert report["temporal here"].found == f"path: {tmp_path / 'bin' / 'temporal'}"
    assert report["mongo here"].found == f"path: {tmp_path / 'bin' / 'mongod'}"
    assert report["java"].found == "not on PATH; not needed here"
    assert [report[f"port {base + n}"].found for n in range(3)] == [
        "free for Temporal",
        "free for the Web UI",
        "free for MongoDB",
    ]


def test_what_is_missing_for_them_is_told(doctor: Doctor, tmp_path: Path) -> None:
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


def test_containers_are_told_when_an_engine_runs(doctor: Doctor, tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "docker", 'echo "Server: Docker Engine"')
    report = doctor(PATH=str(tmp_path / "bin"), FLOWKIT_SERVERS="")
    assert report.usable
    assert report["containers"].found == "docker is running"
    assert report["mongo here"].found == "container: docker.io/library/mongo:7.0.28 in docker"


@pytest.mark.parametrize("text", ["path", "nowhere"])
def test_sources_that_cannot_be_used_are_told(doctor: Doctor, tmp_path: Path, text: str) -> None:
    report = doctor(PATH=str(tmp_path), FLOWKIT_SERVERS=text)
    assert not report.usable
    assert report["temporal here"].state == "bad"
    assert "FLOWKIT_SERVERS" in report["temporal here"].found + report["temporal here"].remedy


def test_a_port_that_is_taken_is_told_with_the_process_that_has_it(doctor: Doctor, tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "mongod", "")
    base = four_ports()
    with socket.create_server(("127.0.0.1", base)):
        assert listening_process(base).endswith(f"(process {os.getpid()})")
        report = doctor(port_base=base)
    assert not report.usable
    assert f"needed for Temporal, but in use by {own_process_name()}" in report[f"port {base}"].found
    assert report[f"port {base}"].remedy == "`flowkit up --port-base N` uses N to N+3"
    assert listening_process(base) == "another program"


def own_process_name() -> str:
    """How the system names this process."""
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
def test_a_server_works_if_it_answers_or_can_be_started_and_none_is_named(
    connection: Finding, source: Finding, port: Finding, usable: bool
) -> None:
    assert ServerReport(connection=[connection], source=source, ports=[port]).usable is usable


# --- the machine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "needed", "state"),
    [
        ("17.0.15", ["java"], "ok"),
        ("21", ["java"], "ok"),
        ("11.0.2", ["java"], "bad"),
        ("11.0.2", [], "note"),
    ],
)
def test_a_java_that_is_too_old_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, needed: list[str], state: str
) -> None:
    executable(tmp_path / "bin" / "java", f"echo 'openjdk version \"{version}\" 2025-01-01' >&2")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    finding = check_program("java", needed)
    assert finding.state == state
    assert version in finding.found


@pytest.mark.parametrize(("free", "state"), [(GB, "ok"), (GB // 2, "note"), (GB // 8, "bad")])
def test_little_space_is_told(free: int, state: str) -> None:
    assert _check_space("disk", free).state == state


def test_a_low_limit_of_open_files_is_told_with_the_command_that_lifts_it(tmp_path: Path) -> None:
    script = f'ulimit -n 256; exec "{sys.executable}" -m flowkit doctor'
    env = {
        **isolated_environment(tmp_path),
        **nowhere(tmp_path),
        "PATH": str(tmp_path),
        "FLOWKIT_SERVERS": "path",
    }
    done = subprocess.run(["/bin/sh", "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    line = next(line for line in done.stdout.splitlines() if line.startswith("open files"))
    assert line.rstrip().split(maxsplit=3)[2:] == ["note", "256 per process; ulimit -n 4096"]
    assert done.stderr == "not ready to run tasks; each line that is not ok says how to fix it\n"
