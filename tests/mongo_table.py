"""Compares what the product sends to MongoDB with the tables of docs/mongodb.md, at the end of a run of the tests."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.mongo_commands import FOLDER, collect_into, collected

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.mongo_commands import Shape

PAGE = Path(__file__).parents[1] / "docs" / "mongodb.md"
_WORKER = "PYTEST_XDIST_WORKER"
_REPORT = pytest.StashKey[list[str]]()
_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of a table."""

    section: str
    names: tuple[str, ...]
    """What it describes: the code in its first cell."""
    cells: tuple[str, ...]


@cache
def rows() -> tuple[Row, ...]:
    """Return the rows of all tables of the page whose first cell contains code."""
    found: list[Row] = []
    section = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section = line.lstrip("#").strip()
        elif line.startswith("|"):
            cells = tuple(cell.strip() for cell in line.strip("|").split(" | "))
            if names := tuple(_CODE.findall(cells[0])):
                found.append(Row(section=section, names=names, cells=cells))
    return tuple(found)


def documented() -> set[Shape]:
    """Return what the tables describe."""
    return {(row.section, name) for row in rows() for name in row.names}


def start_collecting() -> None:
    """Note what this process and all that it starts send from now on.

    The processes of pytest-xdist use the folder of the one that has started them.
    """
    if _WORKER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="flowkit-mongo-commands-")
    collect_into(Path(os.environ[FOLDER]))


def compare(session: pytest.Session) -> None:
    """Fail the session if the product has sent what the page does not describe. Every process of it has ended."""
    if _WORKER in os.environ or session.config.option.collectonly:
        return
    folder = Path(os.environ.pop(FOLDER))
    sent = collected(folder)
    shutil.rmtree(folder)
    lines = missing_rows(sent)
    if lines and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if not lines and sent and _is_whole(session.config):
        lines = unseen_rows(sent)
    session.config.stash[_REPORT] = lines


def missing_rows(sent: Iterable[Shape]) -> list[str]:
    """Return why the page and what was sent do not agree; nothing if they do."""
    return [
        f"MongoDB: {kind}: {name} has no row in docs/mongodb.md; add one with its source"
        for kind, name in sorted({*sent} - documented())
    ]


def unseen_rows(sent: Iterable[Shape]) -> list[str]:
    """Return what a whole run could have sent and has not: a notice, because the servers decide some of it."""
    unseen = sorted(
        {(kind, name) for kind, name in documented() if any(kind == each for each, _ in sent)} - {*sent}
    )
    shown = ", ".join(f"{kind}: {name}" for kind, name in unseen)
    return [f"MongoDB: docs/mongodb.md also describes what this run has not sent: {shown}"] if unseen else []


def _is_whole(config: pytest.Config) -> bool:
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword


def report(terminal: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what `compare` has found."""
    for line in config.stash.get(_REPORT, []):
        terminal.write_line(line)
