"""What a person sees at the end: the ranking, and what lies in MongoDB."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from code_index.chaos import Incident
    from code_index.outcome import Outcome
    from code_index.packages import Package

WIDTHS = {"package": 22, "files": 5, "lines": 7, "functions": 9, "complexity": 10, "longest function": 17}
"""With the gaps between them, 80 columns."""

_TEXTS = {"package", "longest function"}


def ranking_table(outcome: Outcome) -> Table:
    """The most complex packages and, below a line, all of them together."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, width in WIDTHS.items():
        if heading in _TEXTS:
            table.add_column(heading, max_width=width, no_wrap=True)
        else:
            table.add_column(heading, width=width, justify="right", no_wrap=True)
    for package in outcome.ranking:
        table.add_row(*_cells(package))
    table.add_section()
    table.add_row(*_cells(outcome.total), style="bold")
    return table


def _cells(package: Package) -> Iterator[Text | str]:
    yield Text(package.package)
    for number in (package.files, package.lines, package.functions, package.complexity):
        yield f"{number:,}"
    yield Text(f"{package.longest_lines} {package.longest_function}" if package.longest_lines else "")


def summary(outcome: Outcome, incident: Incident | None = None) -> Iterator[str]:
    """What stands around the ranking, a line each."""
    counts, total = outcome.counts, outcome.total
    if not total.files:
        yield "ranking  none: the source folder holds no Python files"
    else:
        yield f"ranking  {len(outcome.ranking)} of {outcome.packages:,} packages; complexity = functions + forks in them"
    yield f"files    {outcome.files_found:,} found = {total.files:,} analysed; {total.problems:,} do not parse"
    for node, batches in outcome.attempts.items():
        if len(batches) > 1 and (incident is None or incident.node != node):
            yield f"retries  {node}: {len(batches)} attempts, which did {' + '.join(map(str, batches))} batches"
    if incident is not None:
        yield from incident_lines(incident, outcome.attempts[incident.node])
    for line in proof(outcome):
        yield f"checked  {line}"
    yield (
        f"MongoDB  tasks {counts.tasks}, artifacts {counts.batches + counts.markers:,} "
        f"({counts.batches:,} batches + {counts.markers} nodes), metrics_raw {counts.metrics:,}"
    )


def proof(outcome: Outcome) -> list[str]:
    """What `checked_outcome` has made sure of: it would have raised otherwise."""
    return [
        f"{outcome.listed_batches:,} batches, each stored once by each of {len(outcome.attempts)} nodes",
        f"{outcome.files_found:,} files, each found once and analysed once: none lost, none double",
    ]


def incident_lines(incident: Incident, batches: list[int]) -> Iterator[str]:
    """What became of the killed worker's node, whose attempts did so many `batches`."""
    did = _batches(batches[incident.attempt - 1])
    yield f"killed   {incident.worker}, which held {incident.node}, attempt {incident.attempt}, and did {did}"
    if incident.heir:
        epoch = f"attempt {incident.heir_attempt} (epoch {incident.heir_attempt})"
        did = _batches(batches[incident.heir_attempt - 1])
        yield f"heir     {incident.heir}, {epoch}, after {incident.seconds_until_heir:.1f} s; did {did}"


def _batches(count: int) -> str:
    return f"{count:,} batch{'' if count == 1 else 'es'}"
