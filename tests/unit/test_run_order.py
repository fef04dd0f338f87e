"""The order in which the processes of a test run take the tests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from tests.run_order import arranged


@dataclass(frozen=True)
class Collected:
    """A test with at most one mark."""

    nodeid: str
    mark: str = ""
    sec: float | None = None

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        """Return the mark, if the test has it."""
        args = () if self.sec is None else (self.sec,)
        return pytest.Mark(name, args, {}, _ispytest=True) if name == self.mark else None


def file(name: str, count: int, mark: str = "", sec: float | None = None) -> list[Collected]:
    """Return the tests of a file."""
    return [Collected(f"{name}.py::test_{number}", mark, sec) for number in range(count)]


TESTS = [
    *file("cli", 30),
    *file("contract", 20, "server"),
    *file("fuzz", 2, "slow", 60),
    *file("outage", 3, "slow"),
    *file("pages", 5, "server"),
    *file("adoption", 4, "slow"),
    *file("unit", 40),
]


def parts(tests: list[Collected], processes: int) -> list[list[Collected]]:
    """Return the tests that pytest-xdist gives to each process at the start."""
    pending, found = list(tests), []
    for number in range(processes):
        size = len(pending) // (processes - number)
        found.append(pending[:size])
        del pending[:size]
    return found


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 7, 200])
def test_every_test_is_kept_once(processes: int) -> None:
    assert sorted(each.nodeid for each in arranged(TESTS, processes)) == sorted(each.nodeid for each in TESTS)


def test_each_process_begins_with_its_share_of_the_long_tests() -> None:
    found = parts(arranged(TESTS, 3), 3)
    assert [(part[0].mark, part[0].sec) for part in found] == [("slow", 60), ("slow", None), ("slow", None)]


def test_some_processes_wait_for_servers_while_others_compute() -> None:
    tests = [*file("a", 10, "server"), *file("b", 10, "server"), *file("c", 20)]
    first, second = parts(arranged(tests, 2), 2)
    assert [each.mark for each in first] == ["server"] * 10 + [""] * 10
    assert [each.mark for each in second] == [""] * 10 + ["server"] * 10


def test_contract_tests_count_as_those_that_compute() -> None:
    tests = [*file("pages", 4, "server"), *file("tests/contract/vars", 4, "server")]
    first, second = parts(arranged(tests, 2), 2)
    assert [each.nodeid.partition(".")[0] for each in first] == ["pages"] * 4
    assert {each.nodeid.partition(".")[0] for each in second} == {"tests/contract/vars"}


def test_tests_of_a_file_stay_together() -> None:
    names = [
        each.nodeid.partition("::")[0] for each in arranged(file("a", 5, "slow") + file("b", 5, "slow"), 2)
    ]
    assert names == ["a.py"] * 5 + ["b.py"] * 5
