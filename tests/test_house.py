"""The house rules that can be measured: short functions, few suppressions, no sleeps in tests, one class for a name."""

from __future__ import annotations

import ast
import re
import statistics
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
CODE = ("workflows", "activities", "adapters", "bridge", "src")
HELPERS = {"harness.py", "cluster.py", "handlers.py", "memory.py", "mutant_runs.py"}
"""Modules that can sleep, because the tests that use them are about time itself, or because they are no tests."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@cache
def code() -> tuple[Path, ...]:
    """Return all code files. The folders behind the links under src are counted once."""
    found = (path for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    return tuple(sorted({path.resolve() for path in found}))


@cache
def checks() -> tuple[Path, ...]:
    """Return all test files."""
    return tuple(sorted((ROOT / "tests").rglob("*.py")))


@cache
def tree(path: Path) -> ast.Module:
    """Return a parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def lines_of(path: Path) -> list[str]:
    """Return the lines of a file."""
    return path.read_text(encoding="utf-8").splitlines()


def place(path: Path, name: str) -> str:
    """Return the location of a name for a failure message."""
    return f"{path.relative_to(ROOT)}:{name}"


def functions(path: Path) -> Iterator[Function]:
    """Yield all functions and methods of a file, including nested ones."""
    return (node for node in ast.walk(tree(path)) if isinstance(node, Function))


def length(path: Path, function: Function) -> int:
    """Return the number of non-blank lines of the body, without the docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body or body[-1].end_lineno is None:
        return 0
    lines = lines_of(path)
    return sum(bool(line.strip()) for line in lines[body[0].lineno - 1 : body[-1].end_lineno])


@cache
def lengths() -> dict[str, int]:
    """Return the length of every function in the code."""
    return {
        place(path, f"{each.name}@{each.lineno}"): length(path, each)
        for path in code()
        for each in functions(path)
    }


def test_nine_of_ten_functions_have_at_most_twenty_four_lines() -> None:
    assert statistics.quantiles(lengths().values(), n=10)[-1] <= 24


def test_no_function_is_longer_than_sixty_lines() -> None:
    assert {name: lines for name, lines in lengths().items() if lines > 60} == {}


SUPPRESSION = re.compile(r"#\s*(noqa|type:\s*ignore|pyright:\s*ignore)")


def test_at_most_five_suppressions_each_with_its_rule() -> None:
    lines = [line for path in code() for line in lines_of(path)]
    found = [line.strip() for line in lines if SUPPRESSION.search(line)]
    assert len(found) <= 5, found
    assert [line for line in found if not re.search(r"noqa: [A-Z]+\d+|ignore\[[a-z-]+\]", line)] == []


def sleeps(path: Path) -> list[str]:
    """Return the locations of all calls of a function named `sleep` in a test file."""
    if not any("sleep" in line for line in lines_of(path)):
        return []
    calls = (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call))
    named = (call for call in calls if isinstance(call.func, (ast.Attribute, ast.Name)))
    return [place(path, str(call.lineno)) for call in named if _name(call.func) == "sleep"]


def _name(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time"}


def reads_a_clock(node: ast.AST) -> bool:
    """Return whether an expression asks how much time has passed."""
    return any(isinstance(each, ast.Call) and _name(each.func) in CLOCKS for each in ast.walk(node))


def timed_judgements(path: Path) -> list[int]:
    """Return the lines of the assertions that fail if something has taken long."""
    if not any(clock in line for line in lines_of(path) for clock in CLOCKS):
        return []
    compared = [
        (each.lineno, each.left, op, right)
        for statement in ast.walk(tree(path))
        if isinstance(statement, ast.Assert)
        for each in ast.walk(statement.test)
        if isinstance(each, ast.Compare)
        for op, right in zip(each.ops, each.comparators, strict=True)
    ]
    return [
        line
        for line, left, op, right in compared
        if (isinstance(op, (ast.Lt, ast.LtE)) and reads_a_clock(left))
        or (isinstance(op, (ast.Gt, ast.GtE)) and reads_a_clock(right))
    ]


def test_no_test_judges_by_seconds_of_the_machine(tmp_path: Path) -> None:
    """`tests/processor_time.py` judges growth and processor time; limits of waits are in `EVENT_TIMEOUT_SEC`."""
    bad = tmp_path / "test_bad.py"
    bad.write_text("assert time.monotonic() - began < 5, 'slow'\nassert 2 > perf_counter() - began > 1\n")
    assert len(timed_judgements(bad)) == 2
    assert [place(path, str(line)) for path in checks() for line in timed_judgements(path)] == []


def test_tests_wait_for_events_instead_of_sleeping() -> None:
    assert [found for path in checks() if path.name not in HELPERS for found in sleeps(path)] == []


def test_a_timeout_loses_no_cancel() -> None:
    """On Python 3.11, `asyncio.wait_for` loses a cancel that meets the end of what it awaits. Use `asyncio.timeout`."""
    calls = (
        place(path, f"{each.lineno}")
        for path in code()
        for each in ast.walk(tree(path))
        if isinstance(each, ast.Attribute)
        and each.attr == "wait_for"
        and ast.unparse(each) == "asyncio.wait_for"
    )
    assert [*calls] == []


def undocumented(path: Path) -> Iterator[str]:
    """Yield public classes, functions and methods without a docstring, and the module unless it is empty."""
    module = tree(path)
    if module.body and ast.get_docstring(module) is None:
        yield place(path, "module")
    for definition in _public(module.body):
        if ast.get_docstring(definition) is None:
            yield place(path, definition.name)


def _public(body: list[ast.stmt]) -> Iterator[Definition]:
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_") and not _is_overload(node):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body)


def _is_overload(definition: Definition) -> bool:
    """Return whether this is one of the signatures of a function, whose docstring is that of the function."""
    return any(ast.unparse(each) == "overload" for each in definition.decorator_list)


SHIPPED = ("workflows", "activities", "adapters", "bridge", "src")


def test_every_public_name_has_a_docstring() -> None:
    shipped = [path for path in code() if path.relative_to(ROOT).parts[0] in SHIPPED]
    assert [name for path in shipped for name in undocumented(path)] == []


DOUBLE = "src/flowkit/testing/external"
"""It imports nothing of FlowKit: it is written from the specification alone and uses the same words."""

SHARED = {
    # The protocol of external workers and the graph language describe the same fields.
    *("NodeIO", "RetryPolicy"),
    # The wire forms of the gateway have the names of its specification.
    *("AttemptLog", "Flow", "FlowNode", "Message", "NodeStatus"),
    # The HTTP API of admission publishes the names of its results in its OpenAPI document.
    *("Event", "Cancelled"),
}
"""Names of two classes, each of which is documented under its name."""


def classes() -> dict[str, list[str]]:
    """Return the places of all classes by name. The second implementation of workers is another world."""
    found: dict[str, list[str]] = {}
    for path in code():
        if not path.is_relative_to(ROOT / DOUBLE):
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(place(path, str(node.lineno)))
    return found


def test_each_class_has_a_name_of_its_own() -> None:
    assert {name: at for name, at in classes().items() if len(at) > 1 and name not in SHARED} == {}
