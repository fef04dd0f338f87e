"""What `flowkit doctor` has found, and how that looks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rich.text import Text

from flowkit.cli.screen import plain_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table


class State(StrEnum):
    """How good a finding is."""

    OK = "ok"
    NOTE = "note"
    """Not as it could be, but nothing stops working."""
    BAD = "bad"
    """Something does not work."""


_STYLES = {State.OK: "green", State.NOTE: "yellow", State.BAD: "red"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the table; one that is not fine says what to do."""

    name: str
    state: State
    found: str
    remedy: str = ""


def ok(name: str, found: str) -> Finding:
    """It is fine."""
    return Finding(name=name, state=State.OK, found=found)


def note(name: str, found: str, remedy: str) -> Finding:
    """It could be better."""
    return Finding(name=name, state=State.NOTE, found=found, remedy=remedy)


def bad(name: str, found: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(name=name, state=State.BAD, found=found, remedy=remedy)


def findings_table(findings: Sequence[Finding], *, wide: bool) -> Table:
    """A row for each finding; `wide` fills a terminal's width and wraps what does not fit."""
    table = plain_table(wide=wide)
    table.add_column("what", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("found", ratio=1 if wide else None, no_wrap=not wide)
    for finding in findings:
        text = f"{finding.found}; {finding.remedy}" if finding.remedy else finding.found
        table.add_row(Text(finding.name), Text(finding.state, style=_STYLES[finding.state]), Text(text))
    return table
