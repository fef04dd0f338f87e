"""What `flowkit up` plans, and how it shows what runs."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console, Group
from tests.integration.world import CEILING, FLOWKIT, World

from flowkit.cli.up.exports import make_exports, script_exports, terminal_exports
from flowkit.cli.up.panel import Lines, UpInfo, render_panel
from flowkit.cli.up.plan import Plan, Ports, UpOptions, make_plan
from flowkit.cli.up.status import EXITED, UNRESPONSIVE, ProcessRow, Snapshot, TaskOverview
from flowkit.client import TaskSummary
from flowkit.models import TaskStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.cli.conftest import Program

# --- the plan ---------------------------------------------------------------------------------------------------


def parts(*only: str, handlers: tuple[str, ...] = (), **environment: str) -> set[str]:
    """What would be started: servers only if they are really started."""
    plan = make_plan(UpOptions(only=only, handlers=handlers), environment)
    kinds = {"temporal": plan.starts_temporal, "mongo": plan.starts_mongo}
    return {part.value for part in plan.parts if kinds.get(part.value, True)}


def test_all_is_started_that_has_something_to_do() -> None:
    assert parts() == {"temporal", "mongo", "engine"}
    assert parts(handlers=("m:H",)) == {"temporal", "mongo", "engine", "worker"}


def test_only_names_parts_with_commas_or_one_by_one() -> None:
    assert parts("temporal,mongo") == parts("temporal", "mongo") == {"temporal", "mongo"}
    assert parts("worker", handlers=("m:H",)) == {"worker"}


def test_servers_named_in_the_environment_are_not_started() -> None:
    assert parts(TEMPORAL_ADDRESS="t:1") == {"mongo", "engine"}
    assert parts(TEMPORAL_ADDRESS="t:1", MONGO_URL="mongodb://m") == {"engine"}
    assert parts(TEMPORAL_ADDRESS="", MONGO_URL="") == {"temporal", "mongo", "engine"}, "empty is as not set"


def test_four_ports_follow_from_the_first() -> None:
    assert Ports.from_base(5000) == Ports(temporal=5000, ui=5001, mongo=5002, temporal_http=5003)
    assert Ports.from_base(None) == Ports(temporal=7233, ui=8233, mongo=27017, temporal_http=None)


def plan(queue: str = "flowkit", database: str = "flowkit") -> Plan:
    """A plan of all."""
    return make_plan(UpOptions(queue=queue, database=database), {})


ELSEWHERE = {"TEMPORAL_ADDRESS": "127.0.0.1:5000", "MONGO_URL": "mongodb://127.0.0.1:5002"}
USUAL = {"TEMPORAL_ADDRESS": "127.0.0.1:7233", "MONGO_URL": "mongodb://127.0.0.1:27017"}


@pytest.mark.parametrize(
    ("environment", "servers", "options", "terminal"),
    [
        ({}, USUAL, {}, []),
        ({}, ELSEWHERE, {}, [f"export {name}={value}" for name, value in ELSEWHERE.items()]),
        (ELSEWHERE, ELSEWHERE, {}, []),
        ({}, USUAL, {"queue": "q", "database": "d"}, ["export MONGO_DATABASE=d", "export FLOWKIT_QUEUE=q"]),
        ({"FLOWKIT_QUEUE": "q"}, USUAL, {"queue": "q"}, []),
        ({"TEMPORAL_NAMESPACE": "other"}, USUAL, {}, ["export TEMPORAL_NAMESPACE=default"]),
    ],
)
def test_people_are_told_what_another_terminal_would_not_assume(
    environment: Mapping[str, str], servers: dict[str, str], options: dict[str, str], terminal: list[str]
) -> None:
    found = make_exports(plan(**options), servers["TEMPORAL_ADDRESS"], servers["MONGO_URL"])
    assert terminal_exports(environment, found) == terminal


def test_programs_are_always_told_the_servers_and_can_evaluate_what_they_are_told() -> None:
    url = "mongodb://127.0.0.1:5002/?a=1&b=2"
    lines = script_exports({}, make_exports(plan(queue="my queue"), "127.0.0.1:5000", url))
    assert lines[0] == "export TEMPORAL_ADDRESS=127.0.0.1:5000"
    script = "\n".join([*lines, 'printf "%s|%s" "$MONGO_URL" "$FLOWKIT_QUEUE"'])
    said = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout == f"{url}|my queue"


# --- the panel --------------------------------------------------------------------------------------------------

INFO = UpInfo(folder="/data", kept=False, runs_tasks=True, exports=("export A=b",))
ROWS = (
    ProcessRow(name="temporal", address="127.0.0.1:7233", detail="cache: Temporal CLI"),
    ProcessRow(name="Web UI", address="http://127.0.0.1:8233"),
    ProcessRow(name="mongo", address="mongodb://127.0.0.1:27017", detail="path: /usr/bin/mongod"),
    ProcessRow(name="engine", detail="polls queue flowkit"),
)


def summaries(*statuses: str) -> tuple[TaskSummary, ...]:
    """Tasks, the newest first."""
    return tuple(
        TaskSummary(task_id=f"task-{number}", status=TaskStatus(status), name="shop")
        for number, status in enumerate(statuses)
    )


def drawn(snapshot: Snapshot, info: UpInfo = INFO, *, height: int = 40, width: int = 100) -> list[str]:
    """The panel's lines."""
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(Group(*render_panel(snapshot, info, height, 3661)))
    file = console.file
    assert isinstance(file, io.StringIO)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_the_panel_shows_all_that_a_person_needs() -> None:
    tasks = TaskOverview(open={"running": 2, "deferred": 1}, newest=summaries("running", "finished"))
    lines = drawn(Snapshot(rows=ROWS, tasks=tasks))
    assert lines[0] == "FlowKit has been up for 1:01:01"
    assert any(
        line.split()[:3] == ["Web", "UI", "running"] and "http://127.0.0.1:8233" in line for line in lines
    )
    assert "3 open tasks: 1 deferred, 2 running" in lines
    assert any(line.split()[:2] == ["task-1", "finished"] for line in lines)
    assert lines[-5:] == [
        "logs  /data/*.log",
        "data  /data (temporary, removed on exit; use --data DIR to keep it)",
        "next  flowkit run graph.json --watch (in another terminal, after these lines)",
        "      export A=b",
        "Press Ctrl-C to stop everything",
    ]


def test_the_panel_tells_what_is_not_well() -> None:
    rows = (replace(ROWS[0], state=UNRESPONSIVE), replace(ROWS[3], state=EXITED))
    lines = drawn(Snapshot(rows=rows, tasks=None))
    assert any(line.startswith("temporal   not responding") for line in lines)
    assert any(line.startswith("engine     exited") for line in lines)
    assert "tasks: MongoDB is not responding" in lines


@pytest.mark.parametrize(("height", "shown"), [(24, 6), (30, 10), (10, 3)])
def test_as_many_tasks_are_shown_as_fit(height: int, shown: int) -> None:
    tasks = TaskOverview(open={}, newest=summaries(*["finished"] * 20))
    lines = drawn(Snapshot(rows=ROWS, tasks=tasks), height=height)
    assert sum(line.startswith("task-") for line in lines) == shown
    assert len(lines) < height or height == 10


def test_on_a_narrow_terminal_addresses_stay_whole() -> None:
    lines = drawn(Snapshot(rows=ROWS, tasks=None), width=60)
    assert any("mongodb://127.0.0.1:27017" in line for line in lines)


# --- lines ------------------------------------------------------------------------------------------------------


@pytest.fixture
def shown() -> Callable[..., list[str]]:
    """Shows one view after the other, and answers the lines that each has added."""
    file = io.StringIO()
    lines = Lines(Console(file=file, width=200), replace(INFO, kept=True))

    def show(snapshot: Snapshot | None = None) -> list[str]:
        if snapshot is not None:
            lines.show(snapshot)
        found = file.getvalue().splitlines()
        file.seek(0)
        file.truncate()
        return found

    return show


def test_a_log_begins_with_what_does_not_change_and_goes_on_with_changes(
    shown: Callable[..., list[str]],
) -> None:
    assert shown() == [
        "logs: /data/*.log",
        "data: /data (kept)",
        "next: flowkit run graph.json --watch (in another terminal, after the lines on stdout)",
    ]
    snapshot = Snapshot(rows=ROWS, tasks=TaskOverview(open={}, newest=summaries("finished")))
    assert shown(snapshot) == [], "what was there before is no change"
    assert shown(snapshot) == []
    new = (TaskSummary(task_id="new", status=TaskStatus.RUNNING), *summaries("finished"))
    assert shown(replace(snapshot, tasks=TaskOverview(open={"running": 1}, newest=new))) == [
        "task new: running"
    ]
    silent = (replace(ROWS[0], state=UNRESPONSIVE), *ROWS[1:])
    assert shown(Snapshot(rows=silent, tasks=None)) == ["temporal: not responding"]
    assert shown(replace(snapshot, tasks=TaskOverview(open={"running": 1}, newest=new))) == [
        "temporal: running"
    ]


# --- a terminal -------------------------------------------------------------------------------------------------


class Terminal:
    """`flowkit up` on a terminal."""

    def __init__(self, folder: Path, *arguments: str, env: Mapping[str, str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [str(FLOWKIT), "up", *arguments],
            cwd=folder,
            env={**env, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def until(self, text: str) -> None:
        """Read until it shows this."""
        while text not in self.seen:
            ready, _, _ = select.select([self._master], [], [], CEILING)
            assert ready, self.seen
            self.seen += os.read(self._master, 65536).decode()

    def close(self) -> None:
        """Whatever became of the test."""
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.mark.server
async def test_a_terminal_shows_the_panel_until_ctrl_c(world: World, program: Program) -> None:
    terminal = Terminal(program.folder, "--only", "engine", env=world.environment)
    try:
        terminal.until("FlowKit has been up for")
        terminal.until("Press Ctrl-C to stop everything")
        assert f"polls queue {world.queue}" in terminal.seen
        assert "export" not in terminal.seen, "the environment tells it already"
        assert terminal.seen.count("external server") == 2
        terminal.process.send_signal(2)
        terminal.until("all processes stopped; data and logs removed")
        assert terminal.process.wait(CEILING) == 0
    finally:
        terminal.close()
