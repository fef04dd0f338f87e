"""Encode what a payload says of all nodes as columns: one value for each node, in the order of the graph. Pure."""

from __future__ import annotations

import base64
import json
import zlib
from typing import TYPE_CHECKING, Any

from flowkit.models.graphs import NodeStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

Packed = dict[str, Any]
"""A value that `pack` encoded: `{"json": value}`, or `{"zlib": text}` if it is compressed."""

STATUS_LETTERS = {
    NodeStatus.QUEUED: "q",
    NodeStatus.RUNNING: "r",
    NodeStatus.DEFERRED: "d",
    NodeStatus.CANCELLING: "c",
    NodeStatus.FINISHED: "f",
    NodeStatus.FAILED: "x",
    NodeStatus.CANCELLED: "k",
    NodeStatus.SKIPPED: "s",
}
_STATUS_BY_LETTER = {letter: status for status, letter in STATUS_LETTERS.items()}

_MAX_UNCOMPRESSED_BYTES = 1_000
"""Values up to this size are not compressed, so that they stay readable in Temporal's Web UI."""


def status_column(statuses: Iterable[NodeStatus]) -> str:
    """Return the statuses as one letter each."""
    return "".join(STATUS_LETTERS[status] for status in statuses)


def statuses_of(column: str) -> list[NodeStatus]:
    """Return the statuses that `status_column` received."""
    return [_STATUS_BY_LETTER[letter] for letter in column]


def pack(value: Any) -> Packed:
    """Return `value` compressed, or unchanged if it is small or compression does not make it smaller."""
    plain = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    if len(plain) > _MAX_UNCOMPRESSED_BYTES:
        packed = base64.b64encode(zlib.compress(plain)).decode()
        if len(packed) < len(plain):
            return {"zlib": packed}
    return {"json": value}


def unpack(packed: Packed) -> Any:
    """Return the value that `pack` received."""
    return (
        packed["json"] if "json" in packed else json.loads(zlib.decompress(base64.b64decode(packed["zlib"])))
    )
