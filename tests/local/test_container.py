"""Servers in containers, with a fake container engine."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pymongo
import pytest
from tests.kafka_server import Broker
from tests.local.processes import create_program, descendants, still_running, wait_until

from flowkit.local import Kafka, Stack, TemporalServer
from flowkit.local.container import ContainerEngine, ContainerImage, container_name, find_engine
from flowkit.local.ports import is_free

if TYPE_CHECKING:
    from flowkit.local.process import ServerProcess


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake engine without images. Returns the file in which its client records its calls."""
    client = tmp_path / "bin" / "docker"
    create_program(client)
    script = Path(__file__).with_name("fake_docker.py")
    client.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(tmp_path))
    monkeypatch.setenv("FLOWKIT_SERVERS", "container")
    return tmp_path / "calls"


def calls(call_log: Path, verb: str) -> list[list[str]]:
    """Return the recorded calls of one subcommand."""
    every = [json.loads(line) for line in call_log.read_text().splitlines()]
    return [call for call in every if call[0] == verb]


def process_tree(server: ServerProcess) -> set[int]:
    """Return the ids of all processes of a server."""
    assert server._guard is not None
    return {server._guard.pid, *descendants(server._guard.pid)}


@pytest.mark.slow
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
        removed = len(calls(docker, "rm"))
        stack.mongo.kill()
        assert len(calls(docker, "rm")) == removed + 1, "a killed container is removed"
    wait_until(lambda: not still_running(family))
    assert all(is_free(port) for port in ports)
    images = {"docker.io/temporalio/temporal:1.9.1", "docker.io/library/mongo:7.0.28"}
    assert len(calls(docker, "pull")) == 2
    assert {call[1] for call in calls(docker, "pull")} == images
    names = {container_name(name, folder) for name in ("mongo", "temporal")}
    assert {call[2] for call in calls(docker, "rm")} == names


@pytest.mark.slow
@pytest.mark.server
async def test_kafka_runs_in_a_container_and_keeps_its_data(tmp_path: Path, docker: Path) -> None:
    """With what it keeps, `tests/local/test_kafka.py` starts a broker again."""
    with Kafka(tmp_path / "data") as server:
        broker = Broker(bootstrap_servers=server.bootstrap_servers)
        await broker.create_topics("a")
        await broker.produce("a", b"kept")
        assert await broker.consume("a", 1) == [b"kept"]
    assert (tmp_path / "data" / "kafka" / "data" / "a-0").is_dir()
    assert calls(docker, "pull") == [["pull", "docker.io/apache/kafka:3.9.1"]]
    [first] = (call[-1] for call in calls(docker, "run"))
    second = server.command()[-1]
    assert "/opt/kafka/bin/kafka-storage.sh format" in first
    assert "format" not in second
    assert second.endswith("&& exec /opt/kafka/bin/kafka-server-start.sh /flowkit/server.properties")


def test_a_container_gets_ports_user_and_data_folder(tmp_path: Path, docker: Path) -> None:
    command = TemporalServer(tmp_path, port=1, ui_port=2, http_port=3).command()
    assert command[1:5] == ["run", "--rm", "--name", container_name("temporal", tmp_path)]
    published = [value for option, value in itertools.pairwise(command) if option == "--publish"]
    assert published == ["127.0.0.1:1:7233", "127.0.0.1:2:8233", "127.0.0.1:3:7243"]
    assert command[command.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    assert command[command.index("--volume") + 1] == f"{tmp_path}:/flowkit:z"
    assert command[command.index("--entrypoint") + 1 :][:3] == [
        "temporal",
        "docker.io/temporalio/temporal:1.9.1",
        "server",
    ]
    assert command[command.index("--db-filename") + 1] == "/flowkit/temporal.db"
    assert command[command.index("--ip") + 1] == "0.0.0.0"


def test_a_rootless_engine_runs_containers_as_root(tmp_path: Path) -> None:
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
def test_an_engine_must_be_running_and_may_be_rootless(
    empty_path: Path, script: str, rootless: bool | None
) -> None:
    create_program(empty_path / "docker")
    (empty_path / "docker").write_text(f"#!/bin/sh\n{script}\n")
    engine = find_engine()
    assert (engine.rootless if engine else None) is rootless


def test_a_client_that_hangs_counts_as_no_engine(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkit.local.container.COMMAND_TIMEOUT_SECONDS", 0.2)
    create_program(empty_path / "docker")
    (empty_path / "docker").write_text(f"#!{sys.executable}\nimport threading\nthreading.Event().wait()\n")
    assert find_engine() is None
