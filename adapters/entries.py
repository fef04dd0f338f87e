"""Stored batches as their readers see them before they read what is in them: uid, age and size."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from flowkit.adapters.batch_uids import uid_text
from flowkit.adapters.metrics import EMPTY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_METAS_OF_ONE_PAGE = 20

PAGE_BYTES = 16 * 2**20
"""Metas of one page, unless a reader has less room."""

MAX_META_BYTES = 16 * 2**20
"""What a meta of unknown size can have at most: MongoDB's documents are no larger."""


PROJECTION = {"batch_uid": 1, "created_at": 1, "size": 1}
"""Projection: what an Entry is made of, and what sorts entries."""


class Entry(NamedTuple):
    """A stored batch, without its meta."""

    uid: Any
    """As it is stored; a foreign program may have stored something other than text."""
    size: int | None
    """Bytes of its meta; None when a foreign program or an earlier release has stored it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """What the sources of a pulling node have left behind so far."""

    batches: dict[str, dict[str, Entry]]
    """By source, its batches by the text of their uid, oldest first."""
    markers: dict[str, int]
    """Epoch of the complete marker of each source that has one."""


def entries(partials: Iterable[dict[str, Any]]) -> dict[str, Entry]:
    """Batches by the text of their uid, oldest first. A document without `batch_uid` is none."""
    batches = [partial for partial in partials if "batch_uid" in partial]
    return {uid_text(each["batch_uid"]): _entry(each) for each in sorted(batches, key=_age)}


def _entry(partial: dict[str, Any]) -> Entry:
    size = partial.get("size")
    return Entry(partial["batch_uid"], size if isinstance(size, int) else None)


def _age(partial: dict[str, Any]) -> tuple[float, str]:
    """What sorts batches by age; those of a foreign program that have no usable date come first."""
    made = partial.get("created_at")
    if not isinstance(made, datetime):
        return float("-inf"), str(partial["_id"])
    return (made if made.tzinfo else made.replace(tzinfo=UTC)).timestamp(), str(partial["_id"])


def epoch_of(artifact: dict[str, Any]) -> int:
    """Epoch of the attempt that wrote an artifact; 0 when it holds none."""
    epoch = artifact.get("attempt_epoch")
    return epoch if isinstance(epoch, int) else 0


def is_whole(artifact: Entry, failed: bool | None) -> bool:
    """Whether a batch's result is stored whole; `failed` is that of its row of metrics, None without one.

    Metrics that hold nothing have no row. Earlier releases wrote the row first, so their artifacts prove it.
    """
    if failed is None:
        return artifact.size is None or artifact.size <= EMPTY_BYTES
    return not failed


def fitting(entries: Sequence[Entry], room: int) -> int:
    """How many of the first entries to read together: they fit into `room` bytes, or it is a single one.

    One of unknown size is read alone.
    """
    total = 0
    for count, entry in enumerate(entries[:_METAS_OF_ONE_PAGE]):
        total += room + 1 if entry.size is None else entry.size
        if total > room:
            return max(1, count)
    return min(len(entries), _METAS_OF_ONE_PAGE)
