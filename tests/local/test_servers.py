"""The local servers keep their data, end with their owner, and give way to servers named in the environment."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pymongo
import pytest
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes

from flowkit.local import temporal_cli as cli
from flowkit.local.cache import install_once
from flowkit.local.errors import FolderInUse, InstallFailed, PortInUse, ServerNotReady
from flowkit.local.mongo import MongoServer
from flowkit.local.ports import is_free, is_listening
from flowkit.local.process import ServerProcess
from flowkit.local.stack import Stack
from flowkit.local.temporal import TemporalServer


@pytest.fixture(autouse=True)
def _no_servers_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TEMPORAL_ADDRESS", "MONGO_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts another Python and ends it after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


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
    ports = [int(port) for port in lines_of(owner).readline().split()]
    assert all(is_listening(port) for port in ports)

    owner.kill()

    temporal_port, mongo_port = ports
    with (
        MongoServer(tmp_path, port=mongo_port) as server,
        pymongo.MongoClient[dict[str, object]](server.url) as client,
    ):
        assert client.flowkit.tasks.find_one() == {"_id": "last words"}
    wait_until(lambda: is_free(temporal_port))


@pytest.mark.server
def test_up_prints_the_addresses_and_ends_on_sigterm(
    tmp_path: Path, python: Callable[..., subprocess.Popen[str]]
) -> None:
    planned = Stack(tmp_path)
    assert planned.temporal is not None
    assert planned.mongo is not None
    ports = [planned.temporal.port, planned.temporal.ui_port, planned.mongo.port]
    options = zip(("--temporal-port", "--ui-port", "--mongo-port"), map(str, ports), strict=True)
    up = python(
        "-m", "flowkit.local", "up", "--folder", str(tmp_path), *(part for pair in options for part in pair)
    )

    printed = [lines_of(up).readline().strip() for _ in planned.exports]
    assert printed == [f"export {name}={value}" for name, value in planned.exports.items()]
    assert all(is_listening(port) for port in ports)

    up.send_signal(signal.SIGTERM)
    assert up.wait(timeout=20) == 0
    assert all(is_free(port) for port in ports)


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
    good = Scripted(tmp_path / "good", SLEEP, ready=True)
    bad = Scripted(tmp_path / "bad", "raise SystemExit(3)", ready=False)
    monkeypatch.setattr(Stack, "servers", [good, bad])
    with pytest.raises(ServerNotReady):
        Stack(tmp_path).start()
    assert not good.running


# --- one process ------------------------------------------------------------------------------------------------

SLEEP = "import threading; threading.Event().wait()"


class Scripted(ServerProcess):
    """A server that is a line of Python."""

    name = "scripted"

    def __init__(self, folder: Path, script: str, *ports: int, ready: bool) -> None:
        super().__init__(folder, *ports)
        self._script, self._ready = script, ready

    @classmethod
    def install(cls) -> None:
        """Nothing to do."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", self._script]

    def is_ready(self) -> bool:
        return self._ready


def test_a_server_that_ends_at_its_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    script = "print(*range(100, 130), sep='\\n'); raise SystemExit(3)"
    server = Scripted(tmp_path, script, ready=False)
    with pytest.raises(ServerNotReady) as caught:
        server.start()
    text = str(caught.value)
    assert f"code 3; the end of {server.log}" in text
    assert text.splitlines()[1:] == [str(number) for number in range(110, 130)]
    assert not server.running


def test_a_server_that_stays_silent_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkit.local.process.READY_WITHIN_SECONDS", 0.2)
    server = Scripted(tmp_path, SLEEP, ready=False)
    with pytest.raises(ServerNotReady, match="not ready within"):
        server.start()
    assert not server.running


def test_a_server_does_not_start_beside_another_on_its_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)):
            Scripted(tmp_path, SLEEP, port, ready=True).start()


def test_a_folder_serves_one_server_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkit.local.claims.WAIT_SECONDS", 0.1)
    second = Scripted(tmp_path, SLEEP, ready=True)
    with (
        Scripted(tmp_path, SLEEP, ready=True),
        pytest.raises(FolderInUse, match="used by a running scripted"),
    ):
        second.start()
    second.start()
    second.stop()


# --- install once -----------------------------------------------------------------------------------------------

INSTALLER = """
import sys, threading
from pathlib import Path
from flowkit.local.cache import install_once

who, journal, gate = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])

def build(folder):
    (folder / f"by-{who}").touch()
    with journal.open("a") as log:
        log.write(who)
    print("building", flush=True)
    while not gate.exists():
        threading.Event().wait(0.01)

print("calling", flush=True)
install_once("thing", "1", build)
print("done", flush=True)
"""


@pytest.fixture
def installer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Callable[..., subprocess.Popen[str]]
) -> Callable[[str], subprocess.Popen[str]]:
    monkeypatch.setenv("FLOWKIT_CACHE", str(tmp_path / "cache"))
    return lambda who: python("-c", INSTALLER, who, str(tmp_path / "journal"), str(tmp_path / "gate"))


def test_of_two_callers_one_installs_and_the_other_waits(
    tmp_path: Path, installer: Callable[[str], subprocess.Popen[str]]
) -> None:
    first = installer("a")
    assert [lines_of(first).readline() for _ in range(2)] == ["calling\n", "building\n"]
    second = installer("b")
    assert lines_of(second).readline() == "calling\n"
    assert not (tmp_path / "cache/thing/1").exists()

    (tmp_path / "gate").touch()

    assert lines_of(second).read() == "done\n"
    assert lines_of(first).read() == "done\n"
    assert (tmp_path / "journal").read_text() == "a"


def test_a_killed_install_is_done_again_from_the_start(
    tmp_path: Path, installer: Callable[[str], subprocess.Popen[str]]
) -> None:
    first = installer("a")
    assert [lines_of(first).readline() for _ in range(2)] == ["calling\n", "building\n"]
    first.kill()
    first.wait()
    (tmp_path / "gate").touch()

    second = installer("b")

    assert second.wait(timeout=20) == 0
    assert [path.name for path in (tmp_path / "cache/thing/1").iterdir()] == ["by-b"]


def test_a_failed_install_leaves_nothing_to_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWKIT_CACHE", str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise InstallFailed("no network")

    with pytest.raises(InstallFailed):
        install_once("thing", "1", fail)
    assert list(install_once("thing", "1", lambda folder: None).iterdir()) == []


# --- finding the Temporal CLI -----------------------------------------------------------------------------------


def test_a_named_temporal_cli_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "my-temporal"
    named.touch(mode=0o755)
    monkeypatch.setenv("FLOWKIT_TEMPORAL_BIN", str(named))
    assert cli.temporal_cli() == str(named)


def test_a_named_temporal_cli_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWKIT_TEMPORAL_BIN", "/no/such/program")
    with pytest.raises(InstallFailed, match="/no/such/program"):
        cli.temporal_cli()


def test_without_any_way_to_a_temporal_cli_the_error_names_the_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(folder: Path) -> None:
        raise RuntimeError("cannot download")

    monkeypatch.delenv("FLOWKIT_TEMPORAL_BIN", raising=False)
    monkeypatch.setenv("FLOWKIT_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cli, "_download", no_network)
    with pytest.raises(InstallFailed) as caught:
        cli.temporal_cli()
    for part in ("FLOWKIT_TEMPORAL_BIN", "TEMPORAL_ADDRESS", "cannot download", "`go` is not on PATH"):
        assert part in str(caught.value)


# --- helpers ----------------------------------------------------------------------------------------------------


def lines_of(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def wait_until(condition: Callable[[], bool], *, within: float = 20.0) -> None:
    """Return as soon as the condition holds; fail if it does not in time."""
    deadline, never = time.monotonic() + within, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        never.wait(0.02)
