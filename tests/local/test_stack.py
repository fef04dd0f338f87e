"""The local servers keep their data, end with their owner, and give way to servers named in the environment."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pymongo
import pytest
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes
from tests.local.processes import WAIT_FOREVER, ScriptedProcess, stdout_of, wait_until

from flowkit.local.errors import ServerNotReady
from flowkit.local.mongo import MongoServer
from flowkit.local.ports import is_free, is_listening
from flowkit.local.stack import Stack
from flowkit.local.temporal import TemporalServer

# --- Temporal ---------------------------------------------------------------------------------------------------


async def start_workflow(server: TemporalServer, workflow_id: str) -> None:
    client = await Client.connect(server.address)
    attribute = SearchAttributePair(SearchAttributeKey.for_keyword("FlowkitPipeline"), "books")
    await client.start_workflow(
        "Any", id=workflow_id, task_queue="nobody", search_attributes=TypedSearchAttributes([attribute])
    )


async def is_running(server: TemporalServer, workflow_id: str) -> bool:
    client = await Client.connect(server.address)
    description = await client.get_workflow_handle(workflow_id).describe()
    return description.status == WorkflowExecutionStatus.RUNNING


@pytest.mark.server
async def test_temporal_keeps_its_workflows_when_stopped_and_when_killed(tmp_path: Path) -> None:
    with TemporalServer(tmp_path) as server:
        address = server.address
        await start_workflow(server, "before-stop")

        server.restart()
        assert await is_running(server, "before-stop")

        await start_workflow(server, "before-kill")
        server.kill()
        assert not server.running
        assert not is_listening(server.port)

        server.restart()
        assert server.address == address
        assert await is_running(server, "before-kill")
        assert is_listening(server.ui_port)


@pytest.mark.server
def test_a_test_can_change_a_setting_of_temporal(tmp_path: Path) -> None:
    settings = {"limit.historyCount.suggestContinueAsNew": 50, "history.timerProcessorMaxTimeShift": "1s"}
    with TemporalServer(tmp_path, dynamic_config=settings) as server:
        command = server.command()
    assert "limit.historyCount.suggestContinueAsNew=50" in command
    assert 'history.timerProcessorMaxTimeShift="1s"' in command
    assert "matching.numTaskqueueReadPartitions=1" in command


# --- Mongo ------------------------------------------------------------------------------------------------------


@pytest.mark.server
def test_mongo_keeps_its_documents_when_stopped(tmp_path: Path) -> None:
    with MongoServer(tmp_path) as server:
        with pymongo.MongoClient[dict[str, object]](server.url) as client:
            client.flowkit.tasks.insert_one({"_id": "t", "status": "running"})
        server.stop()
        assert not server.running
        server.start()
        with pymongo.MongoClient[dict[str, object]](server.url) as client:
            assert client.flowkit.tasks.find_one() == {"_id": "t", "status": "running"}


@pytest.mark.server
def test_a_stand_in_forgets_its_documents_if_told_so(tmp_path: Path) -> None:
    with MongoServer(tmp_path, keeps_data=False) as server:
        if not server.stand_in:
            pytest.skip("MongoDB keeps its data")
        with pymongo.MongoClient[dict[str, object]](server.url) as client:
            client.flowkit.tasks.insert_one({"_id": "t"})
        server.restart()
        with pymongo.MongoClient[dict[str, object]](server.url) as client:
            assert client.flowkit.tasks.find_one() is None
    assert not (tmp_path / "mongo.mv").exists()


# --- the whole stack --------------------------------------------------------------------------------------------

OWNER = """
import sys, time
from pathlib import Path
import pymongo
from flowkit.local import Stack

stack = Stack(Path(sys.argv[1]))
stack.start()
pymongo.MongoClient(stack.mongo_url).flowkit.tasks.insert_one({"_id": "last words"})
print(stack.temporal.port, stack.mongo.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.server
def test_servers_end_in_order_when_their_owner_is_killed(
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
        assert client.flowkit.tasks.find_one() == {"_id": "last words"}
    wait_until(lambda: is_free(temporal_port))


def test_servers_named_in_the_environment_are_used_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", "temporal.example:7233")
    monkeypatch.setenv("MONGO_URL", "mongodb://mongo.example:27017")
    with Stack(tmp_path / "stack") as stack:
        assert (stack.temporal, stack.mongo, stack.servers) == (None, None, [])
        assert stack.temporal_address == "temporal.example:7233"
        assert stack.mongo_url == "mongodb://mongo.example:27017"
    assert not (tmp_path / "stack").exists()


def test_only_the_server_that_is_missing_in_the_environment_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", "temporal.example:7233")
    stack = Stack(tmp_path)
    assert stack.servers == [stack.mongo]


def test_if_one_server_fails_those_before_it_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = ScriptedProcess(tmp_path / "good", WAIT_FOREVER, ready=True)
    bad = ScriptedProcess(tmp_path / "bad", "raise SystemExit(3)", ready=False)
    monkeypatch.setattr(Stack, "servers", [good, bad])
    with pytest.raises(ServerNotReady):
        Stack(tmp_path).start()
    assert not good.running
