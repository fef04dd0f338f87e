"""The order in which the test processes of a run take the tests: long ones first, so that none is left
alone at the end.

`--dist worksteal` gives each process a run of consecutive tests, and moves tests from the end of one to another.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SLOW = 10.0
"""About how many seconds a test with the mark `slow` takes, unless the mark names them: `slow(60)`."""
SERVER = 2.0
"""The same for a test with the mark `server`, but not for those in `SHORT_CALLS`."""
OTHER = 0.05
"""The same for a test without such a mark: most of them take milliseconds of the processor, and wait for nothing."""
SHORT_CALLS = "tests/contract/"
"""The folder whose tests call a server for milliseconds, and need the processor as others without one do."""


class Mark(Protocol):
    """A mark of a test."""

    @property
    def args(self) -> tuple[Any, ...]:
        """Its positional arguments."""
        ...


class Marked(Protocol):
    """A collected test."""

    @property
    def nodeid(self) -> str:
        """The file and the name of the test."""
        ...

    def get_closest_marker(self, name: str) -> Mark | None:
        """Return the mark with this name, if the test has it."""
        ...


Test = TypeVar("Test", bound=Marked)


def arranged(tests: Sequence[Test], processes: int) -> list[Test]:
    """Return the tests in an order whose equal parts suit that many processes.

    Each part begins with its share of the long tests. Half of the processes then run the tests that wait for
    servers, while the others run those that need only the processor. A part keeps the tests of a file together.
    """
    shares = _dealt(_groups(test for test in tests if _weight(test) > OTHER), processes)
    rest = [test for test in tests if _weight(test) <= OTHER]
    ordered: list[Test] = []
    for number, share in enumerate(shares):
        size = (len(tests) - len(ordered)) // (processes - number)
        room = max(size - len(share), 0)
        filling, rest = rest[:room], rest[room:]
        ordered += _part(share, filling, waits_first=number % 2 == 0)
    return ordered + rest


def _weight(test: Marked) -> float:
    if slow := test.get_closest_marker("slow"):
        return float(slow.args[0]) if slow.args else SLOW
    waits = test.get_closest_marker("server") and not test.nodeid.startswith(SHORT_CALLS)
    return SERVER if waits else OTHER


def _groups(tests: Iterable[Test]) -> list[list[Test]]:
    """Return the tests of each file and weight, heaviest tests first."""
    groups: dict[tuple[float, str], list[Test]] = defaultdict(list)
    for test in tests:
        groups[-_weight(test), test.nodeid.partition("::")[0]].append(test)
    return [groups[key] for key in sorted(groups)]


def _dealt(groups: Iterable[list[Test]], processes: int) -> list[list[Test]]:
    """Give each group to the process with the least work."""
    shares: list[list[Test]] = [[] for _ in range(processes)]
    work = [0.0] * processes
    for group in groups:
        number = work.index(min(work))
        shares[number] += group
        work[number] += sum(map(_weight, group))
    return shares


def _part(share: list[Test], filling: list[Test], *, waits_first: bool) -> list[Test]:
    waiting = [test for test in share if _weight(test) <= SERVER]
    long = [test for test in share if _weight(test) > SERVER]
    return [*long, *waiting, *filling] if waits_first else [*long, *filling, *waiting]
