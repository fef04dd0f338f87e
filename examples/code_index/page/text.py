"""The sentences of the report. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from code_index.flow import INDEX
from code_index.page.attempts import AttemptEnd, running_seconds
from code_index.rates import pluralize
from code_index.report import shares, taken_over, verified_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from code_index.chaos import Incident
    from code_index.packages import Package
    from code_index.page.attempts import AttemptRun
    from code_index.page.data import DemoRun
    from code_index.result import IndexResult

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
        f"Half of the {total.functions:,} functions have at most {pluralize(half, 'line')}, 90 % have "
        f"at most {nine:,}. "
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
    sentences = [*_slowest(run, attempts), *_shards(run.result), *_failures(attempts)]
    if run.incident is not None:
        sentences += kill_sentences(run.incident, run.result)
    checked = "; ".join(verified_lines(run.result))
    return [*sentences, f"Verified from the documents: {checked}."]


def _slowest(run: DemoRun, attempts: Sequence[AttemptRun]) -> Iterator[str]:
    by_node: dict[str, list[AttemptRun]] = {}
    for attempt in attempts:
        by_node.setdefault(attempt.node, []).append(attempt)
    node, own = max(by_node.items(), key=lambda item: running_seconds(item[1]))
    seconds = running_seconds(own)
    if run.seconds > 0 and seconds > 0:
        share = min(100.0, 100 * seconds / run.seconds)
        rate = sum(attempt.files for attempt in own) / seconds
        yield f"Node {node} ran for {share:.0f} % of the time, with {rate:,.0f} files per second."


def _shards(result: IndexResult) -> Iterator[str]:
    for node in dict.fromkeys(shard.node for shard in result.shards):
        workers = result.workers[node]
        yield f"{pluralize(len(workers), 'worker')} shared the batches of node {node}: {shares(workers)}."


def _failures(attempts: Sequence[AttemptRun]) -> Iterator[str]:
    failed = Counter(
        (attempt.node, attempt.reason) for attempt in attempts if attempt.end is AttemptEnd.FAILED
    )
    for (node, reason), times in failed.items():
        yield (
            f"{pluralize(times, 'attempt')} of node {node} failed ({reason}) and {'was' if times == 1 else 'were'} "
            f"retried{'' if node == INDEX else '; batches that were already stored were not processed again'}."
        )


def kill_sentences(incident: Incident, result: IndexResult) -> list[str]:
    """Return sentences about the kill and what was taken over."""
    lost = incident.lost
    done = f"{incident.batches:,} of {incident.total:,} batches of the node"
    return [
        f"{lost.worker} was killed with SIGKILL while it ran {lost}, when {done} were done.",
        f"Other shards continued, and {incident.replacement} was started. {taken_over(incident, result)}.",
    ]
