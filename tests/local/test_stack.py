"""A stack starts the servers that are not configured in the environment."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pymongo
import pytest
from tests.local.processes import WAIT_FOREVER, ScriptedProcess, stdout_of, wait_until

from flowkit.local.errors import ServerNotReady
from flowkit.local.mongo import MongoServer
from flowkit.local.ports import is_free, is_listening
from flowkit.local.stack import Stack

OWNER = """
import sys, time
from pathlib import Path
import pymongo
from flowkit.local import Stack

stack = Stack(Path(sys.argv[1]))
stack.start()
pymongo.MongoClient(stack.mongo_url).flowkit.tasks.insert_one({"_id": "last write"})
print(stack.temporal.port, stack.mongo.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.server
def test_servers_save_their_data_when_the_owner_is_killed(
    tmp_path: Path, python: Callable[..., subprocess.Popen[str]]
) -> None:
    owner = python("-c", OWNER, str(tmp_path))
    ports = [int(port) for port in stdout_of(owner).readline().split()]
    assert all(is_listening(port) for port in ports)

    owner.kill()

    temporal_port, mongo_port = ports
    with (
        MongoServer(tmp_path, port=mongo_port) as server,
        pymongo.MongoClient[dict[str, object]](server.url) as client,
    ):
        assert client.flowkit.tasks.find_one() == {"_id": "last write"}
    wait_until(lambda: is_free(temporal_port))


def test_servers_in_the_environment_are_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", "temporal.example:7233")
    monkeypatch.setenv("MONGO_URL", "mongodb://mongo.example:27017")
    with Stack(tmp_path / "stack") as stack:
        assert (stack.temporal, stack.mongo, stack.servers) == (None, None, [])
        assert stack.temporal_address == "temporal.example:7233"
        assert stack.mongo_url == "mongodb://mongo.example:27017"
    assert not (tmp_path / "stack").exists()


def test_only_the_server_missing_in_the_environment_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", "temporal.example:7233")
    stack = Stack(tmp_path)
    assert stack.servers == [stack.mongo]


def test_if_one_server_fails_the_others_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = ScriptedProcess(tmp_path / "good", WAIT_FOREVER, ready=True)
    bad = ScriptedProcess(tmp_path / "bad", "raise SystemExit(3)", ready=False)
    monkeypatch.setattr(Stack, "servers", [good, bad])
    with pytest.raises(ServerNotReady):
        Stack(tmp_path).start()
    assert not good.running
