"""Reads of the batches that the sources of a pulling node have stored: of all batches, or of those stored since a mark."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from flowkit.adapters.entries import PROJECTION, Entry, entries, epoch_of, utc

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SCANNED = {**PROJECTION, "node_id": 1, "status": 1, "attempt_epoch": 1, "confirmed": 1, "updated_at": 1}
"""The fields of an artifact that a scan reads."""


class Mark(NamedTuple):
    """A place in the batches of one source. A later scan can omit those that were stored before it.

    Marks compare the times of one attempt only, which one process wrote. The clocks of different processes may differ.
    """

    epoch: int
    """The epoch of the attempt that wrote the batch."""
    written_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """The batches and complete markers that a scan has found."""

    batches: dict[str, dict[str, Entry]]
    """Batches of each source, keyed by the text of their uid, oldest first."""
    markers: dict[str, int]
    """Epoch of the complete marker, for each source that has a marker."""
    unconfirmed: set[str] = field(default_factory=set)
    """Sources whose marker only an external worker has written, or an earlier release."""
    newest: dict[str, Mark] = field(default_factory=dict)
    """The mark of the newest batch of the highest epoch, for each source with a batch that has an epoch and a time."""


def scan_filter(task_id: str, sources: Sequence[str], since: Mapping[str, Mark]) -> dict[str, Any]:
    """Return the filter of a scan.

    Omit the batches that the attempt of a source's mark, or an earlier attempt, wrote before the mark. Later attempts,
    batches without an epoch or a time, and complete markers are never omitted.
    """
    old = [
        {
            "node_id": source,
            "status": "partial",
            "attempt_epoch": {"$lte": mark.epoch},
            "updated_at": {"$lt": mark.written_at},
        }
        for source, mark in since.items()
    ]
    omitted = {"$nor": old} if old else {}
    return {"task_id": task_id, "node_id": {"$in": list(sources)}, **omitted}


def as_scan(sources: Iterable[str], artifacts: Iterable[dict[str, Any]]) -> Scan:
    """Return what a scan of these sources has found."""
    found: dict[str, list[dict[str, Any]]] = {source: [] for source in sources}
    markers: dict[str, int] = {}
    unconfirmed: set[str] = set()
    for artifact in artifacts:
        source = artifact["node_id"]
        if artifact.get("status") == "complete":
            markers[source] = max(markers.get(source, 0), epoch_of(artifact))
            if not artifact.get("confirmed"):
                unconfirmed.add(source)
        elif artifact.get("status") == "partial":
            found[source].append(artifact)
    newest = {source: mark for source, batches in found.items() if (mark := _newest(batches))}
    batches = {source: entries(batches) for source, batches in found.items()}
    return Scan(batches=batches, markers=markers, unconfirmed=unconfirmed, newest=newest)


def _newest(batches: Iterable[dict[str, Any]]) -> Mark | None:
    marks = (
        Mark(epoch_of(batch), utc(batch["updated_at"]))
        for batch in batches
        if isinstance(batch.get("updated_at"), datetime) and isinstance(batch.get("attempt_epoch"), int)
    )
    return max(marks, default=None)
