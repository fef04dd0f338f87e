"""What the report says in words, with numbers. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from code_index.graph import INDEX
from code_index.page.attempts import End
from code_index.report import proof

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from code_index.chaos import Incident
    from code_index.packages import Package
    from code_index.page.attempts import AttemptRun
    from code_index.page.data import Run

DENSE_FROM_LINES = 500
"""Packages with fewer lines say little about density."""


def headline(run: Run) -> str:
    """The whole run in a sentence."""
    total = run.outcome.total
    if not total.files:
        return "The folder holds no Python files; the task has finished all the same."
    return (
        f"{total.files:,} files with {total.lines:,} lines in {counted(run.outcome.packages, 'package')}, "
        f"parsed, grouped and ranked in {run.seconds:.1f} seconds."
    )


def counted(number: int, what: str, plural: str = "") -> str:
    """A number with its noun."""
    return f"{number:,} {what if number == 1 else plural or what + 's'}"


def percentile(lengths: Mapping[str, int], share: float) -> int:
    """The least length that at least `share` of all functions do not exceed; 0 without functions."""
    wanted, seen = share * sum(lengths.values()), 0
    for lines in sorted(map(int, lengths)):
        seen += lengths[str(lines)]
        if seen >= wanted:
            return lines
    return 0


def findings(run: Run) -> list[str]:
    """What stands out in the source."""
    total = run.outcome.total
    return [*_size(run), *_lengths(total), *_density(run.documents.packages), *_problems(total)]


def _size(run: Run) -> Iterator[str]:
    ranking, total = run.outcome.ranking, run.outcome.total
    if not total.complexity:
        return
    first = ranking[0]
    share = 100 * first.complexity / total.complexity
    yield (
        f"{first.package} is the most complex package: {first.complexity:,} functions and forks, "
        f"{share:.0f} % of the {total.complexity:,} in the whole tree."
    )
    if run.outcome.packages > 5:
        five = 100 * sum(package.complexity for package in ranking[:5]) / total.complexity
        yield f"The five most complex of {run.outcome.packages:,} packages hold {five:.0f} % of it."


def _lengths(total: Package) -> Iterator[str]:
    if not total.functions:
        return
    half, nine = percentile(total.lengths, 0.5), percentile(total.lengths, 0.9)
    yield (
        f"Half of the {total.functions:,} functions have at most {counted(half, 'line')}, nine of ten at most {nine:,}. "
        f"The longest, {total.longest_function}, has {total.longest_lines:,}."
    )


def _density(packages: Sequence[Package]) -> Iterator[str]:
    large = [package for package in packages if package.lines >= DENSE_FROM_LINES and package.complexity]
    if len(large) > 1:
        densest = max(large, key=lambda one: one.complexity / one.lines)
        per_hundred = 100 * densest.complexity / densest.lines
        yield (
            f"{densest.package} is the densest: {per_hundred:.0f} functions and forks in 100 lines "
            f"(among packages of at least {DENSE_FROM_LINES} lines)."
        )


def _problems(total: Package) -> Iterator[str]:
    if total.problems:
        yield f"{counted(total.problems, 'file does', 'files do')} not parse; their lines are counted, nothing else."


def story(run: Run, attempts: Sequence[AttemptRun]) -> list[str]:
    """How the run went."""
    told = [*_slowest(run, attempts), *_failures(attempts)]
    if run.incident is not None:
        told.append(incident_sentence(run.incident))
    checked = "; ".join(proof(run.outcome))
    return [*told, f"Checked one by one, from the documents: {checked}."]


def _slowest(run: Run, attempts: Sequence[AttemptRun]) -> Iterator[str]:
    busy: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for attempt in attempts:
        busy[attempt.node] += int(1000 * attempt.seconds)
        files[attempt.node] += attempt.files
    for node, milliseconds in busy.most_common(1):
        if run.seconds > 0 and milliseconds > 0:
            share = min(100.0, milliseconds / 10 / run.seconds)
            rate = 1000 * files[node] / milliseconds
            yield f"Node {node} ran for {share:.0f} % of the time, with {rate:,.0f} files a second."


def _failures(attempts: Sequence[AttemptRun]) -> Iterator[str]:
    failed = Counter((attempt.node, attempt.reason) for attempt in attempts if attempt.end is End.FAILED)
    for (node, reason), times in failed.items():
        yield (
            f"{counted(times, 'attempt')} of node {node} failed ({reason}) and {'was' if times == 1 else 'were'} "
            f"tried again{'' if node == INDEX else '; batches that were stored by then were not done again'}."
        )


def incident_sentence(incident: Incident) -> str:
    """The kill, and what came of it."""
    killed = (
        f"{incident.worker} was killed with SIGKILL in attempt {incident.attempt} of node {incident.node}, when "
        f"{incident.batches:,} of {incident.total:,} batches were done"
    )
    if not incident.heir:
        return f"{killed}."
    return (
        f"{killed}. {incident.heir} took the node over {incident.seconds_until_heir:.1f} s later as attempt {incident.heir_attempt} "
        f"(epoch {incident.heir_attempt}) and went on behind them; {incident.replacement} was started in place of the "
        f"dead worker."
    )
