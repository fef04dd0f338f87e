"""JSON objects, their encoding and their stable hash, and jitter."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

from pydantic_core import to_json

Fields = dict[str, Any]
"""The fields of a document or of a JSON object, or a part of them."""

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def dumps(value: Any) -> bytes:
    """Return `value` as compact UTF-8 JSON, with keys in their given order (protocol: JSON encoding).

    Dates become ISO 8601 text, NaN and infinities become null, and keys become text. Raise PydanticSerializationError
    (a ValueError) for other values that JSON cannot represent.
    """
    return to_json(value, inf_nan_mode="null")


def loads(text: bytes | bytearray | str) -> Any:
    """Return the value of a JSON text. Raise ValueError for invalid JSON."""
    return json.loads(text)


def stable_hash(value: Any) -> str:
    """Return the BLAKE2b-160 hash of the value's canonical JSON, in hexadecimal (protocol: stable_hash).

    External workers compute the same hash.
    """
    return hashlib.blake2b(_CANONICAL.encode(value).encode(), digest_size=20).hexdigest()


def same_json(one: Any, other: Any) -> bool:
    """Return whether two values are the same JSON. Unlike for `==`, 1, 1.0 and true differ, and NaN is NaN."""
    return _CANONICAL.encode(one) == _CANONICAL.encode(other)


def jitter_ms(ms: float, part: float = 0.2) -> int:
    """Return `ms` changed randomly by at most the fraction `part`, rounded and never below 0."""
    return max(0, round(ms * random.uniform(1 - part, 1 + part)))
