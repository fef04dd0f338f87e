"""`flowkit admission` submits requests, shows the queue, and changes requests and limits."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from flowkit.admission.cli.commands import topic_rights
from flowkit.admission.client import describe
from flowkit.admission.kafka import TopicRights
from flowkit.admission.models import Door, Kind, Limits, Override, QueueStatus, Report, State, Ticket
from flowkit.admission.queue import AdmissionQueue
from flowkit.admission.store import AdmissionStore
from flowkit.cli.app import run
from flowkit.local.ports import free_port
from flowkit.models.admission import Priority
from flowkit.testing import memory_database
from tests.integration.handlers import Quick
from tests.integration.harness import eventually, node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from tests.cli.conftest import Program
    from tests.integration.harness import Harness

GRAPH: dict[str, Any] = {"nodes": [node("only", "inline")]}

Capture = pytest.CaptureFixture[str]


class Side:
    """The commands' queue in memory, as other processes see it, and their files."""

    def __init__(self, folder: Path) -> None:
        self.db = memory_database()
        self.graph = folder / "graph.json"
        self.graph.write_text(json.dumps(GRAPH), encoding="utf-8")
        self.script = folder / "main.py"
        self.script.write_text("print(7)\n", encoding="utf-8")

    def do(self, act: Callable[[AdmissionQueue], Awaitable[Any]]) -> Any:
        """Use the queue as another process."""

        async def use() -> Any:
            queue = AdmissionQueue(AdmissionStore(self.db, queue="flowkit"))
            try:
                return await act(queue)
            finally:
                await queue.session.close()

        return asyncio.run(use())

    def submit(self, id: str, *options: str, user: str = "dora") -> int:
        """Submit the graph."""
        return run(["admission", "submit", str(self.graph), "--id", id, "--user", user, *options])

    def dispatch(self) -> list[str]:
        """Give slots, and return the ids of the requests that got one."""
        return [item["_id"] for item in self.do(lambda queue: queue.dispatch())]


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Side:
    """The database of the commands, in memory, and the queue in it."""
    made = Side(tmp_path)

    @asynccontextmanager
    async def database(_: Any) -> AsyncIterator[Any]:
        yield made.db

    monkeypatch.setattr("flowkit.cli.servers.database", database)
    return made


# --- submit


def test_submitted_task_waits_with_its_position(side: Side, capsys: Capture) -> None:
    assert side.submit("first") == 0
    assert side.submit("second", "--priority", "high") == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "request first waits: position 1, priority normal, estimated wait unknown",
        "request second waits: position 1, priority high, estimated wait unknown",
    ]
    assert "flowkit admission cancel second" in shown.err
    assert side.do(lambda queue: queue.body("first")) == {"graph": GRAPH, "params": {}}


def test_nothing_stays_in_doubt_after_a_command(side: Side) -> None:
    side.submit("first")
    run(["admission", "priority", "first", "low"])
    counters = side.do(lambda queue: queue.store.counters())
    assert (counters["doubt"], counters["sessions"], counters["pending"]) == ({}, {}, 1)


def test_params_of_the_option_override_those_of_the_file(side: Side) -> None:
    side.graph.write_text(json.dumps({"graph": GRAPH, "params": {"day": 1, "limit": 2}}), encoding="utf-8")
    assert side.submit("first", "--params", '{"day": 3}') == 0
    assert side.do(lambda queue: queue.body("first"))["params"] == {"day": 3, "limit": 2}


def test_script_is_submitted_as_an_execution(side: Side, capsys: Capture) -> None:
    given = ["--set", "timeout_seconds=30"]
    command = ["admission", "submit", "--user", "dora", "--script", str(side.script), *given, "--json"]
    assert run(command) == 0
    ticket = json.loads(capsys.readouterr().out)
    assert (ticket["state"], ticket["kind"], ticket["position"]) == ("queued", "execution", 1)
    assert side.do(lambda queue: queue.body(ticket["execution_id"])) == {
        "script": "print(7)\n",
        "language": "python",
        "language_version": "3.11",
        "runtime_image": "python:3.11-slim",
        "runtime_command": ["python", "/scripts/main.py"],
        "runtime_filename": "main.py",
        "timeout_seconds": 30,
        "cpu_limit": "1000m",
        "memory_limit": "128Mi",
        "cpu_request": "500m",
        "memory_request": "64Mi",
    }


def test_rejected_request_exits_with_1_and_says_when_to_try_again(side: Side, capsys: Capture) -> None:
    assert run(["admission", "limits", "set", "--max-per-user", "1"]) == 0
    assert side.submit("first") == 0
    capsys.readouterr()
    assert side.submit("second") == 1
    reported = "flowkit: User execution limit exceeded (1) (user_limit); try again in 10 s\n"
    assert capsys.readouterr().err == reported
    assert side.submit("third", "--json") == 1
    ticket = json.loads(capsys.readouterr().out)
    assert (ticket["state"], ticket["reason"], ticket["retry_after_sec"]) == ("rejected", "user_limit", 10)


def test_known_id_is_submitted_once(side: Side, capsys: Capture) -> None:
    assert side.submit("first") == side.submit("first") == 0
    assert "it was submitted earlier with the same id" in capsys.readouterr().err
    assert side.do(lambda queue: queue.status()).pending == 1
    run(["admission", "cancel", "first"])
    capsys.readouterr()
    assert side.submit("first") == 0
    shown = capsys.readouterr()
    assert shown.out == "request first cancelled (user_request)\n"
    assert "flowkit admission cancel" not in shown.err


@pytest.mark.parametrize(("state", "code"), [(State.COMPLETED, 0), (State.FAILED, 1)])
def test_wait_shows_changes_and_exits_with_the_outcome(
    side: Side, capsys: Capture, monkeypatch: pytest.MonkeyPatch, state: State, code: int
) -> None:
    async def find(queue: AdmissionQueue, execution_id: str) -> Ticket | None:
        """Let the request proceed by one state whenever the command looks at it."""
        found = await look(queue, execution_id)
        if found is not None and found.state is State.QUEUED:
            await queue.dispatch()
        elif found is not None:
            await queue.report(execution_id, Report(state=state, reason="task_failed", error="no disk"))
        return found

    look = AdmissionQueue.find
    monkeypatch.setattr(AdmissionQueue, "find", find)
    monkeypatch.setattr("flowkit.cli.following._PAUSE_SEC", 0)
    assert side.submit("first", "--wait") == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "request first waits: position 1, priority normal, estimated wait unknown",
        "request first is starting",
    ]
    assert lines[2] == f"request first {state}: no disk (task_failed)"


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ([], "neither GRAPH nor --script is given; give one of them"),
        (["graph.json", "--script", "main.py"], "both GRAPH and --script is given"),
        (["graph.json", "--lang", "python"], "--lang needs --script; omit --lang, or give a script"),
        (["--script", "main.py", "--params", "{}"], "--params needs GRAPH; omit --params"),
        (
            ["--script", "main.rb", "--lang", "ruby", "--set", "runtime_image=ruby:3.3"],
            "--lang 'ruby' has no default for runtime_command, runtime_filename; give them with --set",
        ),
        (["missing.json"], "there is no graph file 'missing.json'"),
        (["graph.json", "--id", "a\nb"], "--id"),
        (["graph.json", "--priority", "urgent"], "'critical', 'high', 'normal', 'low', 'background'"),
        (["graph.json", "--tenant", "a/b"], "it must not contain a slash"),
        (
            ["--script", "main.py", "--lang", "python", "--lang-version", "3", "--set", "cpu=1"],
            "--set 'cpu' is no field of an execution; choose from runtime_image,",
        ),
        (
            ["--script", "main.py", "--lang", "python", "--lang-version", "3", "--set", "timeout_seconds=0"],
            "--set timeout_seconds is 0; it must be a whole number, 1 or more",
        ),
        (
            ["--script", "gone.py", "--lang", "python", "--lang-version", "3"],
            "there is no script 'gone.py'; give the path of a text file",
        ),
    ],
)
def test_invalid_submission_exits_with_2(
    side: Side, capsys: Capture, monkeypatch: pytest.MonkeyPatch, arguments: list[str], reported: str
) -> None:
    monkeypatch.chdir(side.graph.parent)
    assert run(["admission", "submit", "--user", "dora", *arguments]) == 2
    assert reported in capsys.readouterr().err


def test_id_of_another_user_is_taken(side: Side, capsys: Capture) -> None:
    assert side.submit("first") == 0
    assert side.submit("first", user="emil") == 2
    text = "execution_id is 'first', which another user or queue has used; choose another id"
    assert text in capsys.readouterr().err


# --- priority and cancel


def test_waiting_request_moves_and_is_cancelled(side: Side, capsys: Capture) -> None:
    side.submit("first")
    side.submit("second")
    capsys.readouterr()
    assert run(["admission", "priority", "second", "critical"]) == 0
    assert "request second waits: position 1, priority critical" in capsys.readouterr().out
    assert run(["admission", "cancel", "second", "--reason", "not needed"]) == 0
    cancelled = "request second cancelled: not needed (user_request)\n"
    assert capsys.readouterr().out == cancelled
    for options in ([], ["--watch"]):
        assert run(["admission", "status", "second", *options]) == 0
        assert capsys.readouterr().out == cancelled
    [*_, event] = side.do(lambda queue: queue.events("second"))
    assert event["event_type"] == "execution_cancelled"
    assert "@" in event["cancelled_by"]


def test_end_of_a_running_request_is_only_requested(side: Side, capsys: Capture) -> None:
    side.submit("first")
    assert side.dispatch() == ["first"]
    capsys.readouterr()
    assert run(["admission", "cancel", "first"]) == 0
    assert capsys.readouterr().out == "request first is starting; its end is requested\n"


@pytest.mark.parametrize(
    ("command", "code", "reported"),
    [
        (["priority", "unknown", "low"], 4, "there is no request 'unknown' in the admission queue 'flowkit'"),
        (["cancel", "unknown"], 4, "`flowkit admission list` shows the requests"),
        (["status", "unknown"], 4, "there is no request 'unknown' in the admission queue 'flowkit'"),
        (["priority", "runs", "low"], 2, "request runs is starting, so its priority stays normal"),
        (["priority", "ended", "low"], 2, "request ended is completed, so its priority stays normal"),
        (["cancel", "ended"], 2, "request ended is already completed; there is nothing to cancel"),
        (["cancel", ""], 2, "ID"),
    ],
)
def test_change_that_is_not_possible_says_why(
    side: Side, capsys: Capture, command: list[str], code: int, reported: str
) -> None:
    side.submit("ended")
    side.submit("runs")
    side.dispatch()
    side.do(lambda queue: queue.report("ended", Report(state=State.COMPLETED)))
    capsys.readouterr()
    assert run(["admission", *command]) == code
    assert reported in capsys.readouterr().err


# --- status and list


def test_status_shows_usage_bands_and_users(side: Side, capsys: Capture) -> None:
    run(["admission", "limits", "set", "--max-active", "2", "--max-pending", "10"])
    for number in range(4):
        side.submit(f"d{number}", "--priority", "low")
    side.submit("e", user="emil")
    side.dispatch()
    capsys.readouterr()
    assert run(["admission", "status"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["active", "2", "2", "100.0%", "█" * 20] in rows
    assert ["pending", "3", "10", "30.0%", "█" * 6 + "░" * 14] in rows
    assert ["low", "3", "100.0%", "█" * 20] in rows
    assert ["dora", "default", "3", "1"] in rows
    assert ["emil", "default", "0", "1"] in rows
    assert ["in", "doubt", "0", "changes"] in rows
    assert run(["admission", "status", "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert (fields["utilization"], fields["active_utilization"]) == (0.3, 1.0)
    assert fields["by_priority"] == {"low": 3}
    assert fields["started_per_sec"] == 0
    assert run(["admission", "status", "--watch", "--json"]) == 2


def test_watch_prints_a_line_for_each_change_until_it_is_interrupted(
    side: Side, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[QueueStatus] = []

    async def status(queue: AdmissionQueue) -> QueueStatus:
        """Give a slot after the second look, and interrupt the command after the third."""
        if len(looks) == 3:
            raise KeyboardInterrupt
        if len(looks) == 2:
            await queue.dispatch()
        looks.append(await read(queue))
        return looks[-1]

    read = AdmissionQueue.status
    side.submit("first", "--priority", "low")
    capsys.readouterr()
    monkeypatch.setattr(AdmissionQueue, "status", status)
    monkeypatch.setattr("flowkit.admission.cli.inspection._REFRESH_SEC", 0)
    assert run(["admission", "status", "--watch"]) == 130
    lines = [line.partition(" s  ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["1 pending (1 low), 0 active", "1 pending (1 low), 1 active"]


def test_list_selects_and_says_how_many_there_are(side: Side, capsys: Capture) -> None:
    side.submit("first")
    side.submit("second", "--priority", "high", user="emil")
    side.submit("third", "--tenant", "shop", user="emil")
    capsys.readouterr()

    def listed(*options: str) -> list[str]:
        assert run(["admission", "list", *options, "--json"]) == 0
        return [each["execution_id"] for each in json.loads(capsys.readouterr().out)["requests"]]

    assert listed() == ["third", "second", "first"]
    assert listed("--user", "emil", "--priority", "high") == ["second"]
    assert listed("--tenant", "shop") == ["third"]
    assert listed("--status", "active") == []
    assert run(["admission", "list", "--limit", "1"]) == 0
    shown = capsys.readouterr()
    assert "third" in shown.out
    assert shown.err == "1 of 3 requests; `--limit` shows more\n"
    assert run(["admission", "list", "--status", "reserving"]) == 2
    assert "--status 'reserving' is no status of a request; choose from queued" in capsys.readouterr().err


def test_status_and_list_of_a_queue_that_nobody_has_used_are_empty(side: Side, capsys: Capture) -> None:
    assert run(["admission", "status"]) == run(["admission", "list"]) == 0
    shown = capsys.readouterr()
    assert "none waits" in shown.out
    assert shown.err == "no requests\n"


# --- limits


def test_limits_are_changed_one_by_one_and_reset(side: Side, capsys: Capture) -> None:
    limits = ["admission", "limits"]
    assert run([*limits, "set", "--max-active", "3", "--max-active-per-user", "2", "--stale-sec", "60"]) == 0
    assert run([*limits, "user", "shop/dora", "--max-total", "7"]) == 0
    assert run([*limits, "user", "a.b", "--max-total", "5", "--max-active", "1"]) == 0
    assert run([*limits, "tenant", "shop", "--max-active", "2"]) == 0
    stored = side.do(lambda queue: queue.store.limits())
    users = {"shop/dora": Override(max_total=7), "a.b": Override(max_total=5, max_active=1)}
    general = replace(Limits(), max_active=3, max_active_per_user=2, stale_sec=60.0)
    assert stored == replace(general, users=users, tenants={"shop": Override(max_active=2)})
    capsys.readouterr()
    assert run(limits) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["max_active", "3", "10"] in rows
    assert ["max_active_per_user", "2", "none"] in rows
    assert ["shop/dora", "7", "none"] in rows
    assert run([*limits, "user", "a.b", "--max-total", "none"]) == 0
    assert run([*limits, "user", "shop/dora", "--reset"]) == 0
    assert run([*limits, "set", "--reset", "--max-pending", "5"]) == 0
    stored = side.do(lambda queue: queue.store.limits())
    assert stored.users == {"a.b": Override(max_active=1)}
    assert replace(stored, users={}, tenants={}) == replace(Limits(), max_pending=5)


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["set"], "no limit is given; give at least one option, or --reset"),
        (["set", "--max-pending", "0"], "--max-pending"),
        (["set", "--max-active", "many"], "--max-active"),
        (
            ["set", "--max-active-per-user", "0"],
            "--max-active-per-user is '0', which is no limit; give a whole",
        ),
        (
            ["set", "--stale-sec", "nan"],
            "--stale-sec is nan, which is no time that a request can wait; give a",
        ),
        (["user", "dora"], "no limit is given"),
        (["user", "dora", "--max-total", "-1"], "--max-total is '-1', which is no limit"),
        (["set", "--stale-sec", "0.5"], "give a number of seconds from 1 to 2,592,000"),
        (["set", "--max-pending", "1000001"], "--max-pending"),
        (["user", "dora", "--max-total", "10001"], "give a whole number from 1 to 10,000, or none"),
        (["user", "x" * 402, "--reset"], "it must have at most 401 characters"),
        (["user", "a\tb", "--reset"], "it must not have control characters"),
        (["tenant", "x" * 201, "--reset"], "it must have at most 200 characters"),
        (["tenant", "a/b", "--reset"], "the name of a tenant must not contain a slash"),
        (
            ["--queue", "other", "set", "--reset"],
            "options are given in front of set, which does not use them",
        ),
    ],
)
def test_invalid_limit_exits_with_2_and_changes_nothing(
    side: Side, capsys: Capture, arguments: list[str], reported: str
) -> None:
    assert run(["admission", "limits", *arguments]) == 2
    assert reported in capsys.readouterr().err
    assert side.do(lambda queue: queue.store.limits()) == Limits()


# --- texts


def ticket(state: State, **fields: Any) -> Ticket:
    """Return a request."""
    who: dict[str, Any] = {"tenant": "default", "user_id": "u", "door": Door.PYTHON}
    who["priority"] = Priority.NORMAL
    return Ticket(execution_id="r", state=state, kind=Kind.TASK, requested_at=0.0, **who, **fields)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            ticket(State.QUEUED, position=1_200, estimated_wait_sec=90.5),
            "request r waits: position 1,200, priority normal, estimated wait 90.5 s",
        ),
        (ticket(State.ACTIVE), "request r is active"),
        (ticket(State.COMPLETED), "request r completed"),
        (ticket(State.EXPIRED, reason="stale", error="too\nlong"), "request r expired: too long (stale)"),
        (ticket(State.TIMEOUT, reason="timed_out"), "request r timed out (timed_out)"),
    ],
)
def test_a_request_is_described_in_one_line(given: Ticket, line: str) -> None:
    assert describe(given) == line


# --- what the writers of topics may do


def test_options_say_what_the_writers_of_topics_may_do() -> None:
    priorities, tenants = ["execution_requested=low"], ["execution_requested=07", "execution_failed=a=b"]
    assert topic_rights(priorities, [*tenants, "execution_requested=shop"]) == {
        "execution_requested": TopicRights(max_priority=Priority.LOW, tenants=["07", "shop"]),
        "execution_failed": TopicRights(tenants=["a=b"]),
    }


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (
            ["--topic-tenant", "shop"],
            "is not of the form TOPIC=TENANT; write, for example, --topic-tenant execution_requested=TENANT",
        ),
        (["--topic-priority", "execution_requested="], "is not of the form TOPIC=BAND"),
        (
            ["--topic-priority", "execution_requested=top"],
            "max_priority of the topic execution_requested is 'top'",
        ),
        (["--topic-priority", "t=low", "--topic-priority", "t=high"], "--topic-priority t is given twice"),
        (["--topic-tenant", "requests=shop"], "rights names the topic 'requests'"),
    ],
)
def test_invalid_right_of_a_topic_exits_with_2(capsys: Capture, arguments: list[str], reported: str) -> None:
    assert run(["admission", "run", "--no-http", "--kafka", *arguments]) == 2
    assert reported in capsys.readouterr().err


# --- real processes


class Inline(Quick):
    """A role that the engine hosts."""

    role = "inline"
    inline = True


@pytest.mark.server
async def test_a_task_that_waits_is_known_to_the_commands_for_tasks(
    harness: Harness, program: Program
) -> None:
    program.write("graph.json", json.dumps(GRAPH))
    submitted = ("admission", "submit", "graph.json", "--user", "dora", "--id", harness.queue)
    ended = f"request {harness.queue} cancelled (user_request)\n"
    for command, code, out in (
        (submitted, 0, f"request {harness.queue} waits: position 1"),
        (("status", harness.queue), 0, f"request {harness.queue} waits: position 1"),
        (("status", harness.queue, "--watch", "--timeout", "0.1"), 124, "waits: position 1"),
        (("cancel", harness.queue), 0, "requested the cancellation of task"),
        (("status", harness.queue), 0, ended),
        (("status", harness.queue, "--watch"), 5, ended),
        (("cancel", harness.queue), 2, ""),
        (("status", "unknown"), 4, ""),
    ):
        done = await program.call(*command, env=harness.environment)
        assert (done.code, out in done.out) == (code, True), (command, done)
        assert "stopped waiting" not in done.err


@pytest.mark.server
async def test_a_process_starts_what_other_commands_submit(harness: Harness, program: Program) -> None:
    program.write("graph.json", json.dumps(GRAPH))
    await harness.engine({"inline": Inline()})
    early = f"{harness.queue}-early"
    waits = f"request {early} waits: position 1"
    await program.call(
        "admission", "submit", "graph.json", "--user", "dora", "--id", early, env=harness.environment
    )
    waiting = await program.call("status", early, env=harness.environment)
    assert (waiting.code, waits in waiting.out) == (0, True), waiting.err
    watching = program.start("status", early, "--watch", env=harness.environment)
    assert watching.stdout is not None
    assert waits in await asyncio.to_thread(watching.stdout.readline)
    port = free_port()
    process = program.start("admission", "run", "--port", str(port), env=harness.environment)
    watched, _ = await asyncio.to_thread(watching.communicate)
    assert f"task {early} finished" in watched
    given = ("graph.json", "--user", "dora", "--id", harness.queue, "--wait", "--json")
    submitted = await program.call("admission", "submit", *given, env=harness.environment)
    assert submitted.code == 0, submitted.err
    assert json.loads(submitted.out)["state"] == "completed"
    assert f"request {harness.queue} waits" in submitted.err
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

        async def is_empty() -> bool:
            async with session.get("/api/v1/admin/executions/queue") as response:
                return bool((await response.json())["queue_depth"] == 0)

        await eventually(is_empty)
        async with session.get("/metrics") as response:
            assert "execution_queue_depth 0.0" in await response.text()
    process.send_signal(signal.SIGINT)
    _, log = await asyncio.to_thread(process.communicate)
    assert process.poll() == 0
    assert f"running: admission starts requests of queue {harness.queue}" in log
