"""What a person sees of the demo, on 80 columns and without a terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from code_index.chaos import Incident, heir, target
from code_index.laps import Laps
from code_index.outcome import Counts, Outcome
from code_index.pace import Rate
from code_index.packages import Package
from code_index.progress import NodeProgress, Progress, Stored, progress_of, stored_of
from code_index.report import ranking_table, summary
from code_index.screen import Lines, notes, progress_line, progress_table


def node_view(**fields: Any) -> dict[str, Any]:
    """A node as the `status` query shows it."""
    view = {"node_id": "enrich", "type": "enricher", "status": "running", "attempt_epoch": 1}
    return {**view, "last_error": None, "skip_reason": None, "next_retry_at": None, **fields}


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({}, ""),
        ({"status": "deferred", "last_error": "flaky", "next_retry_at": 100.8}, "retry in 0.8 s: flaky"),
        ({"status": "deferred", "last_error": "flaky", "next_retry_at": 99.0}, "retry in 0.0 s: flaky"),
        ({"status": "running", "last_error": "flaky"}, "after flaky"),
        ({"status": "failed", "last_error": "bad_input: no"}, "bad_input: no"),
        ({"status": "skipped", "skip_reason": "task_failed"}, "task_failed"),
    ],
)
def test_a_note_says_what_a_node_waits_for_or_suffered(fields: dict[str, Any], note: str) -> None:
    view = {"status": "running", "nodes": [node_view(**fields)]}
    stored = {"enrich": Stored(batches=7, files=280, epoch=1, worker="worker-2")}
    (node,) = progress_of("t", view, stored, 45, now=100.0).nodes
    assert (node.note, node.batches, node.files, node.total) == (note, 7, 280, 45)
    assert node.worker == "worker-2"


def test_nobody_holds_an_attempt_until_its_worker_has_taken_the_epoch() -> None:
    view = {"status": "running", "nodes": [node_view(attempt_epoch=2)]}
    task = {
        "graph": {"nodes": [{"node_id": "enrich", "attempt_epoch": 1, "lease": {"worker_id": "worker-2"}}]}
    }
    (before,) = progress_of("t", view, stored_of(task, {"enrich": (7, 280)}), 45, now=0).nodes
    assert (before.worker, before.batches, before.files) == ("", 7, 280)
    task["graph"]["nodes"][0] |= {"attempt_epoch": 2, "lease": {"worker_id": "worker-3"}}
    (after,) = progress_of("t", view, stored_of(task, {}), 45, now=0).nodes
    assert after.worker == "worker-3"


def test_a_task_whose_document_is_not_there_yet_has_done_nothing() -> None:
    (node,) = progress_of(
        "t", {"status": "queued", "nodes": [node_view()]}, stored_of(None, {}), None, now=0
    ).nodes
    assert (node.batches, node.worker, node.percent) == (0, "", None)


def printed(thing: object, width: int = 80) -> list[str]:
    """The lines that a console of this width shows."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(thing)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def running(**fields: Any) -> NodeProgress:
    """A node in the middle of its work."""
    given: dict[str, Any] = {
        "node": "analyze",
        "status": "running",
        "attempt": 3,
        "worker": "worker-12",
        "batches": 1234,
        "total": 4500,
        "rate": Rate(batches=2.345, files=1234.5),
    }
    return NodeProgress(**(given | fields))


def test_a_running_node_is_told_in_full_on_80_columns() -> None:
    node = running()
    after = NodeProgress(node="group", total=4500)
    lines = printed(progress_table(Progress(task_id="t", status="running", nodes=(node, after)), seconds=2.5))
    assert max(map(len, lines)) <= 80
    assert lines[0].strip() == "task running, 2.5 s; about 23 min left for analyze, then group"
    told = ["analyze", "running", "worker-12", "3", "1,234/4,500", "27", "2.3", "1,234", "23", "min"]
    assert lines[3].split() == told
    assert lines[4].split() == ["group", "queued"]


def test_what_a_node_waits_for_stands_below_the_table() -> None:
    node = running(status="deferred", note="retry in 1.0 s: flaky_disk: batch 15")
    progress = Progress(task_id="t", status="deferred", nodes=(node,))
    assert [note.plain for note in notes(progress)] == ["analyze: retry in 1.0 s: flaky_disk: batch 15"]


def test_without_a_terminal_only_changes_are_printed() -> None:
    console = Console(width=80, file=io.StringIO())
    lines = Lines(console)
    for status in ("queued", "running", "running", "finished", "finished"):
        node = NodeProgress(node="index", status=status, attempt=int(status != "queued"))
        lines.show(Progress(task_id="t", status="running", nodes=(node,)))
    assert isinstance(console.file, io.StringIO)
    assert [line.split()[3] for line in console.file.getvalue().splitlines()] == ["running,", "finished,"]


def test_a_line_names_batches_share_rate_time_left_and_the_note() -> None:
    line = progress_line(running(node="enrich", attempt=1, note="after [x] y"))
    told = "1,234/4,500 batches = 27 %; 2.3 batches/s, 1,234 files/s; about 23 min left (after [x] y)"
    assert line == f"enrich   running, attempt 1, {told}"


def test_a_line_says_nothing_of_what_nobody_knows() -> None:
    node = NodeProgress(node="index", status="running", attempt=1, batches=1)
    assert progress_line(node) == "index    running, attempt 1, 1 batch"


def test_the_line_of_a_node_that_never_ran_says_why_and_nothing_else() -> None:
    node = NodeProgress(node="group", status="skipped", note="upstream_failed")
    assert progress_line(node) == "group    skipped (upstream_failed)"


def enrich(**fields: Any) -> Progress:
    """A task that is at its second node."""
    node = running(node="enrich", attempt=1, batches=22, total=45)
    return Progress(
        task_id="t",
        status="running",
        nodes=(
            NodeProgress(node="index", status="finished", attempt=1, worker="worker-1"),
            replace(node, **fields),
        ),
    )


@pytest.mark.parametrize(
    "fields", [{"batches": 21}, {"worker": ""}, {"status": "deferred"}, {"total": None}, {"node": "group"}]
)
def test_nobody_is_killed_before_half_is_done_or_when_nobody_holds_the_node(
    fields: dict[str, Any],
) -> None:
    assert target(enrich(**fields)) is None


def test_the_worker_that_parses_is_killed_when_half_is_done() -> None:
    found = target(enrich())
    assert found is not None
    assert (found.node, found.worker) == ("enrich", "worker-12")


KILLED_AT = datetime(2026, 11, 21, 12, tzinfo=UTC)
INCIDENT = Incident(
    worker="worker-2",
    node="enrich",
    attempt=1,
    batches=1,
    total=3,
    began=KILLED_AT,
    killed_at=KILLED_AT,
    replacement="worker-4",
)


@pytest.mark.parametrize(
    ("fields", "heirs"),
    [({}, []), ({"attempt": 2, "worker": ""}, []), ({"attempt": 2, "worker": "worker-3"}, ["worker-3"])],
)
def test_the_heir_is_who_holds_a_later_attempt(fields: dict[str, Any], heirs: list[str]) -> None:
    found = heir(INCIDENT, enrich(**fields))
    assert [node.worker for node in (found,) if node] == heirs


SHOP = Package(
    package="shop",
    files=7,
    problems=2,
    lines=25,
    functions=3,
    complexity=10,
    longest_function="scan",
    longest_lines=8,
)
OUTCOME = Outcome(
    files_found=7,
    total=SHOP,
    packages=3,
    ranking=[SHOP],
    listed_batches=3,
    attempts={"index": [3], "enrich": [0, 1, 2]},
    counts=Counts(tasks=1, batches=6, markers=2, metrics=8),
)


def test_the_ranking_fits_80_columns_and_keeps_its_numbers_on_fewer() -> None:
    for width in (80, 60):
        lines = printed(ranking_table(OUTCOME), width)
        assert max(map(len, lines)) <= width
        assert lines[2].split() == ["shop", "7", "25", "3", "10", "8", "scan"]
        assert lines[-1].split() == ["shop", "7", "25", "3", "10", "8", "scan"]


def test_the_summary_says_what_was_found_retried_and_stored() -> None:
    text = "\n".join(summary(OUTCOME))
    assert "7 found = 7 analysed; 2 do not parse" in text
    assert "enrich: 3 attempts, which did 0 + 1 + 2 batches" in text
    assert "index:" not in text
    assert "3 batches, each stored once by each of 2 nodes" in text
    assert "7 files, each found once and analysed once: none lost, none double" in text
    assert "tasks 1, artifacts 8 (6 batches + 2 nodes), metrics_raw 8" in text
    assert "killed" not in text


def test_the_summary_tells_of_a_kill_and_who_went_on() -> None:
    then = KILLED_AT + timedelta(seconds=6.5)
    went_on = replace(INCIDENT, attempt=2, heir="worker-3", heir_attempt=3, taken_over_at=then)
    text = "\n".join(summary(OUTCOME, went_on))
    assert "killed   worker-2, which held enrich, attempt 2, and did 1 batch" in text
    assert "heir     worker-3, attempt 3 (epoch 3), after 6.5 s; did 2 batches" in text


def test_laps_add_up() -> None:
    laps = Laps()
    assert laps.lap("servers") >= 0
    laps.lap("task")
    assert str(laps).startswith("servers 0.0 + task 0.0 = 0.0 s")
