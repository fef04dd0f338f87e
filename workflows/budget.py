"""Byte budgets: how large values are as UTF-8 JSON, and how texts are cut so that together they fit. Pure."""

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
"""A text that may keep no more than this is left out: a few letters say nothing."""


def json_size(value: object) -> int:
    """Size of `value` as compact UTF-8 JSON, as Temporal stores it."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace"))


def cut_json(text: str, limit: int) -> str:
    """`text`, cut so that its JSON between the quotes has `limit` bytes at most; a cut text ends in `…`."""
    inner = json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "replace")
    if len(inner) <= limit:
        return text
    head = inner[: max(0, limit - _ELLIPSIS_BYTES)].decode("utf-8", "ignore")
    return _unescaped(head) + _ELLIPSIS if limit >= _ELLIPSIS_BYTES else ""


def _unescaped(head: str) -> str:
    """The text behind the beginning of a JSON string, without an escape that was cut in two."""
    for dropped in range(_LONGEST_ESCAPE):
        try:
            text: str = json.loads(f'"{head[: len(head) - dropped]}"', strict=False)
        except ValueError:
            continue
        return text
    return ""


def cut_utf8(text: str, limit: int) -> str:
    """`text`, cut so that it has `limit` bytes of UTF-8 at most; a cut text ends in `…`."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= limit:
        return text
    return encoded[: max(0, limit - _ELLIPSIS_BYTES)].decode("utf-8", "ignore") + _ELLIPSIS


def fair_level(sizes: Iterable[int], room: int) -> int:
    """The largest size to which all of `sizes` can be cut so that their sum fits `room`: the longest are cut first."""
    rest, level = room, 0
    ordered = sorted(sizes)
    for place, size in enumerate(ordered):
        if size * (len(ordered) - place) > rest:
            return max(0, rest // (len(ordered) - place))
        rest, level = rest - size, size
    return level


def cut_fairly(texts: Sequence[str | None], room: int) -> list[str | None]:
    """`texts`, cut so that their JSON has `room` bytes at most; where room is short, nearly empty ones become None."""
    sizes = [json_size(text) - 2 for text in texts if text]
    if sum(sizes) <= room:
        return list(texts)
    level = fair_level(sizes, room)
    if level < _LEAST_BYTES:
        return [None] * len(texts)
    return [cut_json(text, level) if text else text for text in texts]


def split_by_size(items: Iterable[T], size: Callable[[T], int], room: int) -> Iterator[list[T]]:
    """`items` in order, in parts of `room` bytes at most; an item that is larger is a part of its own."""
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
    """The first of `items` that fit into `room` bytes together."""
    kept: list[T] = []
    for item in items:
        room -= size(item)
        if room < 0:
            break
        kept.append(item)
    return kept
