"""Where servers come from: the order of the sources, containers, and folders that keep to their kind of data."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pymongo
import pytest
from tests.local.processes import descendants, still_running, wait_until

from flowkit.errors import ConfigError
from flowkit.local import MongoServer, Stack, TemporalServer
from flowkit.local.container import ContainerEngine, ContainerImage, container_name, find_engine
from flowkit.local.errors import InstallFailed
from flowkit.local.mongo import compatible_sources, mongo_program
from flowkit.local.ports import is_free
from flowkit.local.sources import Program, Source, allowed_sources, select_program
from flowkit.local.temporal import temporal_program

if TYPE_CHECKING:
    from flowkit.local.process import ServerProcess

ALL = tuple(Source)


def program(path: Path) -> str:
    """A program that does nothing."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of one empty folder, and an empty cache."""
    for name in ("FLOWKIT_TEMPORAL_BIN", "FLOWKIT_SERVERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLOWKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


def found(source: Source) -> Program:
    """A program that comes from there."""
    return Program(source=source, description="there", install=lambda: "it")


# --- the order --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("", ALL),
        ("cache", (Source.CACHE,)),
        (" download, path ,", (Source.DOWNLOAD, Source.PATH)),
        ("container,container", (Source.CONTAINER,)),
    ],
)
def test_the_variable_limits_and_orders_the_sources(
    text: str, order: tuple[Source, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWKIT_SERVERS", text)
    assert allowed_sources() == order


def test_an_unknown_source_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWKIT_SERVERS", "path,brew")
    with pytest.raises(ConfigError, match="'brew'; choose from path, container, cache, download"):
        allowed_sources()


@pytest.mark.parametrize("there", [Source.CONTAINER, Source.DOWNLOAD])
def test_the_first_source_that_has_it_is_taken(there: Source) -> None:
    finders = {source: lambda: None for source in Source} | {there: lambda: found(there)}
    assert select_program("server", finders, ALL).source is there


def test_sources_that_have_nothing_are_named() -> None:
    with pytest.raises(
        InstallFailed, match="no server found in FLOWKIT_SERVERS=path,cache; unset FLOWKIT_SERVERS"
    ):
        select_program("server", dict.fromkeys(Source, lambda: None), [Source.PATH, Source.CACHE])


def test_programs_on_path_come_first_and_what_is_not_there_would_be_fetched(bare: Path) -> None:
    assert temporal_program(ALL).source is Source.DOWNLOAD
    assert mongo_program(ALL).source is Source.DOWNLOAD
    assert mongo_program(ALL).requires == ("java", "javac", "mvn")
    temporal, mongod = program(bare / "temporal"), program(bare / "mongod")
    assert (temporal_program(ALL).source, temporal_program(ALL).install()) == (Source.PATH, temporal)
    assert (mongo_program(ALL).source, mongo_program(ALL).description) == (Source.PATH, mongod)


def test_a_named_temporal_cli_wins(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(bare / "temporal")
    named = program(tmp_path / "mine" / "my-temporal")
    monkeypatch.setenv("FLOWKIT_TEMPORAL_BIN", named)
    assert temporal_program(ALL).install() == named


# --- data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "fitting"),
    [
        ([], ALL),
        (["mongo"], (Source.PATH, Source.CONTAINER)),
        (["mongo.mv"], (Source.CACHE, Source.DOWNLOAD)),
        (["mongo", "mongo.mv"], ALL),
    ],
)
def test_a_folder_keeps_to_its_kind_of_data(
    tmp_path: Path, data: list[str], fitting: tuple[Source, ...]
) -> None:
    for name in data:
        (tmp_path / name).touch()
    assert tuple(compatible_sources(tmp_path, ALL)) == fitting


def test_data_that_no_allowed_source_can_read_are_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "mongo.mv").touch()
    with pytest.raises(
        ConfigError, match="contains data of the stand-in .*FLOWKIT_SERVERS, or choose another folder"
    ):
        compatible_sources(tmp_path, [Source.PATH])


# --- containers -------------------------------------------------------------------------------------------------


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A container engine whose client records its calls in the answered file; it has no image yet."""
    client = tmp_path / "bin" / "docker"
    program(client)
    script = Path(__file__).with_name("fake_docker.py")
    client.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(tmp_path))
    monkeypatch.setenv("FLOWKIT_SERVERS", "container")
    return tmp_path / "calls"


def calls(journal: Path, verb: str) -> list[list[str]]:
    """What the client was asked of one kind."""
    every = [json.loads(line) for line in journal.read_text().splitlines()]
    return [call for call in every if call[0] == verb]


def process_tree(server: ServerProcess) -> set[int]:
    """All processes of a server."""
    assert server._supervisor is not None
    return {server._supervisor.pid, *descendants(server._supervisor.pid)}


@pytest.mark.server
def test_servers_run_in_containers_and_keep_their_data(tmp_path: Path, docker: Path) -> None:
    folder = tmp_path / "data"
    with Stack(folder) as stack:
        assert stack.mongo is not None
        assert stack.temporal is not None
        assert not stack.mongo.stand_in
        with pymongo.MongoClient[dict[str, object]](stack.mongo_url) as client:
            client.flowkit.tasks.insert_one({"_id": "t"})
        family = process_tree(stack.mongo) | process_tree(stack.temporal)
        ports = [stack.mongo.port, stack.temporal.port, stack.temporal.ui_port]
        stack.mongo.restart()
        with pymongo.MongoClient[dict[str, object]](stack.mongo_url) as client:
            assert client.flowkit.tasks.find_one() == {"_id": "t"}
    wait_until(lambda: not still_running(family))
    assert all(is_free(port) for port in ports)
    images = {"docker.io/temporalio/temporal:1.5.1", "docker.io/library/mongo:7.0.28"}
    assert len(calls(docker, "pull")) == 2
    assert {call[1] for call in calls(docker, "pull")} == images
    names = {container_name(name, folder) for name in ("mongo", "temporal")}
    assert {call[2] for call in calls(docker, "rm")} == names


@pytest.mark.server
def test_a_container_is_removed_also_when_it_was_killed(tmp_path: Path, docker: Path) -> None:
    with MongoServer(tmp_path / "data") as server:
        before = len(calls(docker, "rm"))
        server.kill()
        assert len(calls(docker, "rm")) == before + 1


def test_the_command_of_a_container_says_what_it_may(tmp_path: Path, docker: Path) -> None:
    command = TemporalServer(tmp_path, port=1, ui_port=2, http_port=3).command()
    assert command[1:5] == ["run", "--rm", "--name", container_name("temporal", tmp_path)]
    published = [value for option, value in itertools.pairwise(command) if option == "--publish"]
    assert published == ["127.0.0.1:1:7233", "127.0.0.1:2:8233", "127.0.0.1:3:7243"]
    assert command[command.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    assert command[command.index("--volume") + 1] == f"{tmp_path}:/flowkit:z"
    assert command[command.index("--entrypoint") + 1 :][:3] == [
        "/temporal",
        "docker.io/temporalio/temporal:1.5.1",
        "server",
    ]
    assert command[command.index("--db-filename") + 1] == "/flowkit/temporal.db"
    assert command[command.index("--ip") + 1] == "0.0.0.0"


def test_root_inside_is_the_user_outside_where_an_engine_has_no_root(tmp_path: Path) -> None:
    container = ContainerImage(ContainerEngine("podman", rootless=True), "image")
    command = container.run_arguments("name", program="p", ports={}, data=tmp_path, arguments=[])
    assert command[command.index("--user") + 1] == "0:0"


@pytest.mark.parametrize(
    ("script", "rootless"),
    [
        ('[ "$1" = version ] && echo Client && exit 1', None),
        ('echo "Server: Docker Engine"', False),
        ('echo "Security Options: rootless"', True),
        ('echo "Podman Engine"', True),
    ],
)
def test_an_engine_must_answer_and_tells_whether_it_has_root(
    bare: Path, script: str, rootless: bool | None
) -> None:
    program(bare / "docker")
    (bare / "docker").write_text(f"#!/bin/sh\n{script}\n")
    engine = find_engine()
    assert (engine.rootless if engine else None) is rootless


def test_a_client_that_hangs_is_no_engine(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkit.local.container.COMMAND_TIMEOUT_SECONDS", 0.2)
    program(bare / "docker")
    (bare / "docker").write_text(f"#!{sys.executable}\nimport threading\nthreading.Event().wait()\n")
    assert find_engine() is None
