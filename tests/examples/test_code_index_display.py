"""The demo's output on 80 columns, and without a terminal."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from tests.examples.runs import INCIDENT, KILLED, SUCCESSOR, claim, shard_attempt

from code_index.chaos import find_target, takeover_line
from code_index.display import LineDisplay, notes, progress_line, progress_table
from code_index.packages import Package
from code_index.progress import NodeProgress, Progress, StoredProgress, stored_progress, task_progress
from code_index.rates import Rate
from code_index.report import ranking_table, summary
from code_index.result import DocumentCounts, IndexResult
from code_index.stopwatch import Stopwatch


def node_view(**fields: Any) -> dict[str, Any]:
    """Return a node as in the response to the `status` query."""
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
def test_note_shows_the_error_or_the_wait_of_a_node(fields: dict[str, Any], note: str) -> None:
    view = {"status": "running", "nodes": [node_view(**fields)]}
    stored = {"enrich": StoredProgress(batches=7, files=280, epoch=1, worker="worker-2")}
    (node,) = task_progress("t", view, stored, 45, now=100.0).nodes
    assert (node.note, node.batches, node.files, node.total) == (note, 7, 280, 45)
    assert node.worker == "worker-2"


def test_attempt_has_no_worker_until_a_worker_took_the_epoch() -> None:
    view = {"status": "running", "nodes": [node_view(attempt_epoch=2)]}
    task = {
        "graph": {"nodes": [{"node_id": "enrich", "attempt_epoch": 1, "lease": {"worker_id": "worker-2"}}]}
    }
    (before,) = task_progress("t", view, stored_progress(task, {"enrich": {1: (7, 280)}}), 45, now=0).nodes
    assert (before.worker, before.batches, before.files) == ("", 7, 280)
    task["graph"]["nodes"][0] |= {"attempt_epoch": 2, "lease": {"worker_id": "worker-3"}}
    (after,) = task_progress("t", view, stored_progress(task, {}), 45, now=0).nodes
    assert after.worker == "worker-3"


def test_task_without_a_document_has_no_progress() -> None:
    (node,) = task_progress(
        "t", {"status": "queued", "nodes": [node_view()]}, stored_progress(None, {}), None, now=0
    ).nodes
    assert (node.batches, node.worker, node.percent) == (0, "", None)


def printed(thing: object, width: int = 80) -> list[str]:
    """Return the lines that a console of this width prints."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(thing)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def running(**fields: Any) -> NodeProgress:
    """Return a running node."""
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


def test_running_node_is_shown_in_full_on_80_columns() -> None:
    node = running()
    after = NodeProgress(node="group", total=4500)
    lines = printed(progress_table(Progress(task_id="t", status="running", nodes=(node, after)), seconds=2.5))
    assert max(map(len, lines)) <= 80
    assert lines[0].strip() == "task running, 2.5 s; about 23 min left for analyze, then group"
    expected = ["analyze", "running", "worker-12", "3", "1,234/4,500", "27", "2.3", "1,234", "23", "min"]
    assert lines[3].split() == expected
    assert lines[4].split() == ["group", "queued"]


def test_notes_are_below_the_table() -> None:
    node = running(status="deferred", note="retry in 1.0 s: flaky_disk: batch 15")
    progress = Progress(task_id="t", status="deferred", nodes=(node,))
    assert [note.plain for note in notes(progress)] == ["analyze: retry in 1.0 s: flaky_disk: batch 15"]


def test_without_a_terminal_only_changes_are_printed() -> None:
    console = Console(width=80, file=io.StringIO())
    lines = LineDisplay(console)
    for status in ("queued", "running", "running", "finished", "finished"):
        node = NodeProgress(node="index", status=status, attempt=int(status != "queued"))
        lines.show(Progress(task_id="t", status="running", nodes=(node,)))
    assert isinstance(console.file, io.StringIO)
    assert [line.split()[3] for line in console.file.getvalue().splitlines()] == ["running,", "finished,"]


def test_line_shows_batches_percent_rate_time_left_and_note() -> None:
    line = progress_line(running(node="enrich", attempt=1, note="after [x] y"))
    expected = "1,234/4,500 batches = 27 %; 2.3 batches/s, 1,234 files/s; about 23 min left (after [x] y)"
    assert line == f"enrich   running, attempt 1, {expected}"


def test_line_omits_unknown_values() -> None:
    node = NodeProgress(node="index", status="running", attempt=1, batches=1)
    assert progress_line(node) == "index    running, attempt 1, 1 batch"


def test_line_of_a_node_that_never_ran_shows_only_the_reason() -> None:
    node = NodeProgress(node="group", status="skipped", note="upstream_failed")
    assert progress_line(node) == "group    skipped (upstream_failed)"


def enrich(**fields: Any) -> Progress:
    """Return a task that runs its second node."""
    node = running(node="enrich", attempt=1, batches=22, total=45)
    return Progress(
        task_id="t",
        status="running",
        nodes=(
            NodeProgress(node="index", status="finished", attempt=1, worker="worker-1"),
            replace(node, **fields),
        ),
    )


AGAIN = shard_attempt(1, 5, 7.0, 9.0, "worker-2")
BESIDE = shard_attempt(2, 2, 0.7, None, "worker-2", "running")


@pytest.mark.parametrize(
    "fields",
    [{"batches": 21}, {"shards": ()}, {"status": "finished"}, {"total": None}, {"node": "group"}],
)
def test_no_worker_is_killed_before_half_is_done_or_without_a_running_shard(fields: dict[str, Any]) -> None:
    assert find_target(enrich(**({"shards": (BESIDE,)} | fields))) is None


def test_first_shard_that_runs_is_killed_when_half_is_done() -> None:
    found = find_target(enrich(shards=(replace(KILLED, status="failed"), BESIDE)))
    assert found is not None
    assert found.running_shards == (BESIDE,)


def test_line_names_the_worker_that_takes_a_batch_over() -> None:
    line = takeover_line(INCIDENT, claim("files-0003", 4, "worker-2", fence=2))
    assert line == "chaos    worker-2 takes over batch files-0003, 5.5 s after the kill: attempt 4"


def test_shards_of_a_node_are_shown_with_their_workers() -> None:
    progress = enrich(by_epoch={1: 10, 5: 12}, shards=(replace(KILLED, status="running"), BESIDE, AGAIN))
    assert progress_line(progress.nodes[1]).startswith("enrich   running, 2 shards on 2 workers, 22/45")
    lines = printed(progress_table(progress, seconds=2.5))
    assert max(map(len, lines)) <= 80
    assert [line.split()[:5] for line in lines[4:7]] == [
        ["enrich", "running", "2", "workers", "22/45"],
        ["shard", "1", "worker-1", "1", "10"],
        ["shard", "2", "worker-2", "2", "0"],
    ]
    ended = replace(progress.nodes[1], status="finished", rate=None, batches=45)
    assert progress_line(ended) == "enrich   finished, 45/45 batches = 100 %"


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
RESULT = IndexResult(
    files_found=7,
    total=SHOP,
    packages=3,
    ranking=[SHOP],
    indexed_batches=3,
    attempts={"index": {1: 3}, "enrich": {1: 0, 2: 1, 4: 2}},
    workers={"index": Counter({"worker-1": 3}), "enrich": Counter({"worker-1": 1, "worker-2": 2})},
    shards=[replace(KILLED, status="failed"), BESIDE, SUCCESSOR],
    taken_over=[claim("files-0003", 4, "worker-2", fence=2)],
    counts=DocumentCounts(tasks=1, batches=6, markers=2, metrics=8),
)


def test_ranking_fits_80_columns_and_shows_all_numbers_on_fewer() -> None:
    for width in (80, 60):
        lines = printed(ranking_table(RESULT), width)
        assert max(map(len, lines)) <= width
        assert lines[2].split() == ["shop", "7", "25", "3", "10", "8", "scan"]
        assert lines[-1].split() == ["shop", "7", "25", "3", "10", "8", "scan"]


def test_summary_shows_what_was_found_retried_and_stored() -> None:
    text = "\n".join(summary(RESULT))
    assert "7 found = 7 analyzed; 2 do not parse" in text
    assert "workers  enrich: 3 batches in 3 attempts, 1 by worker-1, 2 by worker-2" in text
    assert "retries  1 attempt failed; stored batches were not processed again" in text
    assert "index:" not in text
    assert "3 batches, each stored once by each of 2 nodes" in text
    assert "7 files, each found once and analyzed once: none lost, none duplicated" in text
    assert "tasks 1, artifacts 8 (6 batches + 2 nodes), metrics_raw 8" in text
    assert "killed" not in text


def test_summary_shows_the_kill_and_the_takeover() -> None:
    text = "\n".join(summary(RESULT, INCIDENT))
    assert "killed   worker-1, which ran shard 1 of enrich in attempt 1 and had stored 0 batches" in text
    assert (
        "resumed  worker-2 took over what was claimed and not stored, 5.5 s after the kill: files-0003"
        in text
    )


def test_summary_says_when_nothing_was_left_to_take_over() -> None:
    text = "\n".join(summary(replace(RESULT, taken_over=[]), INCIDENT))
    assert "resumed  worker-1 had stored all that it had claimed, so nothing was taken over" in text


def test_stopwatch_adds_up_its_laps() -> None:
    stopwatch = Stopwatch()
    assert stopwatch.lap("servers") >= 0
    stopwatch.lap("task")
    assert str(stopwatch).startswith("servers 0.0 + task 0.0 = 0.0 s")
