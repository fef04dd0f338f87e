"""The pure parts of the demo, on a small source tree whose facts were counted by hand."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from code_index import faults
from code_index.facts import FileFacts, facts_of, facts_of_source
from code_index.faults import Fault, batches_before_kill, should_wait_for_kill
from code_index.flow import flow, index
from code_index.packages import Package, as_dicts, from_dicts, grouped, merged, ranked, total
from code_index.tree import TOP, package_of, python_files
from flowkit.graph.validation import parse_graph
from flowkit.testing import handler_context

if TYPE_CHECKING:
    from flowkit.worker.handlers.base import Batch

SHAPES = b"""\
import os, sys
from math import pi as PI, tau

class Circle:
    def area(self, r):
        if r > 0 and r < 10:
            return PI * r
        return 0

async def scan(items):
    async for item in items:
        try:
            print(item if item else None)
        except ValueError:
            pass
    return [x for x in items
            for y in items]
"""
"""17 lines; functions area (4) and scan (8); branches: if, and, async for, if-else, except, for, for."""

TREE = {
    "setup.py": b"import setuptools\n",
    "shop/__init__.py": b"",
    "shop/shapes.py": SHAPES,
    "shop/broken.py": b"def (:\n",
    "shop/web/api.py": b"def get():\n    return 1",
    "shop/web/latin.py": b"# -*- coding: latin-1 -*-\nname = '\xe9'\n",
    "shop/web/binary.py": b"name = '\xe9'\n\n",
    "shop/__pycache__/shapes.py": b"x = 1\n",
    ".hidden/secret.py": b"x = 1\n",
    "lib/site-packages/other.py": b"x = 1\n",
    "readme.txt": b"no source\n",
}
FILES = [
    "setup.py",
    "shop/__init__.py",
    "shop/broken.py",
    "shop/shapes.py",
    "shop/web/api.py",
    "shop/web/binary.py",
    "shop/web/latin.py",
]
PACKAGES = [
    Package(package=TOP, files=1, lines=1, imports=1),
    Package(
        package="shop",
        files=3,
        problems=1,
        lines=18,
        functions=2,
        classes=1,
        imports=4,
        complexity=9,
        longest_function="scan",
        longest_lines=8,
        lengths={"4": 1, "8": 1},
    ),
    Package(
        package="shop.web",
        files=3,
        problems=1,
        lines=6,
        functions=1,
        complexity=1,
        longest_function="get",
        longest_lines=2,
        lengths={"2": 1},
    ),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Write the tree to files."""
    for path, data in TREE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    return tmp_path


# --- files ------------------------------------------------------------------------------------------------------


def test_facts_of_a_file() -> None:
    assert facts_of_source("shop/shapes.py", SHAPES) == FileFacts(
        path="shop/shapes.py",
        lines=17,
        functions=2,
        classes=1,
        imports=4,
        complexity=9,
        longest_function="scan",
        longest_lines=8,
        lengths={"4": 1, "8": 1},
    )


@pytest.mark.parametrize(
    ("data", "problem", "lines"),
    [
        (b"def (:\n", "syntax", 1),
        (b"x = 1\0\n", "syntax", 1),
        (b"(" * 1000 + b")" * 1000, "syntax", 1),
        (b"x = '\xe9'\n\n", "encoding", 2),
        (b"# coding: klingon\n", "encoding", 1),
        (b"\xef\xbb\xbfx = 1", None, 1),
        (b"# coding: latin-1\nx = '\xe9'\n", None, 2),
        (b"x = '\\d'\n", None, 1),
        (b"", None, 0),
    ],
)
def test_file_that_cannot_be_parsed_has_a_problem(data: bytes, problem: str | None, lines: int) -> None:
    assert facts_of_source("a.py", data) == FileFacts(path="a.py", problem=problem, lines=lines)


def test_missing_file_is_unreadable(tmp_path: Path) -> None:
    assert facts_of(str(tmp_path), "gone.py") == FileFacts(path="gone.py", problem="unreadable")


def test_python_files_are_listed_in_order(tree: Path) -> None:
    assert python_files(tree) == FILES


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are text")
def test_name_with_invalid_utf8_is_escaped_and_unreadable(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.py")).write_bytes(b"x = 1\n")
    (listed,) = python_files(tmp_path)
    assert listed == "caf\\xe9.py"
    assert facts_of(str(tmp_path), listed).problem == "unreadable"


def test_missing_folder_raises_and_empty_folder_has_no_files(tmp_path: Path) -> None:
    assert python_files(tmp_path) == []
    with pytest.raises(ValueError, match="there is no folder"):
        python_files(tmp_path / "missing")


@pytest.mark.parametrize(("path", "package"), [("a.py", TOP), ("a/b.py", "a"), ("a/b/c.py", "a.b")])
def test_package_is_the_dotted_name_of_the_folder(path: str, package: str) -> None:
    assert package_of(path) == package


async def test_indexer_yields_the_same_batches_in_every_attempt(tree: Path) -> None:
    async def batches() -> list[Batch]:
        ctx = handler_context(input_inline={"source": str(tree), "batch_size": 3})
        return [*index.iter_batches(None, ctx=ctx)]

    first = await batches()
    assert await batches() == first
    assert [batch.batch_uid for batch in first] == ["files-0001", "files-0002", "files-0003"]
    assert [batch.payload["files"] for batch in first] == [FILES[:3], FILES[3:6], FILES[6:]]
    assert [batch.payload["file_count"] for batch in first] == [3, 3, 1]
    assert {(batch.payload["total_batches"], batch.payload["total_files"]) for batch in first} == {(3, 7)}


# --- packages ---------------------------------------------------------------------------------------------------


def test_facts_are_summed_by_package(tree: Path) -> None:
    assert grouped(facts_of(str(tree), path) for path in FILES) == PACKAGES


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_merged_packages_do_not_depend_on_the_batches(tree: Path, size: int) -> None:
    facts = [facts_of(str(tree), path) for path in FILES]
    pieces = [grouped(facts[start : start + size]) for start in range(0, len(facts), size)]
    assert merged(package for piece in pieces for package in piece) == PACKAGES
    assert merged(package for piece in reversed(pieces) for package in reversed(piece)) == PACKAGES


def test_ranking_is_by_complexity_then_by_name() -> None:
    like_shop = Package(package="atelier", complexity=9)
    assert [one.package for one in ranked([*PACKAGES, like_shop], 3)] == ["atelier", "shop", "shop.web"]


def test_total_is_the_sum_of_all_packages() -> None:
    whole = total(PACKAGES)
    assert (whole.files, whole.problems, whole.lines, whole.functions, whole.complexity) == (7, 2, 25, 3, 10)
    assert (whole.longest_function, whole.longest_lines) == ("scan", 8)
    assert whole.lengths == {"2": 1, "4": 1, "8": 1}


def test_packages_round_trip_through_dicts() -> None:
    assert from_dicts(as_dicts(PACKAGES)) == PACKAGES


# --- the task ---------------------------------------------------------------------------------------------------


def first_failure(attempt: int, done: int, batches: int, kind: Fault = Fault.FLAKY_DISK) -> int | None:
    """Return the first batch after `done` that fails in an attempt."""
    numbers = range(done + 1, batches + 1)
    fails = (n for n in numbers if faults.should_fail(kind, attempt=attempt, number=n, total=batches))
    return next(fails, None)


@pytest.mark.parametrize("batches", [*range(10), 45])
def test_two_attempts_fail_with_one_batch_each_even_if_the_node_resumes(batches: int) -> None:
    failures: list[int] = []
    attempt = 1
    while failed := first_failure(attempt, failures[-1] - 1 if failures else 0, batches):
        failures.append(failed)
        attempt += 1
    assert len(failures) == len(set(failures)) == min(batches, 2)


def test_attempts_that_run_together_fail_in_different_thirds() -> None:
    assert [first_failure(attempt, 0, 45) for attempt in (1, 2, 3)] == [15, 30, None]
    assert [first_failure(attempt, 40, 45) for attempt in (1, 2, 3)] == [41, 41, None]


def test_no_batch_fails_in_a_run_with_a_kill() -> None:
    assert [first_failure(attempt, 0, 45, Fault.KILL) for attempt in (1, 2, 3)] == [None] * 3


@pytest.mark.parametrize("batches", [1, 2, 3, 45])
def test_first_attempt_waits_for_the_kill_when_half_is_done(batches: int) -> None:
    waits = [
        (attempt, number)
        for attempt in (1, 2)
        for number in range(1, batches + 1)
        if should_wait_for_kill(Fault.KILL, attempt=attempt, number=number, total=batches)
    ]
    assert waits == [(1, number) for number in range(batches_before_kill(batches) + 1, batches + 1)]
    assert not should_wait_for_kill(Fault.FLAKY_DISK, attempt=1, number=waits[0][1], total=batches)


def test_graph_is_a_valid_chain_of_four_roles() -> None:
    graph = parse_graph(flow.to_dict(), params={}, max_nodes=None)
    assert graph.warnings == ()
    assert [(node.type, node.depends_on, node.pulls_from) for node in graph.nodes] == [
        ("indexer", (), ()),
        ("enricher", ("index",), ("index",)),
        ("grouper", ("enrich",), ("enrich",)),
        ("analyzer", ("group",), ("group",)),
    ]
