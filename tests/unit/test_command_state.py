"""Whether a command that no worker has accepted is queued or lost, and which partition it goes to."""

from __future__ import annotations

import pytest
from tests.unit.dispatches import dispatch

from flowkit.bridge.commands import SKIPPED_AFTER_SEC, CommandState, choose, command_state, queue_position

LONG_SEC = 1e6


@pytest.mark.parametrize("committed", [0, 4, 5])
def test_command_that_no_worker_has_read_is_queued_for_any_length_of_time(committed: int) -> None:
    """H5, H28."""
    state = command_state(dispatch(), committed, members=3, age_sec=LONG_SEC)
    assert state is CommandState.QUEUED
    assert queue_position(dispatch(), committed) == 5 - committed


def test_command_before_the_committed_offset_was_read() -> None:
    """H2, H3."""
    assert command_state(dispatch(), 6, members=0, age_sec=0.0) is CommandState.READ
    assert queue_position(dispatch(), 6) == 0


@pytest.mark.parametrize(
    ("members", "age_sec", "expected"),
    [
        (0, LONG_SEC, CommandState.QUEUED),
        (1, 0.0, CommandState.QUEUED),
        (1, SKIPPED_AFTER_SEC, CommandState.READ),
    ],
    ids=["no workers", "workers that join", "workers without an offset"],
)
def test_group_without_an_offset_skips_a_command_after_a_while(
    members: int, age_sec: float, expected: CommandState
) -> None:
    """H4."""
    assert command_state(dispatch(), None, members=members, age_sec=age_sec) is expected


def chosen(busy: dict[str, int], outstanding: dict[int, int], last: int = -1) -> int:
    """Return the partition for a command if `a` owns 0 and 1, `b` owns 2, and no known worker owns 3."""
    owners = {0: "a", 1: "a", 2: "b"}
    return choose(range(4), owners=owners, outstanding=outstanding, busy=busy, last=last)


def test_command_goes_to_an_idle_worker_first_then_to_a_free_partition_then_to_the_shortest_queue() -> None:
    """H5."""
    assert chosen({"a": 1}, {}) == 2
    assert chosen({"a": 1, "b": 1}, {}) == 3
    assert chosen({"a": 1, "b": 1}, {1: 1, 3: 1}) == 2
    assert chosen({}, {1: 1, 2: 1}) == 3


def test_idle_workers_take_turns() -> None:
    assert [chosen({}, {}, last) for last in (-1, 0, 1, 2, 3)] == [0, 1, 2, 0, 0]
