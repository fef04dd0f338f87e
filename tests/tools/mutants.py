"""Compare what the tests of two trees prove: `python -m tests.tools.mutants OLD NEW`, the folders of two checkouts.

The program draws mutants, small changes that break a function, in functions that both trees contain unchanged. In each
mutated tree, it runs the quick tests that cover the changed line, then the tests on servers that cover it, until one
fails. A mutant that dies in the old tree and survives in the new one shows that the new tests prove less.

Each checkout needs its own `.venv` with pytest-cov, and is changed while the program runs. The coverage of a
checkout is measured when it is first needed and kept in its `build` folder; `--servers` includes the tests on servers.
"""

from __future__ import annotations

import ast
import copy
import json
import random
import sqlite3
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from coverage.numbits import numbits_to_nums
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDERS = ("workflows", "activities", "adapters", "bridge", "src")
QUICK = "not server and not slow"
SERVERS = "server or slow"
MOST_SEC = 600
"""A run of tests that takes longer has found the mutant: it made something wait forever."""

MOST_TESTS = 400
"""The most tests that run for a mutant, those that cover few functions first."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Key = tuple[str, str]
"""The qualified name of a function and its syntax tree as text."""

console = Console(width=120, highlight=False)

_SWAPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Place:
    """A function in a tree."""

    path: Path
    function: Function


@dataclass(frozen=True)
class Mutant:
    """A change of the expression at `index` among the expressions of a function that can be changed."""

    key: Key
    index: int

    @property
    def name(self) -> str:
        """Return the name of the function."""
        return self.key[0]


class Tree:
    """A checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    @cached_property
    def functions(self) -> dict[Key, Place]:
        """Return the functions that occur once."""
        found: dict[Key, list[Place]] = {}
        for folder in FOLDERS:
            for path in sorted((self.root / folder).rglob("*.py")):
                if not path.resolve().is_relative_to(self.root / folder):
                    continue  # a link to another one of the folders
                for name, function in _functions(ast.parse(path.read_text(encoding="utf-8"))):
                    found.setdefault((name, _syntax(function)), []).append(Place(path, function))
        return {key: places[0] for key, places in found.items() if len(places) == 1}

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[tuple[Path, range, str]]:
        """Change the function within the block. Yield the file, the changed lines, and the change for people."""
        place = self.functions[mutant.key]
        old = mutable(place.function)[mutant.index]
        text = place.path.read_text(encoding="utf-8")
        new = ast.unparse(changed(old))
        place.path.write_text(_replaced(text, old, f"({new})"), encoding="utf-8")
        try:
            yield (
                place.path,
                range(old.lineno, (old.end_lineno or old.lineno) + 1),
                f"{ast.unparse(old)} → {new}",
            )
        finally:
            place.path.write_text(text, encoding="utf-8")

    def measure(self, marked: str) -> Path:
        """Run the tests that `marked` selects with coverage, unless that has been done. Return the data file."""
        data = self.root / "build" / f"mutants-{'servers' if marked == SERVERS else 'quick'}.coverage"
        if not data.exists():
            data.parent.mkdir(exist_ok=True)
            console.print(f"measuring coverage in {self.root} ({marked})")
            options = ["--cov=flowkit", "--cov-context=test", "--cov-report="]
            settings = self.root / "build" / "mutants.coveragerc"
            settings.write_text(f"[run]\ndata_file = {data}\n", encoding="utf-8")
            self.run(["-n", "3", "-m", marked, *options, f"--cov-config={settings}"], most_sec=7200)
        return data

    def covering(self, marked: str, path: Path, lines: range) -> list[str]:
        """Return the ids of the tests that run one of the lines, those first that run few lines at all."""
        with sqlite3.connect(self.measure(marked)) as data:
            rows = data.execute(
                "select c.context, b.numbits, (select sum(length(o.numbits)) from line_bits o where "
                "o.context_id = c.id) from line_bits b join context c on c.id = b.context_id "
                "join file f on f.id = b.file_id where f.path in (?, ?)",
                (str(path), str(self._linked(path))),
            ).fetchall()
        sizes = {
            context.rpartition("|")[0]: size
            for context, bits, size in rows
            if context and set(lines) & set(numbits_to_nums(bits))
        }
        return sorted(sizes, key=lambda test: (sizes[test], test))[:MOST_TESTS]

    def _linked(self, path: Path) -> Path:
        return self.root / "src" / "flowkit" / path.relative_to(self.root)

    def kills(self, tests: list[str]) -> str | None:
        """Run tests until one fails, and return it; None if none fails."""
        if not tests:
            return None
        listed = self.root / "build" / "mutants.tests"
        listed.write_text("\n".join(tests), encoding="utf-8")
        output = self.run(["-x", "-n", "2", "--no-header", "-p", "no:cacheprovider", f"@{listed}"])
        failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if failed:
            return failed[0][:100]
        return None if " passed" in output.splitlines()[-1] else "the run ended early"

    def run(self, arguments: list[str], most_sec: float = MOST_SEC) -> str:
        """Run pytest and return its output."""
        command = [str(self.root / ".venv" / "bin" / "pytest"), "-q", *arguments]
        try:
            done = subprocess.run(
                command, cwd=self.root, capture_output=True, text=True, timeout=most_sec, check=False
            )
        except subprocess.TimeoutExpired:
            return "ERROR the tests took too long"
        return done.stdout or "ERROR no output"


def mutable(function: Function) -> list[ast.expr]:
    """Return the expressions of a function that `changed` can change, which are on one line, in their order."""
    kinds = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Constant)
    found = [node for each in _statements(function) for node in ast.walk(each) if isinstance(node, kinds)]
    return [node for node in found if node.lineno == node.end_lineno and _is_mutable(node)]


def changed(expression: ast.expr) -> ast.expr:
    """Return the expression with another meaning."""
    new = copy.deepcopy(expression)
    match new:
        case ast.Compare():
            new.ops[0] = _SWAPPED[type(new.ops[0])]()
        case ast.BoolOp():
            new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        case ast.UnaryOp():
            return new.operand
        case ast.BinOp():
            new.op = ast.Sub() if isinstance(new.op, ast.Add) else ast.Add()
        case ast.Constant(value=bool(value)):
            new.value = not value
        case ast.Constant(value=int(value) | float(value)):
            new.value = value + 1
    return new


def _is_mutable(node: ast.expr) -> bool:
    match node:
        case ast.UnaryOp(op=operator):
            return isinstance(operator, ast.Not)
        case ast.BinOp(op=operator):
            return isinstance(operator, ast.Add | ast.Sub) and not _holds_text(node)
        case ast.Constant(value=value):
            return isinstance(value, bool | int | float)
    return True


def _holds_text(node: ast.expr) -> bool:
    return any(isinstance(each, ast.JoinedStr | ast.Constant) for each in ast.walk(node))


def _statements(function: Function) -> list[ast.stmt]:
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def _functions(module: ast.Module) -> Iterator[tuple[str, Function]]:
    for node in module.body:
        if isinstance(node, Function):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, Function):
                    yield f"{node.name}.{each.name}", each


def _syntax(function: Function) -> str:
    return "\n".join(ast.dump(each) for each in [function.args, *_statements(function)])


def _replaced(text: str, old: ast.expr, new: str) -> str:
    """Return the text with another expression in the place of `old`."""
    lines = text.splitlines(keepends=True)
    line = lines[old.lineno - 1].encode()
    end = old.end_col_offset or 0
    lines[old.lineno - 1] = (line[: old.col_offset] + new.encode() + line[end:]).decode()
    return "".join(lines)


def draw(old: Tree, new: Tree, count: int, seed: int) -> list[Mutant]:
    """Return mutants of functions that both trees contain, at most one for each function."""
    both = sorted(key for key in old.functions.keys() & new.functions if mutable(new.functions[key].function))
    chance = random.Random(seed)
    chosen = chance.sample(both, min(count, len(both)))
    return [Mutant(key, chance.randrange(len(mutable(new.functions[key].function)))) for key in chosen]


def killed(tree: Tree, mutant: Mutant, stages: list[str]) -> str | None:
    """Return the test that finds the mutant in a tree; None if all tests that cover it pass."""
    for marked in stages:
        tree.measure(marked)
        with tree.mutated(mutant) as (path, lines, _):
            if found := tree.kills(tree.covering(marked, path, lines)):
                return found
    return None


def main(
    old: Annotated[Path, typer.Argument(help="The checkout with the old tests.")],
    new: Annotated[Path, typer.Argument(help="The checkout with the new tests.")],
    count: Annotated[int, typer.Option(help="The number of mutants.")] = 60,
    seed: Annotated[int, typer.Option(help="The seed of the draw.")] = 23,
    servers: Annotated[bool, typer.Option(help="Also run the tests on servers.")] = True,
    report: Annotated[Path, typer.Option(help="Where to write the results.")] = Path("build/mutants.json"),
) -> None:
    """Draw mutants and report those that only the old tests find."""
    trees, stages = (Tree(old), Tree(new)), [QUICK, *([SERVERS] if servers else [])]
    rows = [_compare(*trees, mutant, stages) for mutant in draw(*trees, count, seed)]
    report.parent.mkdir(exist_ok=True)
    report.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    lost = [row for row in rows if row["old"] and not row["new"]]
    survived = sum(not row["new"] for row in rows)
    console.print(f"{len(rows)} mutants, {survived} survive the new tests, {len(lost)} of them died before")
    raise typer.Exit(code=1 if lost else 0)


def _compare(old: Tree, new: Tree, mutant: Mutant, stages: list[str]) -> dict[str, str | None]:
    """Run a mutant. The old tests run only if the new ones do not find it."""
    with new.mutated(mutant) as (path, _, change):
        where = f"{path.relative_to(new.root)}: {mutant.name}: {change}"
    found = killed(new, mutant, stages)
    before = "not run" if found else killed(old, mutant, stages)
    console.print(f"{where}\n    new: {found or 'survives'}; old: {before or 'survives'}")
    return {"mutant": where, "new": found, "old": None if before == "not run" else before}


if __name__ == "__main__":
    typer.run(main)
