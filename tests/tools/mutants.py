"""Find what no test proves: `python -m tests.tools.mutants TREE`, the folder of a checkout.

The program draws mutants, small changes that break a function, and runs the tests that reach each of them until one
fails (see `mutant_runs`). `--folder` draws from parts of the code, and `--tests` and `--mark` choose the tests, first
the quick ones, for example: `--folder src/flowkit/gateway --tests tests/gateway --mark "not nightly"`.

With `--old OLD`, another checkout, it draws from the functions that both contain unchanged, and what survives the tests
of TREE also runs there. A mutant that dies in the old tree and survives in the new one shows that the new tests prove
less.

Each checkout needs its own `.venv`.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import random
import subprocess
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tests.tools.mutant_runs import Campaign, Change, read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FOLDERS = ("workflows", "activities", "adapters", "bridge", "src")
QUICK = "not server and not slow and not nightly"

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

    def change(self, id: int, mutant: Mutant) -> Change:
        """Return the change that makes a mutant in this tree."""
        place = self.functions[mutant.key]
        old = mutable(place.function)[mutant.index]
        return Change(
            id=id,
            path=str(place.path),
            line=old.lineno,
            start=old.col_offset,
            end=old.end_col_offset or old.col_offset,
            code=ast.unparse(changed(old)),
        )

    def describe(self, mutant: Mutant) -> str:
        """Return the place and the change of a mutant for people."""
        place = self.functions[mutant.key]
        old = mutable(place.function)[mutant.index]
        where = f"{place.path.relative_to(self.root)}:{old.lineno} {mutant.name}"
        return f"{where}: {ast.unparse(old)} → {ast.unparse(changed(old))}"

    def hunt(
        self, mutants: dict[int, Mutant], tests: Sequence[str], mark: str, processes: int
    ) -> dict[int, str]:
        """Run tests on mutants. Return what has found each of those that were found."""
        build = self.root / "build"
        build.mkdir(exist_ok=True)
        results, campaign = build / "mutants.results", build / "mutants.json"
        results.write_text("", encoding="utf-8")
        changes = [self.change(id, each) for id, each in mutants.items()]
        given = Campaign(changes=changes, results=str(results), processes=processes)
        campaign.write_text(json.dumps(asdict(given)), encoding="utf-8")
        options = ["-q", "-s", "-p", "mutant_runs", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", mark]
        subprocess.run(
            [str(self.root / ".venv" / "bin" / "pytest"), *options, *tests],
            cwd=self.root,
            env={**os.environ, "FLOWKIT_MUTANTS": str(campaign), "PYTHONPATH": str(Path(__file__).parent)},
            check=True,
        )
        rows = {row["id"]: row for row in read_lines(results)}
        ended = {"found": "the run ended early, or took too long"}
        return {id: found for id in mutants if (found := rows.get(id, ended)["found"]) is not None}


def mutable(function: Function) -> list[ast.expr]:
    """Return the expressions of a function that `changed` can change, which are on one line, in their order."""
    kinds = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Constant)
    found = [node for each in _statements(function) for node in _walk(each) if isinstance(node, kinds)]
    return [node for node in found if node.lineno == node.end_lineno and _is_mutable(node)]


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Return the nodes whose place is known and where any expression may stand: not those in f-strings or patterns."""
    yield node
    for each in ast.iter_child_nodes(node):
        if not isinstance(each, (ast.JoinedStr, ast.pattern)):
            yield from _walk(each)


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


def draw(new: Tree, old: Tree | None, folders: Sequence[str], count: int, seed: int) -> dict[int, Mutant]:
    """Return mutants by number, at most one for each function. If `old` is given, it contains the functions too."""
    known = sorted(
        key
        for key, place in new.functions.items()
        if str(place.path.relative_to(new.root)).startswith(tuple(folders))
        and mutable(place.function)
        and (old is None or key in old.functions)
    )
    chance = random.Random(seed)
    chosen = chance.sample(known, min(count, len(known)))
    return {
        id: Mutant(key, chance.randrange(len(mutable(new.functions[key].function))))
        for id, key in enumerate(chosen)
    }


def main(
    tree: Annotated[Path, typer.Argument(help="The checkout.")],
    old: Annotated[Path | None, typer.Option(help="A checkout with earlier tests.")] = None,
    folder: Annotated[
        list[str], typer.Option(help="Draw from the files below this folder, or from this file.")
    ] = [*FOLDERS],  # noqa: B006
    tests: Annotated[list[str], typer.Option(help="Files or folders of tests.")] = ["tests"],  # noqa: B006
    mark: Annotated[str, typer.Option(help="The marks of the tests.")] = QUICK,
    count: Annotated[int, typer.Option(help="The number of mutants.")] = 60,
    seed: Annotated[int, typer.Option(help="The seed of the draw.")] = 23,
    processes: Annotated[int, typer.Option(help="How many processes run tests at the same time.")] = 2,
) -> None:
    """Draw mutants and report those that survive, and which of them the old tests find."""
    new, before = Tree(tree), None if old is None else Tree(old)
    mutants = draw(new, before, folder, count, seed)
    found = new.hunt(mutants, tests, mark, processes)
    left = {id: each for id, each in mutants.items() if id not in found}
    lost = before.hunt(left, tests, mark, processes) if before is not None and left else {}
    for id, each in mutants.items():
        killed = found.get(id) or ("survives" + (f"; in the old tree: {lost[id]}" if id in lost else ""))
        console.print(f"{new.describe(each)}\n    {killed}")
    console.print(f"{len(mutants)} mutants, {len(left)} survive, {len(lost)} of them die in the old tree")
    raise typer.Exit(code=1 if lost else 0)


if __name__ == "__main__":
    typer.run(main)
