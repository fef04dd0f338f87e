"""`make house`: where the code falls into fragments. A report for readers of the code, not a check.

A module with a single importer, a helper of three lines with a single use and a file name that occurs twice are often
right. Each of them is a place where a reader may have to open a second file.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Annotated

import grimp
import typer
from rich.console import Console

from tests.test_house import ROOT, code, functions, length, tree
from tests.tools.way_of_a_node import documented, not_listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

SMALL_MODULE = 80
"""A module with fewer lines is small."""

SMALL_HELPER = 3
"""A helper with at most so many lines is small."""

console = Console(width=120, highlight=False)


def main(
    most: Annotated[int, typer.Option(help="The most lines of each list.")] = 40,
) -> None:
    """Print the lists."""
    modules = [path for path in code() if path.name != "__init__.py"]
    lines = sum(_lines(path) for path in modules)
    console.print(f"{len(modules)} modules, {lines:,} lines (without __init__.py)")
    _show(f"modules with one importer and under {SMALL_MODULE} lines", small_modules(), most)
    _show(f"private helpers of at most {SMALL_HELPER} lines, used once", small_helpers(), most)
    _show("file names that occur twice", repeated_names(), most)
    ways = (f"{kind}: {len(files)} files" for kind, files in documented().items())
    _show(f"the way of a node, without {len(not_listed())} files that no list has", ways, most)


def small_modules() -> list[str]:
    """Return the small modules that a single module imports, with that module."""
    importers = _importers()
    return [
        f"{_name(path)}: {_lines(path)} lines, for {_name(next(iter(importers[path])))}"
        for path in code()
        if len(importers[path]) == 1 and _lines(path) < SMALL_MODULE and path.name != "__init__.py"
    ]


def small_helpers() -> list[str]:
    """Return the private functions and methods that are short and whose name occurs once besides its definition."""
    return [
        f"{_name(path)}: {function.name}"
        for path in code()
        for function in functions(path)
        if _is_private(function.name)
        and length(path, function) <= SMALL_HELPER
        and _uses(path, function.name) == 1
    ]


def repeated_names() -> list[str]:
    """Return the file names that several modules have, with the folders of these modules."""
    folders: dict[str, list[str]] = defaultdict(list)
    for path in code():
        if not path.name.startswith("__"):
            folders[path.name].append(_name(path.parent))
    return [f"{name}: {', '.join(found)}" for name, found in sorted(folders.items()) if len(found) > 1]


def _importers() -> dict[Path, set[Path]]:
    """Return the modules that import each module."""
    modules = {_dotted(path): path for path in code()}
    found: dict[Path, set[Path]] = defaultdict(set)
    graph = grimp.build_graph("flowkit", cache_dir=None)
    for name, path in modules.items():
        for imported in graph.find_modules_directly_imported_by(name):
            found[modules[imported]].add(path)
    return found


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    whole = parts[1:] if parts[0] == "src" else ("flowkit", *parts)
    return ".".join(part for part in whole if part != "__init__")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _uses(path: Path, name: str) -> int:
    words: Counter[str] = Counter(_words(tree(path)))
    return words[name]


def _words(module: ast.Module) -> Iterator[str]:
    """Yield the name of each variable or attribute that the module reads."""
    for node in ast.walk(module):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _show(title: str, found: Iterable[str], most: int) -> None:
    listed = list(found)
    console.rule(f"{title}: {len(listed)}", align="left")
    for each in listed[:most]:
        console.print(f"  {each}", soft_wrap=True)
    if len(listed) > most:
        console.print(f"  … and {len(listed) - most} more")


if __name__ == "__main__":
    typer.run(main)
