"""Index entries of stored batches: what a reader learns (uid, age and size) before it loads their content."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from flowkit.adapters.batch_uids import uid_text
from flowkit.adapters.metrics import EMPTY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_METAS_PER_PAGE = 20

PAGE_BYTES = 16 * 2**20
"""Maximum size of the metas in one page, in bytes. A reader with a smaller memory budget uses less."""

MAX_META_BYTES = 16 * 2**20
"""Size in bytes to assume for a meta of unknown size: MongoDB's limit for a document."""


PROJECTION = {"batch_uid": 1, "created_at": 1, "size": 1}
"""Projection with the fields of an Entry and the fields that determine its age."""


class Entry(NamedTuple):
    """A stored batch, without its meta."""

    uid: Any
    """The uid as stored. A program other than FlowKit may have stored a value that is not text."""
    size: int | None
    """Size of the meta in bytes; None for a batch that another program or an earlier release stored."""


def entries(partials: Iterable[dict[str, Any]]) -> dict[str, Entry]:
    """Return the batches keyed by the text of their uid, oldest first. Skip documents without a `batch_uid`."""
    batches = [partial for partial in partials if "batch_uid" in partial]
    return {uid_text(each["batch_uid"]): _entry(each) for each in sorted(batches, key=_age)}


def _entry(partial: dict[str, Any]) -> Entry:
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


def fitting(entries: Sequence[Entry], room: int) -> int:
    """Return how many of the first entries to read together, so that they fit into `room` bytes.

    Return at least 1, even if that entry exceeds `room`. An entry of unknown size is read by itself.
    """
    total = 0
    for count, entry in enumerate(entries[:_METAS_PER_PAGE]):
        total += room + 1 if entry.size is None else entry.size
        if total > room:
            return max(1, count)
    return min(len(entries), _METAS_PER_PAGE)
