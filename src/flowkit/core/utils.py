"""JSON as it travels, hashes of it, and a little chance."""

from __future__ import annotations

import json
import random
from typing import Any

from pydantic_core import to_json

from flowkit.hashing import stable_hash

__all__ = ["dumps", "jitter_ms", "loads", "stable_hash"]


def dumps(value: Any) -> bytes:
    """`value` as compact UTF-8 JSON, in the order it has (protocol: JSON encoding).

    Times become ISO text, NaN and infinities null, keys text. PydanticSerializationError (a ValueError) on the rest.
    """
    return to_json(value, inf_nan_mode="null")


def loads(text: bytes | bytearray | str) -> Any:
    """What JSON text means. ValueError when it is none."""
    return json.loads(text)


def jitter_ms(ms: float, part: float = 0.2) -> int:
    """`ms`, more or less by chance by at most this part of it; never below 0."""
    return max(0, round(ms * random.uniform(1 - part, 1 + part)))
