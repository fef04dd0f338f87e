"""When a waiting puller scans its sources again."""

from __future__ import annotations

import pytest

from flowkit.activities.batches.puller import ScanSchedule


def pauses(schedule: ScanSchedule, *found: bool, took: float = 0.0) -> list[float]:
    """Return the seconds from the begin of each scan until the next one is due."""
    due = []
    for each in found:
        schedule.note_scan(100.0, took, found=each)
        due.append(round(schedule.get_seconds_left(100.0), 3))
    return due


def test_scans_that_find_batches_follow_each_other_after_poll_ms() -> None:
    assert pauses(ScanSchedule(0.3, 4.0), True, True, True) == [0.3, 0.3, 0.3]


def test_pause_doubles_from_the_second_empty_scan_up_to_its_maximum() -> None:
    empty = [False] * 6
    assert pauses(ScanSchedule(0.3, 4.0), *empty) == [0.3, 0.6, 1.2, 2.4, 4.0, 4.0]


def test_batches_reset_the_pause() -> None:
    assert pauses(ScanSchedule(0.3, 4.0), False, False, False, True, False) == [0.3, 0.6, 1.2, 0.3, 0.3]


def test_maximum_below_poll_ms_leaves_poll_ms() -> None:
    assert pauses(ScanSchedule(2.0, 0.1), True, False, False) == [2.0, 2.0, 2.0]


def test_short_pauses_have_a_minimum_which_is_longer_while_nothing_arrives() -> None:
    assert pauses(ScanSchedule(0.001, 0.002), True, False, False, False) == [0.05, 0.05, 0.5, 0.5]


def test_thousands_of_empty_scans_keep_the_maximum() -> None:
    assert pauses(ScanSchedule(0.3, 4.0), *([False] * 5_000))[-1] == 4.0


def test_time_spent_on_deliveries_counts_toward_the_pause() -> None:
    schedule = ScanSchedule(0.3, 4.0)
    schedule.note_scan(100.0, 0.01, found=True)
    assert schedule.get_seconds_left(105.0) < 0


@pytest.mark.parametrize("hastened", [False, True])
def test_long_scan_is_followed_by_a_pause_four_times_as_long(hastened: bool) -> None:
    schedule = ScanSchedule(0.3, 4.0)
    schedule.note_scan(100.0, 2.0, found=True)
    if hastened:
        schedule.hasten()
    assert schedule.get_seconds_left(102.0) == pytest.approx(8.0)


def test_hastened_scan_is_due_as_soon_as_its_load_allows() -> None:
    schedule = ScanSchedule(0.3, 4.0)
    schedule.note_scan(100.0, 0.005, found=False)
    schedule.hasten()
    assert schedule.get_seconds_left(100.005) == pytest.approx(0.05)
    schedule.note_scan(100.0, 0.0, found=True)
    assert schedule.get_seconds_left(100.0) == pytest.approx(0.3), "it hastens one scan only"
