"""Stored batches without their content: their uid, age and size, and the scans that find new ones.

A scan reads all batches that the sources of a pulling node have stored, or those stored since a mark.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from flowkit.adapters.batch_uids import uid_text
from flowkit.adapters.metrics import EMPTY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_METAS_PER_PAGE = 20

PAGE_BYTES = 16 * 2**20
"""Maximum size of the metas in one page, in bytes. A reader with a smaller memory budget uses less."""

MAX_META_BYTES = 16 * 2**20
"""Size in bytes to assume for a meta of unknown size: MongoDB's limit for a document."""


PROJECTION = {"batch_uid": 1, "created_at": 1, "size": 1}
"""Projection with the fields of an Entry and the fields that determine its age."""


SCANNED = {**PROJECTION, "node_id": 1, "status": 1, "attempt_epoch": 1, "confirmed": 1, "updated_at": 1}
"""The fields of an artifact that a scan reads."""


def generation_filter(first_epoch: int) -> dict[str, Any]:
    """Return the filter for rows of the present generation of a node, whose `first_epoch` this is.

    It is empty for a node with one generation. Rows without an epoch belong to none.
    """
    return {"attempt_epoch": {"$gte": first_epoch}} if first_epoch else {}


class Entry(NamedTuple):
    """A stored batch, without its meta."""

    uid: Any
    """The uid as stored. A program other than FlowKit may have stored a value that is not text."""
    size: int | None
    """Size of the meta in bytes; None for a batch that another program or an earlier release stored."""


def entries(partials: Iterable[dict[str, Any]]) -> dict[str, Entry]:
    """Return the batches keyed by the text of their uid, oldest first. Skip documents without a `batch_uid`."""
    return {uid_text(each["batch_uid"]): entry_of(each) for each in oldest_first(partials)}


def oldest_first(artifacts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the artifacts of batches, oldest first. Skip documents without a `batch_uid`."""
    return sorted((each for each in artifacts if "batch_uid" in each), key=_age)


def entry_of(partial: dict[str, Any]) -> Entry:
    """Return a stored batch. The artifact has a `batch_uid`."""
    size = partial.get("size")
    return Entry(partial["batch_uid"], size if isinstance(size, int) else None)


def _age(partial: dict[str, Any]) -> tuple[float, str]:
    """Return a sort key by age. Batches without a valid date, which other programs may store, sort first."""
    made = partial.get("created_at")
    if not isinstance(made, datetime):
        return float("-inf"), str(partial["_id"])
    return utc(made).timestamp(), str(partial["_id"])


def utc(read: datetime) -> datetime:
    """Return a date as MongoDB returned it, with its time zone, which a client may omit."""
    return read if read.tzinfo else read.replace(tzinfo=UTC)


def epoch_of(artifact: dict[str, Any]) -> int:
    """Return the epoch of the attempt that wrote an artifact; 0 if the artifact has no epoch."""
    epoch = artifact.get("attempt_epoch")
    return epoch if isinstance(epoch, int) else 0


def is_whole(artifact: Entry, failed: bool | None) -> bool:
    """Return True if the result of a batch is stored completely.

    `failed` is the field of the batch's metrics row, or None if there is no row. Empty metrics have no row. Earlier
    releases wrote the row before the artifact, so an artifact without a size implies that the row was stored.
    """
    if failed is None:
        return artifact.size is None or artifact.size <= EMPTY_BYTES
    return not failed


def fitting(entries: Sequence[Entry], limit_bytes: int) -> int:
    """Return how many of the first entries to read together, so that they fit into `limit_bytes` bytes.

    Return at least 1, even if that entry exceeds `limit_bytes`. An entry of unknown size is read by itself.
    """
    total = 0
    for count, entry in enumerate(entries[:_METAS_PER_PAGE]):
        total += limit_bytes + 1 if entry.size is None else entry.size
        if total > limit_bytes:
            return max(1, count)
    return min(len(entries), _METAS_PER_PAGE)


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

    batches: Mapping[str, Mapping[str, Entry]]
    """Batches of each source, keyed by the text of their uid, oldest first."""
    markers: dict[str, int]
    """Epoch of the complete marker, for each source that has a marker."""
    unconfirmed: set[str] = field(default_factory=set)
    """Sources whose marker only an external worker has written, or an earlier release."""
    newest: dict[str, Mark] = field(default_factory=dict)
    """The mark of the newest batch of the highest epoch, for each source with a batch that has an epoch and a time."""


def scan_filter(
    task_id: str, sources: Sequence[str], since: Mapping[str, Mark], first_epochs: Mapping[str, int]
) -> dict[str, Any]:
    """Return the filter of a scan. It omits the rows of earlier generations of the sources.

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
    old += [
        {"node_id": source, "attempt_epoch": {"$not": {"$gte": first_epochs[source]}}}
        for source in sources
        if first_epochs.get(source)
    ]
    omitted = {"$nor": old} if old else {}
    return {"task_id": task_id, "node_id": {"$in": list(sources)}, **omitted}


def as_scan(sources: Iterable[str], artifacts: Iterable[dict[str, Any]]) -> Scan:
    """Return what a scan of these sources has found."""
    by_source: dict[str, list[dict[str, Any]]] = {source: [] for source in sources}
    markers: dict[str, int] = {}
    unconfirmed: set[str] = set()
    for artifact in artifacts:
        source = artifact["node_id"]
        if artifact.get("status") == "complete":
            markers[source] = max(markers.get(source, 0), epoch_of(artifact))
            if not artifact.get("confirmed"):
                unconfirmed.add(source)
        elif artifact.get("status") == "partial":
            by_source[source].append(artifact)
    newest = {source: mark for source, batches in by_source.items() if (mark := _newest(batches))}
    batches = {source: entries(batches) for source, batches in by_source.items()}
    return Scan(batches=batches, markers=markers, unconfirmed=unconfirmed, newest=newest)


def _newest(batches: Iterable[dict[str, Any]]) -> Mark | None:
    marks = (
        Mark(epoch_of(batch), utc(batch["updated_at"]))
        for batch in batches
        if isinstance(batch.get("updated_at"), datetime) and isinstance(batch.get("attempt_epoch"), int)
    )
    return max(marks, default=None)
