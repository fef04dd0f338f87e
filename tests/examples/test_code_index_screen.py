"""What a person sees of the demo, on 80 columns and without a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from code_index.laps import Laps
from code_index.outcome import Counts, Outcome
from code_index.packages import Package
from code_index.progress import NodeProgress, Progress, progress_of
from code_index.report import ranking_table, summary
from code_index.screen import Lines, progress_line, progress_table


def node_view(**fields: object) -> dict[str, object]:
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
def test_a_note_says_what_a_node_waits_for_or_suffered(fields: dict[str, object], note: str) -> None:
    view = {"status": "running", "nodes": [node_view(**fields)]}
    (node,) = progress_of("t", view, {"enrich": 7}, now=100.0).nodes
    assert (node.note, node.batches) == (note, 7)


def printed(thing: object, width: int = 80) -> list[str]:
    """The lines that a console of this width shows."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(thing)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_waiting_node_is_told_in_full_on_80_columns() -> None:
    note = "retry in 1.0 s: flaky_disk: batch 15"
    node = NodeProgress(
        node="analyze", role="analyzer", status="cancelling", attempt=3, batches=1234, note=note
    )
    lines = printed(progress_table(Progress(task_id="t", status="running", nodes=(node,)), seconds=2.5))
    assert max(map(len, lines)) <= 80
    assert lines[-1].split(maxsplit=5) == ["analyze", "analyzer", "cancelling", "3", "1,234", note]


def test_without_a_terminal_only_changes_are_printed() -> None:
    console = Console(width=80, file=io.StringIO())
    lines = Lines(console)
    for status in ("queued", "running", "running", "finished", "finished"):
        node = NodeProgress(node="index", role="indexer", status=status, attempt=int(status != "queued"))
        lines.show(Progress(task_id="t", status="running", nodes=(node,)))
    assert isinstance(console.file, io.StringIO)
    assert [line.split()[3] for line in console.file.getvalue().splitlines()] == ["running,", "finished,"]


def test_a_line_names_the_batches_and_the_note() -> None:
    node = NodeProgress(node="enrich", role="enricher", status="deferred", attempt=1, batches=1, note="[x] y")
    assert progress_line(node, 12.34) == " 12.3 s  enrich   deferred, attempt 1, 1 batch ([x] y)"


def test_the_line_of_a_node_that_never_ran_says_why_and_nothing_else() -> None:
    node = NodeProgress(node="group", role="grouper", status="skipped", note="upstream_failed")
    assert progress_line(node, 0.2) == "  0.2 s  group    skipped (upstream_failed)"


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
    attempts={"index": [3], "enrich": [0, 1, 2]},
    counts=Counts(tasks=1, batches=6, markers=2, metrics=8, failed_metrics=0),
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
    assert "tasks 1, artifacts 8 (6 batches + 2 nodes), metrics_raw 8" in text


def test_laps_add_up() -> None:
    laps = Laps()
    assert laps.lap("servers") >= 0
    laps.lap("task")
    assert str(laps).startswith("servers 0.0 + task 0.0 = 0.0 s")
