"""Keep payloads small and within byte limits: leave out default values, and truncate or split what is too
large. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import from_json

from flowkit.limits import ID_CHARS, VERSION_CHARS
from flowkit.models import AttemptInput, CloseTask, EvaluateConditions, NodeRecord, RecordTask
from flowkit.text import ELLIPSIS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

T = TypeVar("T")

_ELLIPSIS_BYTES = len(ELLIPSIS.encode())
_LONGEST_ESCAPE_SEQUENCE = len("\\u0000")
_MIN_BYTES = 20
"""A text that could keep fewer bytes than this is omitted, because a few characters are useless."""

_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (AttemptInput, RecordTask, CloseTask, NodeRecord, EvaluateConditions)
}


def without_defaults(
    record: AttemptInput | RecordTask | CloseTask | NodeRecord | EvaluateConditions,
) -> dict[str, Any]:
    """Return `record` as a dict without its default values.

    This keeps payloads small, because the server, the worker and every replay read them.
    """
    payload: dict[str, Any] = _ADAPTERS[type(record)].dump_python(record, exclude_defaults=True)
    return payload


def read_runner(result: Any) -> tuple[str, str]:
    """Return the worker and the version in the result of an attempt; empty texts if it names none.

    A newer worker may return another type.
    """
    known = _read_object(result)
    worker, version = known.get("worker_id"), known.get("version")
    if not isinstance(worker, str) or not isinstance(version, str):
        return "", ""
    return worker[:ID_CHARS], version[:VERSION_CHARS]


def has_more(result: Any) -> bool:
    """Return whether the attempt of a shard may have left batches."""
    return _read_object(result).get("more") is True


def read_failed_batches(result: Any) -> int:
    """Return how many batches were set aside in a node that an attempt has finished."""
    return _read_count(_read_object(result), "failed_batches")


def _read_object(result: Any) -> dict[str, Any]:
    """Return the result of an attempt, which may come from a newer release; empty if it is no object."""
    try:
        found = from_json(result.payload.data)
    except (AttributeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_count(found: dict[str, Any], name: str) -> int:
    count = found.get(name)
    return count if isinstance(count, int) else 0


_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def json_size(value: object) -> int:
    """Return the size of `value` in bytes as compact UTF-8 JSON, the form in which Temporal stores it."""
    return len(_COMPACT.encode(value).encode("utf-8", "replace"))


def truncate_json(text: str, limit: int) -> str:
    """Return `text`, truncated to at most `limit` bytes of JSON, not counting the quotes.

    A truncated text ends in `…`.
    """
    inner = json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "replace")
    if len(inner) <= limit:
        return text
    head = inner[: max(0, limit - _ELLIPSIS_BYTES)].decode("utf-8", "ignore")
    return _decode_truncated(head) + ELLIPSIS if limit >= _ELLIPSIS_BYTES else ""


def _decode_truncated(head: str) -> str:
    """Decode the beginning of a JSON string; drop an escape sequence that truncation has split."""
    for dropped in range(_LONGEST_ESCAPE_SEQUENCE):
        try:
            text: str = json.loads(f'"{head[: len(head) - dropped]}"', strict=False)
        except ValueError:
            continue
        return text
    return ""


def largest_cap(sizes: Iterable[int], limit: int) -> int:
    """Return the largest cap with `sum(min(size, cap) for size in sizes) <= limit`."""
    remaining, cap = limit, 0
    ordered = sorted(sizes)
    for position, size in enumerate(ordered):
        larger = len(ordered) - position
        if size * larger > remaining:
            return max(0, remaining // larger)
        remaining, cap = remaining - size, size
    return cap


def truncate_longest(texts: Sequence[str | None], limit: int) -> list[str | None]:
    """Return `texts`, truncated so that their JSON has at most `limit` bytes; the longest are truncated first.

    If each text could keep only a few characters, all of them become None.
    """
    sizes = [json_size(text) - 2 for text in texts if text]
    if sum(sizes) <= limit:
        return list(texts)
    cap = largest_cap(sizes, limit)
    if cap < _MIN_BYTES:
        return [None] * len(texts)
    return [truncate_json(text, cap) if text else text for text in texts]


def split_by_size(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Split `items`, in order, into parts of at most `limit` bytes. A larger item forms a part of its own."""
    part: list[T] = []
    part_bytes = 0
    for item in items:
        item_bytes = size(item)
        if part and part_bytes + item_bytes > limit:
            yield part
            part, part_bytes = [], 0
        part.append(item)
        part_bytes += item_bytes
    if part:
        yield part


def longest_prefix(items: Iterable[T], size: Callable[[T], int], limit: int) -> list[T]:
    """Return as many of the first `items` as fit into `limit` bytes together."""
    kept: list[T] = []
    for item in items:
        limit -= size(item)
        if limit < 0:
            break
        kept.append(item)
    return kept
