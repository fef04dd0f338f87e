"""Byte budgets: measure values as UTF-8 JSON and truncate texts to fit a limit. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

T = TypeVar("T")

_ELLIPSIS = "…"
_ELLIPSIS_BYTES = len(_ELLIPSIS.encode())
_LONGEST_ESCAPE = len("\\u0000")
_LEAST_BYTES = 20
"""Omit a text that could keep fewer bytes than this, because a few letters carry no information."""


def json_size(value: object) -> int:
    """Return the size of `value` in bytes as compact UTF-8 JSON, the form in which Temporal stores it."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace"))


def cut_json(text: str, limit: int) -> str:
    """Return `text`, truncated to at most `limit` bytes of JSON, not counting the quotes.

    A truncated text ends in `…`.
    """
    inner = json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "replace")
    if len(inner) <= limit:
        return text
    head = inner[: max(0, limit - _ELLIPSIS_BYTES)].decode("utf-8", "ignore")
    return _unescaped(head) + _ELLIPSIS if limit >= _ELLIPSIS_BYTES else ""


def _unescaped(head: str) -> str:
    """Decode the beginning of a JSON string; drop an escape sequence that truncation has split."""
    for dropped in range(_LONGEST_ESCAPE):
        try:
            text: str = json.loads(f'"{head[: len(head) - dropped]}"', strict=False)
        except ValueError:
            continue
        return text
    return ""


def cut_utf8(text: str, limit: int) -> str:
    """Return `text`, truncated to at most `limit` bytes of UTF-8. A truncated text ends in `…`."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= limit:
        return text
    return encoded[: max(0, limit - _ELLIPSIS_BYTES)].decode("utf-8", "ignore") + _ELLIPSIS


def fair_level(sizes: Iterable[int], room: int) -> int:
    """Return the largest cap, in bytes, for which all of `sizes` together fit into `room`.

    Only sizes above the cap are reduced, so only the largest items shrink.
    """
    rest, level = room, 0
    ordered = sorted(sizes)
    for place, size in enumerate(ordered):
        if size * (len(ordered) - place) > rest:
            return max(0, rest // (len(ordered) - place))
        rest, level = rest - size, size
    return level


def cut_fairly(texts: Sequence[str | None], room: int) -> list[str | None]:
    """Return `texts`, truncated so that their JSON has at most `room` bytes; the longest are truncated first.

    If each text could keep only a few letters, all of them become None.
    """
    sizes = [json_size(text) - 2 for text in texts if text]
    if sum(sizes) <= room:
        return list(texts)
    level = fair_level(sizes, room)
    if level < _LEAST_BYTES:
        return [None] * len(texts)
    return [cut_json(text, level) if text else text for text in texts]


def split_by_size(items: Iterable[T], size: Callable[[T], int], room: int) -> Iterator[list[T]]:
    """Split `items`, in order, into parts of at most `room` bytes. A larger item forms a part of its own."""
    part: list[T] = []
    taken = 0
    for item in items:
        needed = size(item)
        if part and taken + needed > room:
            yield part
            part, taken = [], 0
        part.append(item)
        taken += needed
    if part:
        yield part


def fitting(items: Iterable[T], size: Callable[[T], int], room: int) -> list[T]:
    """Return as many of the first `items` as fit into `room` bytes together."""
    kept: list[T] = []
    for item in items:
        room -= size(item)
        if room < 0:
            break
        kept.append(item)
    return kept
