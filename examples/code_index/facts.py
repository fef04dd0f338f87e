"""Count what one Python file contains. Pure, except for reading the file."""

from __future__ import annotations

import ast
import importlib.util
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_BRANCHES = (
    ast.If,
    ast.BoolOp,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.comprehension,
    ast.match_case,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """Facts of one file. For a file with a `problem`, only the lines are counted."""

    path: str
    """Relative to the root of the tree, with slashes."""
    problem: str | None = None
    """`unreadable`, `encoding` or `syntax`; None for a file that was parsed."""
    lines: int = 0
    functions: int = 0
    classes: int = 0
    imports: int = 0
    """Number of names in import statements."""
    complexity: int = 0
    """Number of functions and branches."""
    longest_function: str = ""
    longest_lines: int = 0
    lengths: dict[str, int] = field(default_factory=dict)
    """Number of functions by length in lines. The lengths are strings, because keys in MongoDB are strings."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of the files of a batch."""

    facts: list[FileFacts]
    file_count: int


def facts_of(root: str, path: str) -> FileFacts:
    """Return the facts of the file `path` below the folder `root`; an error becomes its `problem`."""
    try:
        data = Path(root, path).read_bytes()
    except OSError:
        return FileFacts(path=path, problem="unreadable")
    return facts_of_source(path, data)


def facts_of_source(path: str, data: bytes) -> FileFacts:
    """Return the facts of a file with this content."""
    lines = data.count(b"\n") + (bool(data) and not data.endswith(b"\n"))
    try:
        source = importlib.util.decode_source(data)
    except (SyntaxError, UnicodeDecodeError):
        return FileFacts(path=path, problem="encoding", lines=lines)
    tree = _parsed(source)
    if tree is None:
        return FileFacts(path=path, problem="syntax", lines=lines)
    return _counted(path, lines, tree)


def _parsed(source: str) -> ast.Module | None:
    """Return the syntax tree; None if this Python cannot parse the source, also because of too deep nesting."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _counted(path: str, lines: int, tree: ast.Module) -> FileFacts:
    nodes = list(ast.walk(tree))
    kinds = Counter(map(type, nodes))
    functions = [node for node in nodes if isinstance(node, _FUNCTIONS)]
    longest = max(functions, key=_length, default=None)
    lengths = Counter(map(_length, functions))
    return FileFacts(
        path=path,
        lines=lines,
        functions=len(functions),
        classes=kinds[ast.ClassDef],
        imports=sum(len(node.names) for node in nodes if isinstance(node, _IMPORTS)),
        complexity=len(functions) + sum(kinds[kind] for kind in _BRANCHES),
        longest_function=longest.name if longest else "",
        longest_lines=_length(longest) if longest else 0,
        lengths={str(lines): lengths[lines] for lines in sorted(lengths)},
    )


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1
