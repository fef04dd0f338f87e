"""Rates, remaining time, and when the display prints a line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from code_index.display import LastLine, should_print
from code_index.progress import NodeProgress
from code_index.rates import (
    WARM_UP_SECONDS,
    Rate,
    RateMeter,
    Sample,
    format_seconds,
    percent,
    rate_between,
    recent_rate,
    seconds_left,
)


def sample(at: float, batches: int, files: int | None = None) -> Sample:
    """Return a sample with ten files per batch."""
    return Sample(at=at, batches=batches, files=10 * batches if files is None else files)


def test_rate_is_progress_divided_by_time() -> None:
    assert rate_between(sample(10, 4), sample(12, 9, 73)) == Rate(batches=2.5, files=16.5)


@pytest.mark.parametrize("last", [sample(12, 4), sample(10, 5), sample(9, 5), sample(12, 3)])
def test_no_rate_without_progress_or_time(last: Sample) -> None:
    assert rate_between(sample(10, 4), last) is None


def test_recent_rate_ignores_samples_before_the_window() -> None:
    samples = [sample(0, 0), sample(10, 100), sample(15, 101), sample(20, 102)]
    assert recent_rate(samples, window=10) == Rate(batches=0.2, files=2)
    assert recent_rate(samples, window=100) == Rate(batches=5.1, files=51)


def test_no_recent_rate_without_progress_in_the_window() -> None:
    assert recent_rate([sample(0, 0), sample(1, 5), sample(20, 5), sample(25, 5)], window=10) is None


def test_no_rate_during_the_warm_up() -> None:
    assert recent_rate([]) is None
    assert recent_rate([sample(0, 0), sample(0.9 * WARM_UP_SECONDS, 7)]) is None
    assert recent_rate([sample(0, 0), sample(WARM_UP_SECONDS, 7)]) == Rate(batches=7, files=70)


@pytest.mark.parametrize(
    ("done", "total", "rate", "left"),
    [
        (10, 50, Rate(batches=4, files=1), 10),
        (50, 50, Rate(batches=4, files=1), 0),
        (50, 50, None, 0),
        (10, 50, None, None),
        (10, None, Rate(batches=4, files=1), None),
        (60, 50, Rate(batches=4, files=1), None),
        (0, 0, None, 0),
    ],
)
def test_time_left_is_remaining_batches_divided_by_rate(
    done: int, total: int | None, rate: Rate | None, left: float | None
) -> None:
    assert seconds_left(done, total, rate) == left


@pytest.mark.parametrize(
    ("done", "total", "share"),
    [(0, 45, 0), (44, 45, 97), (45, 45, 100), (999, 1000, 99), (3, None, None), (0, 0, None)],
)
def test_hundred_percent_means_everything_is_done(done: int, total: int | None, share: int | None) -> None:
    assert percent(done, total) == share


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "1 s"),
        (7.4, "7 s"),
        (89.4, "89 s"),
        (90, "2 min"),
        (600, "10 min"),
        (5399, "90 min"),
        (5400, "1.5 h"),
    ],
)
def test_durations_are_formatted_in_a_readable_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_meter_measures_from_the_last_sample_before_the_start_until_the_end() -> None:
    meter = RateMeter()
    assert meter.update(sample(0, 0), started=False, ended=False) is None
    assert meter.update(sample(8, 0), started=False, ended=False) is None
    assert meter.update(sample(8.5, 2), started=True, ended=False) is None
    assert meter.update(sample(10, 4), started=True, ended=False) == Rate(batches=2, files=20)
    whole = Rate(batches=5, files=50)
    assert meter.update(sample(12, 20), started=True, ended=True) == whole
    assert meter.update(sample(99, 20), started=True, ended=True) == whole


def test_only_running_node_has_time_left() -> None:
    node = NodeProgress(
        node="enrich", status="running", attempt=1, batches=5, total=10, rate=Rate(batches=1, files=9)
    )
    assert node.seconds_left == 5
    for status in ("queued", "deferred", "finished", "failed"):
        assert replace(node, status=status).seconds_left is None


RUNNING = NodeProgress(node="enrich", status="running", attempt=1, batches=10, total=100)


@pytest.mark.parametrize(
    ("node", "after", "expected"),
    [
        (replace(RUNNING, batches=19), 29.0, False),
        (replace(RUNNING, batches=20), 2.9, False),
        (replace(RUNNING, batches=20), 3.0, True),
        (RUNNING, 30.0, True),
        (replace(RUNNING, status="deferred"), 0.1, True),
        (replace(RUNNING, attempt=2), 0.1, True),
        (replace(RUNNING, total=None, batches=99), 29.0, False),
    ],
)
def test_line_is_printed_for_a_change_for_progress_and_after_a_long_silence(
    node: NodeProgress, after: float, expected: bool
) -> None:
    assert should_print(LastLine(RUNNING, 100.0), node, 100.0 + after) is expected


def test_ended_node_prints_no_more_lines() -> None:
    done = replace(RUNNING, status="finished", batches=100)
    assert not should_print(LastLine(done, 0.0), done, 1000.0)
