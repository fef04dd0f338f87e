"""Conversion of batch uids: from their stored form to text, and to a unique uid when a node has several sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from bson import json_util

from flowkit import reason_codes
from flowkit.adapters.mongo import CURSOR_DOCUMENTS
from flowkit.core.utils import stable_hash
from flowkit.errors import FlowKitError
from flowkit.limits import BATCH_UID_CHARS
from flowkit.validation.values import batch_uid_problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class BadBatchUid(FlowKitError, ValueError):
    """Raised for a batch uid that is too long, reserved, or not valid text."""

    code = reason_codes.BAD_BATCH_UID


def uid_text(stored: Any) -> str:
    """Return the uid of a stored batch as text.

    Handlers store only valid uids. Another program may have stored a number, an ObjectId or nothing at all.
    FlowKit replaces such a uid with a hash of its value and type, so that it delivers the batch like any
    other and uids stay distinct.
    """
    if isinstance(stored, str) and batch_uid_problem(stored) is None:
        return stored
    return stable_hash({"uid": json_util.dumps(stored, sort_keys=True), "type": type(stored).__name__})


def qualified(uid: str, source: str, *, first: str) -> str:
    """Return the uid of a batch of `source` that is unique among all sources of a node; `first` is its first source.

    Batches of the first source keep their uid. All others, and every uid that contains an `@`, become `<uid>@<source>`,
    with both parts percent-encoded. Batches that differ in source or uid therefore never get the same result. A
    result that would be longer than a uid may be is replaced by its hash.
    """
    if source == first and "@" not in uid:
        return uid
    unique = f"{_encoded(uid)}@{_encoded(source)}"
    return unique if len(unique) <= BATCH_UID_CHARS else stable_hash({"uid": unique})


def _encoded(text: str) -> str:
    return quote(text, safe="", errors="surrogatepass")


def uid_filters(batch_uids: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield filters for rows of these batches, each for some of them."""
    for start in range(0, len(batch_uids), CURSOR_DOCUMENTS):
        yield {"batch_uid": {"$in": [*batch_uids[start : start + CURSOR_DOCUMENTS]]}}
