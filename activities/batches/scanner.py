"""Reads the sources of a pulling attempt again and again: only what is new where they have many batches."""

from __future__ import annotations

import time
from datetime import timedelta
from heapq import nlargest
from typing import TYPE_CHECKING

from flowkit.adapters.retry import retry_while_unavailable
from flowkit.adapters.scans import Mark

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.scans import Scan

MANY = 1_000
"""Sources that have fewer batches together are always read completely, which takes a few milliseconds."""
MOST_MARKS = 10
"""The largest number of sources of which a scan reads the new batches only; each one makes the scan's filter slower."""
OVERLAP = timedelta(seconds=5)
"""How much of the time before the newest batch each scan reads again.

The time of a batch is taken before the batch is written, so batches can appear in another order than that of their times.
"""
_FULL_SEC = 10.0
"""The shortest time between two complete scans."""
_FULL_SHARE = 20.0
"""The time between two complete scans is at least this many times as long as a complete scan."""


class Scanner:
    """Scans the sources of one attempt, completely or for new batches.

    A scan for new batches can miss some: those that a process wrote very late, for example after an outage, or after its
    clock was set back, and those of an outdated attempt. A complete scan finds them. It runs about every ten seconds, and
    always to decide that there are no more batches.
    """

    def __init__(self, artifacts: ArtifactStore, task_id: str, sources: Sequence[str]) -> None:
        self._artifacts = artifacts
        self._task_id = task_id
        self._sources = sources
        self._marks: dict[str, Mark] = {}
        """The marks of the sources with the most batches."""
        self._full_due = 0.0

    async def scan(self, *, complete: bool) -> Scan:
        """Return all batches of the sources if `complete` is set or a complete scan is due, otherwise at least the new ones."""
        began = time.monotonic()
        if complete or began >= self._full_due:
            self.restart()
        marks = {source: Mark(epoch, at - OVERLAP) for source, (epoch, at) in self._marks.items()}
        found = await retry_while_unavailable(
            lambda: self._artifacts.scan(self._task_id, self._sources, marks)
        )
        if not marks:
            ended = time.monotonic()
            self._full_due = ended + max(_FULL_SEC, (ended - began) * _FULL_SHARE)
        self._advance(found)
        return found

    def restart(self) -> None:
        """Make the next scan complete, because batches of an earlier scan have not been delivered."""
        self._marks = {}

    def _advance(self, found: Scan) -> None:
        """Move the marks to the newest batches, and add marks if the sources without one have many batches."""
        self._marks = {
            source: max(mark, found.newest.get(source, mark)) for source, mark in self._marks.items()
        }
        read = {source: len(found.batches[source]) for source in found.newest if source not in self._marks}
        if sum(read.values()) >= MANY:
            largest = nlargest(MOST_MARKS - len(self._marks), read, key=lambda source: read[source])
            self._marks |= {source: found.newest[source] for source in largest}
