"""Verify document by document that no file or batch is lost or counted twice. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from code_index.flow import ANALYZE, ENRICH, GROUP, INDEX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from code_index.documents import Documents

MAX_NAMES = 3
"""Names that an error message lists before it only counts the rest."""


def integrity_errors(documents: Documents) -> list[str]:
    """Return one line for each inconsistency; empty if every file and every batch exists exactly once."""
    return [
        *_batch_errors(documents),
        *_claim_errors(documents),
        *_path_errors(documents),
        *_sum_errors(documents),
    ]


def _batch_errors(documents: Documents) -> Iterator[str]:
    """Check that each node stored each indexed batch once."""
    stored: dict[str, Counter[str]] = defaultdict(Counter)
    for batch in documents.batches:
        stored[batch.node][batch.uid] += 1
    indexed = set(stored[INDEX])
    for node in (INDEX, ENRICH, GROUP, ANALYZE):
        yield from _error_line(f"node {node} stored twice: batch", _repeated(stored[node]))
        yield from _error_line(f"node {node} did not store: batch", indexed - set(stored[node]))
        yield from _error_line(f"node {node} stored, but not indexed: batch", set(stored[node]) - indexed)


def _claim_errors(documents: Documents) -> Iterator[str]:
    """Check that shards claimed each batch once, and that the attempt with the claim stored the result."""
    for node in {shard.node for shard in documents.shards}:
        claims = {claim.uid: claim.epoch for claim in documents.claims if claim.node == node}
        stored = {batch.uid: batch.epoch for batch in documents.batches if batch.node == node}
        others = {uid for uid, epoch in stored.items() if claims.get(uid) != epoch}
        yield from _error_line(f"node {node} stored without a claim: batch", others)
        yield from _error_line(f"node {node} claimed, but did not store: batch", set(claims) - set(stored))


def _path_errors(documents: Documents) -> Iterator[str]:
    """Check that each file found was analyzed once."""
    found, analyzed = Counter(documents.paths_found), Counter(documents.paths_analyzed)
    yield from _error_line("found twice: file", _repeated(found))
    yield from _error_line("found, but not analyzed: file", set(found) - set(analyzed))
    yield from _error_line("analyzed, but not found: file", set(analyzed) - set(found))
    yield from _error_line("analyzed twice: file", _repeated(analyzed))


def _sum_errors(documents: Documents) -> Iterator[str]:
    """Check that the totals of the nodes are those of the documents."""
    files = len(documents.paths_found)
    counts = {
        "node index counted": documents.markers[INDEX]["files"],
        "the packages contain": sum(package.files for package in documents.packages),
        "node analyze counted": documents.markers[ANALYZE]["total"]["files"],
    }
    for source, count in counts.items():
        if count != files:
            yield f"{files:,} files were found, but {source} {count:,}"
    if failed := sum(documents.failed_metrics.values()):
        yield f"{failed} batches failed and were not processed again"


def _repeated(counts: Counter[str]) -> set[str]:
    return {name for name, count in counts.items() if count > 1}


def _error_line(problem: str, names: Iterable[str]) -> Iterator[str]:
    if ordered := sorted(names):
        more = f" and {len(ordered) - MAX_NAMES:,} more" if len(ordered) > MAX_NAMES else ""
        yield f"{problem} {', '.join(ordered[:MAX_NAMES])}{more}"
