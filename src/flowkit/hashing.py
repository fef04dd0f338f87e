"""The stable hash of JSON values. External workers compute the same hash."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def stable_hash(value: Any) -> str:
    """Return the BLAKE2b-160 hash of the value's canonical JSON, in hexadecimal (protocol: stable_hash)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()
