"""Whether anything was lost or counted twice, checked document by document. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from code_index.graph import ANALYZE, ENRICH, GROUP, INDEX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from code_index.documents import Documents

SHOWN = 3
"""Examples that a complaint names."""


def complaints(documents: Documents) -> list[str]:
    """What does not add up, a line each; empty when every file and every batch is there exactly once."""
    return [*_batch_complaints(documents), *_path_complaints(documents), *_sum_complaints(documents)]


def _batch_complaints(documents: Documents) -> Iterator[str]:
    """Each node must have stored each batch of the listing once."""
    stored: dict[str, Counter[str]] = defaultdict(Counter)
    for batch in documents.batches:
        stored[batch.node][batch.uid] += 1
    listed = set(stored[INDEX])
    for node in (INDEX, ENRICH, GROUP, ANALYZE):
        yield from _complaint(f"node {node} has stored twice: batch", _repeated(stored[node]))
        yield from _complaint(f"node {node} has not stored: batch", listed - set(stored[node]))
        yield from _complaint(f"node {node} has stored, unlisted: batch", set(stored[node]) - listed)


def _path_complaints(documents: Documents) -> Iterator[str]:
    """Each file that was found must have been analysed once."""
    found, analysed = Counter(documents.paths_found), Counter(documents.paths_analysed)
    yield from _complaint("found twice: file", _repeated(found))
    yield from _complaint("found, but not analysed: file", set(found) - set(analysed))
    yield from _complaint("analysed, but not found: file", set(analysed) - set(found))
    yield from _complaint("analysed twice: file", _repeated(analysed))


def _sum_complaints(documents: Documents) -> Iterator[str]:
    """The totals that nodes have handed on must be those of the documents."""
    files = len(documents.paths_found)
    summed = sum(package.files for package in documents.packages)
    told = {
        "the listing told of": documents.markers[INDEX]["files"],
        "the packages hold": summed,
        "the analysis told of": documents.markers[ANALYZE]["total"]["files"],
    }
    for teller, count in told.items():
        if count != files:
            yield f"{files:,} files were found, but {teller} {count:,}"
    if left := sum(documents.failed_metrics.values()):
        yield f"{left} batches have failed and were not done again"


def _repeated(counted: Counter[str]) -> set[str]:
    return {name for name, times in counted.items() if times > 1}


def _complaint(what: str, names: Iterable[str]) -> Iterator[str]:
    if ordered := sorted(names):
        more = f" and {len(ordered) - SHOWN:,} more" if len(ordered) > SHOWN else ""
        yield f"{what} {', '.join(ordered[:SHOWN])}{more}"
