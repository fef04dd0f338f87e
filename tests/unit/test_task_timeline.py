"""The timeline of a task is read from recorded histories, and from logs once Temporal has deleted the history."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from temporalio.client import WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter as converter
from tests.unit.test_explain import check_parts, ran, worked
from tests.unit.test_explain import explained as explain_nodes

from flowkit.adapters.mongo import iso, moment
from flowkit.adapters.tasks.queries import LoggedAttempt
from flowkit.cli.tasks.explain import MOST_LEGS, draw
from flowkit.models import FailureKind, Settings, TaskStatus
from flowkit.models.waits import for_decision
from flowkit.reading.attempts import AttemptOutcome, AttemptView, merge, read_events, seconds_of
from flowkit.reading.explain import TimePart, TimeReport, WaitSpan, explain_timeline
from flowkit.reading.notes import describe_waits
from flowkit.reading.state import NodeRow, TaskView
from flowkit.reading.timeline import HistoryWaits, TaskExplanation, make_timeline, to_json
from flowkit.workflows.display.summaries import TimerKind, read_timer, timer_name

if TYPE_CHECKING:
    from collections.abc import Sequence

HISTORIES = Path(__file__).parents[1] / "replay" / "histories"

PARTS: list[tuple[str, str, set[TimePart]]] = [
    ("retry", "a", {TimePart.FAILED_WORK, TimePart.RETRY_WAITS, TimePart.WORK, TimePart.QUEUE}),
    ("native_loss", "a", {TimePart.FAILED_WORK, TimePart.RETRY_WAITS, TimePart.WORK, TimePart.QUEUE}),
    ("limits", "b", {TimePart.SLOTS, TimePart.WORK, TimePart.QUEUE}),
    ("decisions-1", "a", {TimePart.FAILED_WORK, TimePart.PEOPLE, TimePart.WORK, TimePart.QUEUE}),
    ("streaming", "a", {TimePart.WORK, TimePart.QUEUE}),
    ("inline", "again", {TimePart.RETRY_WAITS, TimePart.WORK}),
    ("shards", "w", {TimePart.FAILED_WORK, TimePart.RETRY_WAITS, TimePart.WORK, TimePart.QUEUE}),
]


async def read_recorded(*names: str) -> tuple[TimeReport, list[str]]:
    """Return the report of a task from its recorded runs, oldest first."""
    texts = {name: (HISTORIES / f"{name}.json").read_text(encoding="utf-8") for name in names}
    runs = [WorkflowHistory.from_json(name, text).events for name, text in texts.items()]
    first = runs[0][0].workflow_execution_started_event_attributes.input.payloads
    [given] = await converter.decode(first)
    observed = HistoryWaits(node["node_id"] for node in given["graph"]["nodes"])
    found: dict[tuple[str, int], AttemptView] = {}
    for run in reversed(runs):
        await observed.observe(run, converter)
        found |= await read_events(run, converter)
    started, ended = (seconds_of(event.event_time) for event in (runs[0][0], runs[-1][-1]))
    nodes = [{**node, "status": "finished"} for node in given["graph"]["nodes"]]
    document = make_document(started_at=started, finished_at=ended)
    document["graph"] = {**given["graph"], "nodes": nodes}
    attempts = merge(found.values(), [], {})
    timeline, missing = make_timeline(document, attempts, observed, ended, complete=True)
    report = explain_timeline(timeline)
    check_parts(timeline, report)
    return report, missing


def make_document(
    *nodes: dict[str, Any], started_at: float, finished_at: float | None = None
) -> dict[str, Any]:
    """Return a task document."""
    return {
        "id": "t",
        "status": "running" if finished_at is None else "finished",
        "graph": {"nodes": [*nodes]},
        "started_at": iso(started_at),
        "finished_at": None if finished_at is None else moment(finished_at),
    }


@pytest.mark.parametrize(("name", "node_id", "expected"), PARTS)
async def test_history_has_the_parts_of_a_node(name: str, node_id: str, expected: set[TimePart]) -> None:
    runs = sorted(path.stem for path in HISTORIES.glob(f"{name}-[0-9].json")) or [name]
    report, missing = await read_recorded(*runs)
    spent = {part for leg in report.path if leg.node_id == node_id for part in leg.parts()}
    assert spent - {TimePart.OTHER} == expected
    assert all("attempt 1 of a is unknown, because they were lost" in each for each in missing)


def explain_logged(*nodes: dict[str, Any], logged: Sequence[LoggedAttempt]) -> tuple[TimeReport, list[str]]:
    """Return the report of a task that began at 0 and ended at 100 of which only MongoDB has something."""
    document = make_document(*nodes, started_at=0.0, finished_at=100.0)
    attempts = merge([], logged, document)
    timeline, missing = make_timeline(document, attempts, HistoryWaits([]), 100.0, complete=False)
    report = explain_timeline(timeline)
    check_parts(timeline, report)
    return report, missing


def ended_node(epoch: int, since: float, until: float) -> dict[str, Any]:
    """Return the entry of a finished node in a task document, with its latest attempt."""
    times = {
        "started_at": datetime.fromtimestamp(since, UTC),
        "finished_at": datetime.fromtimestamp(until, UTC),
    }
    return {"node_id": "a", "type": "r", "status": "finished", "attempt_epoch": epoch, **times}


def test_logs_have_earlier_attempts_and_what_is_missing_is_said() -> None:
    failed = [
        LoggedAttempt(node_id="a", epoch=1, started_at=5.0),
        LoggedAttempt(node_id="a", epoch=1, ended_at=15.0, finished=False, kind=FailureKind.FAILURE),
    ]
    report, missing = explain_logged(ended_node(2, 45, 95), logged=failed)
    parts = {part: seconds for part, seconds in report.parts.items() if seconds}
    assert parts == {
        TimePart.WORK: 50,
        TimePart.FAILED_WORK: 10,
        TimePart.RETRY_WAITS: 30,
        TimePart.OTHER: 10,
    }
    assert len(missing) == 1
    assert "no longer has the whole history" in missing[0]


def test_end_of_a_killed_attempt_is_not_guessed() -> None:
    killed = [LoggedAttempt(node_id="a", epoch=1, started_at=5.0)]
    report, missing = explain_logged(ended_node(2, 45, 95), logged=killed)
    assert (report.parts[TimePart.OTHER], report.parts[TimePart.WORK]) == (50, 50)
    assert any(each.startswith("when attempt 1 of a ended is unknown") for each in missing)


@pytest.mark.parametrize(("accepted_at", "queue"), [(8.0, 7.0), (None, 99.0)])
def test_external_attempt_queues_until_a_worker_accepts_it(accepted_at: float | None, queue: float) -> None:
    bridged = AttemptView(
        node_id="a",
        attempt=1,
        worker="flowkit-bridge-1",
        scheduled_at=1.0,
        started_at=2.0,
        outcome=AttemptOutcome.RUNNING,
    )
    accepted = LoggedAttempt(node_id="a", epoch=1, worker="x-1", started_at=accepted_at)
    document = make_document({"node_id": "a", "type": "r", "status": "running"}, started_at=0.0)
    attempts = merge([bridged], [accepted] if accepted_at else [], {})
    timeline, _ = make_timeline(document, attempts, HistoryWaits([]), 100.0, complete=True)
    assert explain_timeline(timeline).parts[TimePart.QUEUE] == queue


def test_waits_that_something_else_has_stopped_are_said_to_be_unknown() -> None:
    ask = {"node_id": "ask", "type": "approval", "status": "skipped"}
    load = {"node_id": "load", "type": "r", "status": "skipped", "prerequisites": ["data"]}
    untouched = make_document(ask, load, started_at=0.0, finished_at=9.0)
    reset = make_document({**ask, "generation": 1}, load, started_at=0.0, finished_at=9.0)
    unknown = "that an action or the end of the task has stopped are unknown; they may count as database and Temporal"
    for document, expected in (
        (untouched, []),
        (reset, [f"waits of ask {unknown}"]),
        ({**untouched, "status": "cancelled"}, [f"waits of ask and load {unknown}"]),
    ):
        _, missing = make_timeline(document, [], HistoryWaits([]), 9.0, complete=True)
        assert missing == expected


def test_pauses_prerequisites_and_full_windows_hold_nodes() -> None:
    nodes: list[dict[str, Any]] = [
        {"node_id": "a", "type": "r", "status": "queued", "prerequisites": ["data"]},
        {"node_id": "b", "type": "s", "status": "running"},
        {"node_id": "c", "type": "s", "status": "queued"},
    ]
    applied = [
        ("pause", 10.0, ["node:a", "role:gone"]),
        ("satisfy", 30.0, ["data"]),
        ("resume", 60.0, ["node:a"]),
    ]
    actions = [
        {"revision": at, "action": name, "at": moment(when), "names": names}
        for at, (name, when, names) in enumerate(applied, 1)
    ]
    document = {**make_document(*nodes, started_at=0.0), "coordinator": {"actions": actions}}
    observed = HistoryWaits(["a", "b", "c"])
    observed.settings = Settings(window=1, max_in_flight=1)
    running = [
        AttemptView(node_id="b", attempt=1, scheduled_at=5.0, started_at=5.0, outcome=AttemptOutcome.RUNNING)
    ]
    timeline, _ = make_timeline(document, running, observed, 100.0, complete=True)
    held, _, full = timeline.nodes
    assert full.limits == (WaitSpan(part=TimePart.SLOTS, since=5.0),)
    assert [(wait.part, wait.since, wait.until) for wait in held.waits] == [
        (TimePart.PEOPLE, 10.0, 60.0),
        (TimePart.SCHEDULED, 0.0, 30.0),
    ]


def test_task_that_no_engine_has_opened_says_so() -> None:
    timeline, missing = make_timeline({}, [], HistoryWaits([]), 100.0, complete=True)
    assert timeline.nodes == ()
    assert missing == ["the task has no document: no engine has opened it yet, or it was deleted"]


@pytest.mark.parametrize("node_id", ["a", "a: b", "x" * 100, "held for a decision"])
def test_summaries_of_timers_say_what_a_node_waits_for(node_id: str) -> None:
    names = {timer_name(each): each for each in (node_id, "other")}
    for text, kind in (
        ("held for a decision, at most 5 s", TimerKind.HOLD),
        ("delay of 5 s", TimerKind.DELAY),
        ("retry 1 of 2 in 5 s, after flaky: broken", TimerKind.RETRY),
    ):
        assert read_timer(f"{timer_name(node_id)}: {text}", names) == (node_id, kind)
    assert read_timer("deadline of the task in 5 s", names) is None
    assert read_timer("unknown: retry 1 of 2 in 5 s, after flaky", names) is None


def test_paragraph_names_decisions_first_and_counts_the_rest() -> None:
    rows = [NodeRow(node_id=f"n{number}", role="r", status="running", worker="w-1") for number in range(4)]
    asks = NodeRow(node_id="z", role="r", status="deferred").waiting_for(for_decision("approve or reject"))
    view = TaskView(
        task_id="t",
        status=TaskStatus.RUNNING,
        source="workflow",
        nodes=(*rows, asks),
        paused=("role:r paused",),
    )
    assert describe_waits(view, ["no engine polls queue q; start one with `flowkit engine`"]) == (
        "A pause holds nodes back: role:r paused. Node z is deferred: waits for a decision: approve or reject. "
        "Node n0 is running: worker w-1. "
        "Node n1 is running: worker w-1. 2 more nodes run or wait. "
        "No engine polls queue q; start one with `flowkit engine`."
    )
    fewer = replace(view, nodes=(*rows,), paused=("task paused by ann: audit",))
    assert describe_waits(fewer, []).startswith(
        "A pause holds nodes back: task paused by ann: audit. Node n0"
    )
    assert describe_waits(fewer, []).endswith(" 1 more node runs or waits.")


def shown(
    report: TimeReport, *, width: int, waits_for: str = "", total_seconds: float | None = None
) -> list[str]:
    """Return the lines that `flowkit explain` prints."""
    explained = TaskExplanation(
        task_id="import-7",
        status=TaskStatus.RUNNING if waits_for else TaskStatus.FINISHED,
        is_open=bool(waits_for),
        report=report,
        read_at=1_000.0,
        seconds=report.seconds,
        total_seconds=total_seconds or report.seconds,
        waits_for=waits_for,
        missing=(),
    )
    console = Console(width=width, color_system=None, markup=False, highlight=False)
    with console.capture() as captured:
        for part in draw(explained, wide=width < 200):
            console.print(part, soft_wrap=False)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_output_fits_eighty_columns_and_leaves_out_the_shortest_legs() -> None:
    nodes = [
        ran(f"node-with-a-long-name-{at}", worked(10 * at, 10 * at + 9), parents=(at - 1,) if at else ())
        for at in range(40)
    ]
    report = explain_nodes(*nodes, end=400)
    lines = shown(report, width=80, waits_for="Node a is running: " + "worker w-1, " * 20)
    assert lines[0] == "task import-7: running, for 6 min 40 s"
    assert max(map(len, lines)) <= 80
    assert any(line.startswith(f"… {41 - MOST_LEGS} more") for line in lines)
    plain = shown(report, width=1_000)
    assert [line.split() for line in plain if line.startswith("work ")] == [["work", "6", "min", "90", "%"]]
    assert to_json(
        TaskExplanation(
            task_id="t",
            status=TaskStatus.FINISHED,
            is_open=False,
            report=report,
            read_at=1_000.0,
            seconds=400,
            total_seconds=400,
            waits_for="",
            missing=(),
        )
    )["path"][0] == {
        "node_id": "node-with-a-long-name-0",
        "since": 0.0,
        "until": 9.0,
        "parts": {"work": 9.0},
    }


def test_after_a_rerun_the_time_since_the_creation_is_named_beside_that_of_the_latest_run() -> None:
    report = explain_nodes(ran("a", worked(0, 9)), end=10)
    assert shown(report, width=80, total_seconds=70)[0] == (
        "task import-7: finished, latest run took 10 s; 70 s since it was created"
    )
