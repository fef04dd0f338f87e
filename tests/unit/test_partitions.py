"""The choice of a partition: workers that are free first, then the shortest queue, then turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkit.bridge.commands import choose_partition

PARTITIONS = st.sets(st.integers(0, 11), min_size=1)
OWNERS = st.dictionaries(st.integers(0, 11), st.sampled_from(["w1", "w2", "w3"]))
OUTSTANDING = st.dictionaries(st.integers(0, 11), st.integers(0, 3))
BUSY = st.dictionaries(st.sampled_from(["w1", "w2", "w3"]), st.integers(0, 2))
LAST = st.integers(-1, 12)


def ahead(owner: str, owners: dict[int, str], outstanding: dict[int, int], busy: dict[str, int]) -> int:
    """Return how many commands a worker runs or has before it."""
    queued = sum(outstanding.get(number, 0) for number, name in owners.items() if name == owner)
    return busy.get(owner, 0) + queued


@given(PARTITIONS, OWNERS, OUTSTANDING, BUSY, LAST)
def test_a_free_worker_wins_over_an_unknown_one_and_that_over_a_queue(
    partitions: set[int], owners: dict[int, str], outstanding: dict[int, int], busy: dict[str, int], last: int
) -> None:
    chosen = choose_partition(partitions, owners=owners, outstanding=outstanding, busy=busy, last=last)
    free = {
        number
        for number in partitions
        if number in owners and ahead(owners[number], owners, outstanding, busy) == 0
    }
    unknown = {number for number in partitions if number not in owners and not outstanding.get(number)}
    assert chosen in (free or unknown or partitions)


@given(PARTITIONS, OWNERS, OUTSTANDING, BUSY, LAST)
def test_without_a_free_worker_the_shortest_queue_wins(
    partitions: set[int], owners: dict[int, str], outstanding: dict[int, int], busy: dict[str, int], last: int
) -> None:
    def queue(number: int) -> int:
        owner = owners.get(number)
        own = outstanding.get(number, 0)
        return own if owner is None else ahead(owner, owners, outstanding, busy)

    chosen = choose_partition(partitions, owners=owners, outstanding=outstanding, busy=busy, last=last)
    assert queue(chosen) == min(map(queue, partitions))


@given(PARTITIONS, LAST)
def test_equal_partitions_take_turns(partitions: set[int], last: int) -> None:
    turns = []
    for _ in range(2 * len(partitions)):
        last = choose_partition(partitions, owners={}, outstanding={}, busy={}, last=last)
        turns.append(last)
    assert set(turns[: len(partitions)]) == partitions
    assert turns[: len(partitions)] == turns[len(partitions) :]


@given(PARTITIONS, OWNERS, LAST)
def test_commands_go_to_different_workers_while_some_are_free(
    partitions: set[int], owners: dict[int, str], last: int
) -> None:
    outstanding: dict[int, int] = {}
    workers = {owners[number] for number in partitions if number in owners}
    served = []
    for _ in workers:
        last = choose_partition(partitions, owners=owners, outstanding=outstanding, busy={}, last=last)
        outstanding[last] = outstanding.get(last, 0) + 1
        served.append(owners[last])
    assert sorted(served) == sorted(workers)


def test_a_worker_that_reads_two_partitions_gets_one_command() -> None:
    owners = {0: "w1", 1: "w1", 2: "w2"}
    assert choose_partition(range(3), owners=owners, outstanding={0: 1}, busy={}, last=-1) == 2


def test_a_partition_that_waits_for_a_busy_worker_is_chosen_last() -> None:
    owners = {0: "w1", 1: "w2"}
    assert choose_partition(range(2), owners=owners, outstanding={}, busy={"w1": 1}, last=1) == 1
    assert choose_partition(range(3), owners=owners, outstanding={}, busy={"w1": 1, "w2": 1}, last=2) == 2


def test_without_partitions_nothing_can_be_chosen() -> None:
    with pytest.raises(ValueError, match="at least one partition"):
        choose_partition([], owners={}, outstanding={}, busy={}, last=0)
