"""The sentences of the report. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from code_index.graph import INDEX
from code_index.page.attempts import AttemptEnd
from code_index.report import verified_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from code_index.chaos import Incident
    from code_index.packages import Package
    from code_index.page.attempts import AttemptRun
    from code_index.page.data import DemoRun

DENSE_FROM_LINES = 500
"""Smaller packages are ignored for density."""


def headline(run: DemoRun) -> str:
    """Return one sentence about the whole run."""
    total = run.result.total
    if not total.files:
        return "The folder contains no Python files; the task finished without them."
    return (
        f"{total.files:,} files with {total.lines:,} lines in {pluralize(run.result.packages, 'package')}, "
        f"parsed, grouped and ranked in {run.seconds:.1f} seconds."
    )


def pluralize(number: int, what: str, plural: str = "") -> str:
    """Return a number with its noun."""
    return f"{number:,} {what if number == 1 else plural or what + 's'}"


def percentile(lengths: Mapping[str, int], share: float) -> int:
    """Return the smallest length that at least `share` of the functions do not exceed; 0 without functions."""
    wanted, seen = share * sum(lengths.values()), 0
    for lines in sorted(map(int, lengths)):
        seen += lengths[str(lines)]
        if seen >= wanted:
            return lines
    return 0


def source_findings(run: DemoRun) -> list[str]:
    """Return sentences about the source."""
    total = run.result.total
    return [*_size(run), *_lengths(total), *_density(run.documents.packages), *_problems(total)]


def _size(run: DemoRun) -> Iterator[str]:
    ranking, total = run.result.ranking, run.result.total
    if not total.complexity:
        return
    first = ranking[0]
    share = 100 * first.complexity / total.complexity
    yield (
        f"{first.package} is the most complex package: {first.complexity:,} functions and branches, "
        f"{share:.0f} % of the {total.complexity:,} in the whole tree."
    )
    if run.result.packages > 5:
        five = 100 * sum(package.complexity for package in ranking[:5]) / total.complexity
        yield f"The five most complex of {run.result.packages:,} packages contain {five:.0f} % of it."


def _lengths(total: Package) -> Iterator[str]:
    if not total.functions:
        return
    half, nine = percentile(total.lengths, 0.5), percentile(total.lengths, 0.9)
    yield (
        f"Half of the {total.functions:,} functions have at most {pluralize(half, 'line')}, 90 % have at most {nine:,}. "
        f"The longest, {total.longest_function}, has {total.longest_lines:,}."
    )


def _density(packages: Sequence[Package]) -> Iterator[str]:
    large = [package for package in packages if package.lines >= DENSE_FROM_LINES and package.complexity]
    if len(large) > 1:
        densest = max(large, key=lambda one: one.complexity / one.lines)
        per_hundred = 100 * densest.complexity / densest.lines
        yield (
            f"{densest.package} is the densest: {per_hundred:.0f} functions and branches per 100 lines "
            f"(among packages of at least {DENSE_FROM_LINES} lines)."
        )


def _problems(total: Package) -> Iterator[str]:
    if total.problems:
        yield f"{pluralize(total.problems, 'file does', 'files do')} not parse; only their lines are counted."


def run_findings(run: DemoRun, attempts: Sequence[AttemptRun]) -> list[str]:
    """Return sentences about the run."""
    sentences = [*_slowest(run, attempts), *_failures(attempts)]
    if run.incident is not None:
        sentences.append(kill_sentence(run.incident))
    checked = "; ".join(verified_lines(run.result))
    return [*sentences, f"Verified from the documents: {checked}."]


def _slowest(run: DemoRun, attempts: Sequence[AttemptRun]) -> Iterator[str]:
    busy: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for attempt in attempts:
        busy[attempt.node] += int(1000 * attempt.seconds)
        files[attempt.node] += attempt.files
    for node, milliseconds in busy.most_common(1):
        if run.seconds > 0 and milliseconds > 0:
            share = min(100.0, milliseconds / 10 / run.seconds)
            rate = 1000 * files[node] / milliseconds
            yield f"Node {node} ran for {share:.0f} % of the time, with {rate:,.0f} files per second."


def _failures(attempts: Sequence[AttemptRun]) -> Iterator[str]:
    failed = Counter(
        (attempt.node, attempt.reason) for attempt in attempts if attempt.end is AttemptEnd.FAILED
    )
    for (node, reason), times in failed.items():
        yield (
            f"{pluralize(times, 'attempt')} of node {node} failed ({reason}) and {'was' if times == 1 else 'were'} "
            f"retried{'' if node == INDEX else '; batches that were already stored were not processed again'}."
        )


def kill_sentence(incident: Incident) -> str:
    """Return one sentence about the kill and the takeover."""
    killed = (
        f"{incident.worker} was killed with SIGKILL in attempt {incident.attempt} of node {incident.node}, when "
        f"{incident.batches:,} of {incident.total:,} batches were done"
    )
    if not incident.successor:
        return f"{killed}."
    return (
        f"{killed}. {incident.successor} took the node over {incident.takeover_seconds:.1f} s later as attempt {incident.successor_attempt} "
        f"(epoch {incident.successor_attempt}) and continued after them; {incident.replacement} was started in place of the "
        f"killed worker."
    )
