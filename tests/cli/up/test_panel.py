"""The panel and the log lines of `flowkit up`."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console, Group

from flowkit.cli.up.monitor import (
    EXITED,
    UNRESPONSIVE,
    ProcessLines,
    ProcessRow,
    Snapshot,
    TaskOverview,
    UpInfo,
    render_panel,
)
from flowkit.client import TaskSummary
from flowkit.models import TaskStatus

if TYPE_CHECKING:
    from collections.abc import Callable

INFO = UpInfo(folder="/data", kept=False, runs_tasks=True, exports=("export A=b",))

ROWS = (
    ProcessRow(name="temporal", address="127.0.0.1:7233", detail="cache: Temporal CLI"),
    ProcessRow(name="Web UI", address="http://127.0.0.1:8233"),
    ProcessRow(name="mongo", address="mongodb://127.0.0.1:27017", detail="path: /usr/bin/mongod"),
    ProcessRow(name="engine", detail="polls queue flowkit"),
)


def summaries(*statuses: str) -> tuple[TaskSummary, ...]:
    """Return tasks, the newest first."""
    return tuple(
        TaskSummary(task_id=f"task-{number}", status=TaskStatus(status), name="shop")
        for number, status in enumerate(statuses)
    )


def panel_lines(snapshot: Snapshot, info: UpInfo = INFO, *, height: int = 40, width: int = 100) -> list[str]:
    """Return the lines of the panel."""
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(Group(*render_panel(info, height, 3661, snapshot)))
    file = console.file
    assert isinstance(file, io.StringIO)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_the_panel_shows_processes_tasks_folder_and_next_command() -> None:
    tasks = TaskOverview(open={"running": 2, "deferred": 1}, newest=summaries("running", "finished"))
    lines = panel_lines(Snapshot(rows=ROWS, tasks=tasks))
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


def test_the_next_command_runs_the_flow_of_the_workers() -> None:
    lines = panel_lines(Snapshot(rows=ROWS, tasks=None), replace(INFO, graph="shop.pipeline:flow"))
    assert any(line.startswith("next  flowkit run shop.pipeline:flow --watch") for line in lines)


def test_the_panel_shows_processes_that_do_not_respond_or_exited() -> None:
    rows = (replace(ROWS[0], state=UNRESPONSIVE), replace(ROWS[3], state=EXITED))
    lines = panel_lines(Snapshot(rows=rows, tasks=None))
    assert any(line.startswith("temporal   not responding") for line in lines)
    assert any(line.startswith("engine     exited") for line in lines)
    assert "tasks: MongoDB is not responding" in lines


@pytest.mark.parametrize(("height", "shown"), [(24, 6), (30, 10), (10, 3)])
def test_the_panel_shows_as_many_tasks_as_fit(height: int, shown: int) -> None:
    tasks = TaskOverview(open={}, newest=summaries(*["finished"] * 20))
    lines = panel_lines(Snapshot(rows=ROWS, tasks=tasks), height=height)
    assert sum(line.startswith("task-") for line in lines) == shown
    assert len(lines) < height or height == 10


def test_a_narrow_terminal_shows_whole_addresses() -> None:
    lines = panel_lines(Snapshot(rows=ROWS, tasks=None), width=60)
    assert any("mongodb://127.0.0.1:27017" in line for line in lines)


@pytest.fixture
def show() -> Callable[..., list[str]]:
    """Shows a snapshot, and returns the lines that this adds to the log."""
    file = io.StringIO()
    lines = ProcessLines(Console(file=file, width=200), replace(INFO, kept=True))

    def show_snapshot(snapshot: Snapshot | None = None) -> list[str]:
        if snapshot is not None:
            lines.show(snapshot)
        found = file.getvalue().splitlines()
        file.seek(0)
        file.truncate()
        return found

    return show_snapshot


def test_a_log_starts_with_constant_facts_and_continues_with_changes(
    show: Callable[..., list[str]],
) -> None:
    assert show() == [
        "logs: /data/*.log",
        "data: /data (kept)",
        "next: flowkit run graph.json --watch (in another terminal, after the lines on stdout)",
    ]
    snapshot = Snapshot(rows=ROWS, tasks=TaskOverview(open={}, newest=summaries("finished")))
    assert show(snapshot) == [], "a task that existed before is no change"
    assert show(snapshot) == []
    new = (TaskSummary(task_id="new", status=TaskStatus.RUNNING), *summaries("finished"))
    assert show(replace(snapshot, tasks=TaskOverview(open={"running": 1}, newest=new))) == [
        "task new: running"
    ]
    unresponsive = (replace(ROWS[0], state=UNRESPONSIVE), *ROWS[1:])
    assert show(Snapshot(rows=unresponsive, tasks=None)) == ["temporal: not responding"]
    assert show(replace(snapshot, tasks=TaskOverview(open={"running": 1}, newest=new))) == [
        "temporal: running"
    ]


def test_the_panel_shows_a_long_notice_whole() -> None:
    problem = f"module 'shop' has a syntax error at {'folder/' * 30}shop.py:7: expected ':'"
    lines = panel_lines(Snapshot(rows=ROWS, tasks=None, notices=(problem,)))
    assert "shop.py:7:expected':'" in "".join(lines).replace(" ", "")
