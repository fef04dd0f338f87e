"""The stable hash of JSON values. External workers compute the same hash."""

from __future__ import annotations

import hashlib
import json
from typing import Any

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def stable_hash(value: Any) -> str:
    """Return the BLAKE2b-160 hash of the value's canonical JSON, in hexadecimal (protocol: stable_hash)."""
    return hashlib.blake2b(_CANONICAL.encode(value).encode(), digest_size=20).hexdigest()
