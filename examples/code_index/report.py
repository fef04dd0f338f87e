"""The report in the terminal: the ranking, and what is stored in MongoDB."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from code_index.rates import pluralize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from code_index.chaos import Incident
    from code_index.packages import Package
    from code_index.result import IndexResult

WIDTHS = {"package": 22, "files": 5, "lines": 7, "functions": 9, "complexity": 10, "longest function": 17}
"""80 columns, including the gaps."""

_TEXTS = {"package", "longest function"}


def ranking_table(result: IndexResult) -> Table:
    """Return a table of the most complex packages; the last row is the total."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, width in WIDTHS.items():
        if heading in _TEXTS:
            table.add_column(heading, max_width=width, no_wrap=True)
        else:
            table.add_column(heading, width=width, justify="right", no_wrap=True)
    for package in result.ranking:
        table.add_row(*_cells(package))
    table.add_section()
    table.add_row(*_cells(result.total), style="bold")
    return table


def _cells(package: Package) -> Iterator[Text | str]:
    yield Text(package.package)
    for number in (package.files, package.lines, package.functions, package.complexity):
        yield f"{number:,}"
    yield Text(f"{package.longest_lines} {package.longest_function}" if package.longest_lines else "")


def summary(result: IndexResult, incident: Incident | None = None) -> Iterator[str]:
    """Yield the lines below the ranking."""
    counts, total = result.counts, result.total
    if not total.files:
        yield "ranking  none: the source folder contains no Python files"
    else:
        yield f"ranking  {len(result.ranking)} of {result.packages:,} packages; complexity = functions + branches"
    yield f"files    {result.files_found:,} found = {total.files:,} analyzed; {total.problems:,} do not parse"
    for node, batches in result.attempts.items():
        if len(batches) > 1:
            done = pluralize(sum(batches.values()), "batch", "batches")
            yield f"workers  {node}: {done} in {len(batches)} attempts, {shares(result.workers[node])}"
    if failed := sum(shard.status == "failed" for shard in result.shards):
        yield f"retries  {pluralize(failed, 'attempt')} failed; stored batches were not processed again"
    if incident is not None:
        yield from incident_lines(incident, result)
    for line in verified_lines(result):
        yield f"checked  {line}"
    yield (
        f"MongoDB  tasks {counts.tasks}, artifacts {counts.batches + counts.markers:,} "
        f"({counts.batches:,} batches + {counts.markers} nodes), metrics_raw {counts.metrics:,}"
    )


def shares(workers: Mapping[str, int]) -> str:
    """Return how many batches each worker stored, such as `23 by worker-1, 22 by worker-2`."""
    return ", ".join(f"{stored:,} by {worker}" for worker, stored in workers.items())


def verified_lines(result: IndexResult) -> list[str]:
    """Return what `verified_result` has checked; it raises an error otherwise."""
    return [
        f"{result.indexed_batches:,} batches, each stored once by each of {len(result.attempts)} nodes",
        f"{result.files_found:,} files, each found once and analyzed once: none lost, none duplicated",
    ]


def incident_lines(incident: Incident, result: IndexResult) -> Iterator[str]:
    """Yield the lines about the kill and what was taken over."""
    lost = incident.lost
    done = pluralize(result.attempts[lost.node][lost.epoch], "batch", "batches")
    yield f"killed   {lost.worker}, which ran {lost} and had stored {done}"
    yield f"resumed  {taken_over(incident, result)}"


def taken_over(incident: Incident, result: IndexResult) -> str:
    """Return who took over what the killed worker had claimed and not stored."""
    claims = result.taken_over
    if not claims:
        return f"{incident.lost.worker} had stored all that it had claimed, so nothing was taken over"
    workers = ", ".join(dict.fromkeys(claim.worker for claim in claims))
    uids = ", ".join(claim.uid for claim in claims)
    seconds = (max(claim.claimed_at for claim in claims) - incident.killed_at).total_seconds()
    return f"{workers} took over what was claimed and not stored, {seconds:.1f} s after the kill: {uids}"
