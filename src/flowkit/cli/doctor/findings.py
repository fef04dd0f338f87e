"""The findings of `flowkit doctor`, and their table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rich.text import Text

from flowkit.cli.screen import plain_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table


class Severity(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """Could be better, but everything works."""
    BAD = "bad"
    """Does not work."""


_STYLES = {Severity.OK: "green", Severity.NOTE: "yellow", Severity.BAD: "red"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the table. A finding that is not ok has a remedy."""

    name: str
    state: Severity
    found: str
    remedy: str = ""


def ok(name: str, found: str) -> Finding:
    """Return a finding that is fine."""
    return Finding(name=name, state=Severity.OK, found=found)


def note(name: str, found: str, remedy: str) -> Finding:
    """Return a finding that could be better."""
    return Finding(name=name, state=Severity.NOTE, found=found, remedy=remedy)


def bad(name: str, found: str, remedy: str) -> Finding:
    """Return a finding that does not work."""
    return Finding(name=name, state=Severity.BAD, found=found, remedy=remedy)


def findings_table(findings: Sequence[Finding], *, wide: bool) -> Table:
    """Return a table with a row for each finding; `wide` fills the terminal and wraps long texts."""
    table = plain_table(wide=wide)
    table.add_column("what", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("found", ratio=1 if wide else None, no_wrap=not wide)
    for finding in findings:
        text = f"{finding.found}; {finding.remedy}" if finding.remedy else finding.found
        table.add_row(Text(finding.name), Text(finding.state, style=_STYLES[finding.state]), Text(text))
    return table
