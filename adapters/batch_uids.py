"""Uids of batches: as their source stored them, as text, and as a node that pulls from several sources gets them."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from bson import json_util

from flowkit.hashing import stable_hash


def uid_text(stored: Any) -> str:
    """The uid in a stored batch as text.

    Handlers only ever make text. A foreign program may have stored a number, an ObjectId or nothing at all: such a
    uid becomes a hash of its value and type, so that the batch is delivered like any other and two never share one.
    """
    if isinstance(stored, str) and stored:
        return stored
    return stable_hash({"uid": json_util.dumps(stored, sort_keys=True), "type": type(stored).__name__})


def qualified(uid: str, source: str, *, first: str) -> str:
    """The uid of a batch of `source`, for a node that pulls from several sources of which `first` is listed first.

    Batches of the first source keep theirs. Others, and every uid with an `@`, become `<uid>@<source>`, both
    percent-encoded: no two batches of different sources or uids get the same one.
    """
    if source == first and "@" not in uid:
        return uid
    return f"{_encoded(uid)}@{_encoded(source)}"


def _encoded(text: str) -> str:
    return quote(text, safe="", errors="surrogatepass")
