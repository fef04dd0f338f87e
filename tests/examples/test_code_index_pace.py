"""Rates, the time that is left, and when a line is worth a reader's time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from code_index.pace import (
    SETTLED_SECONDS,
    Pace,
    Rate,
    Sample,
    percent,
    rate_between,
    recent_rate,
    seconds_left,
    told_seconds,
)
from code_index.progress import NodeProgress
from code_index.screen import Shown, worth_a_line


def sample(at: float, batches: int, files: int | None = None) -> Sample:
    """What a node had done then, ten files to a batch."""
    return Sample(at=at, batches=batches, files=10 * batches if files is None else files)


def test_a_rate_is_what_was_done_by_the_time_it_took() -> None:
    assert rate_between(sample(10, 4), sample(12, 9, 73)) == Rate(batches=2.5, files=16.5)


@pytest.mark.parametrize("last", [sample(12, 4), sample(10, 5), sample(9, 5), sample(12, 3)])
def test_there_is_no_rate_without_progress_or_time(last: Sample) -> None:
    assert rate_between(sample(10, 4), last) is None


def test_the_recent_rate_forgets_what_is_older_than_the_window() -> None:
    samples = [sample(0, 0), sample(10, 100), sample(15, 101), sample(20, 102)]
    assert recent_rate(samples, window=10) == Rate(batches=0.2, files=2)
    assert recent_rate(samples, window=100) == Rate(batches=5.1, files=51)


def test_a_node_that_has_stood_still_through_the_window_has_no_rate() -> None:
    assert recent_rate([sample(0, 0), sample(1, 5), sample(20, 5), sample(25, 5)], window=10) is None


def test_the_first_moments_tell_no_rate() -> None:
    assert recent_rate([]) is None
    assert recent_rate([sample(0, 0), sample(0.9 * SETTLED_SECONDS, 7)]) is None
    assert recent_rate([sample(0, 0), sample(SETTLED_SECONDS, 7)]) == Rate(batches=7, files=70)


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
def test_the_time_left_is_what_is_not_done_at_this_rate(
    done: int, total: int | None, rate: Rate | None, left: float | None
) -> None:
    assert seconds_left(done, total, rate) == left


@pytest.mark.parametrize(
    ("done", "total", "share"),
    [(0, 45, 0), (44, 45, 97), (45, 45, 100), (999, 1000, 99), (3, None, None), (0, 0, None)],
)
def test_a_hundred_percent_is_all_of_it(done: int, total: int | None, share: int | None) -> None:
    assert percent(done, total) == share


@pytest.mark.parametrize(
    ("seconds", "told"),
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
def test_times_are_told_as_people_say_them(seconds: float, told: str) -> None:
    assert told_seconds(seconds) == told


def test_a_pace_counts_from_the_last_look_before_the_node_began_to_its_end_and_no_further() -> None:
    pace = Pace()
    assert pace.seen(sample(0, 0), begun=False, ended=False) is None
    assert pace.seen(sample(8, 0), begun=False, ended=False) is None
    assert pace.seen(sample(8.5, 2), begun=True, ended=False) is None
    assert pace.seen(sample(10, 4), begun=True, ended=False) == Rate(batches=2, files=20)
    whole = Rate(batches=5, files=50)
    assert pace.seen(sample(12, 20), begun=True, ended=True) == whole
    assert pace.seen(sample(99, 20), begun=True, ended=True) == whole


def test_only_a_running_node_has_time_left() -> None:
    node = NodeProgress(
        node="enrich", status="running", attempt=1, batches=5, total=10, rate=Rate(batches=1, files=9)
    )
    assert node.seconds_left == 5
    for status in ("queued", "deferred", "finished", "failed"):
        assert replace(node, status=status).seconds_left is None


RUNNING = NodeProgress(node="enrich", status="running", attempt=1, batches=10, total=100)


@pytest.mark.parametrize(
    ("node", "after", "worth"),
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
def test_a_line_is_printed_for_a_change_for_a_tenth_more_and_for_a_long_silence(
    node: NodeProgress, after: float, worth: bool
) -> None:
    assert worth_a_line(Shown(RUNNING, 100.0), node, 100.0 + after) is worth


def test_a_node_that_has_ended_is_not_told_again() -> None:
    done = replace(RUNNING, status="finished", batches=100)
    assert not worth_a_line(Shown(done, 0.0), done, 1000.0)
