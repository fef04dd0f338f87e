"""The stable hash of JSON values, which external workers compute in the same way."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def stable_hash(value: Any) -> str:
    """BLAKE2b-160 of canonical JSON, as hex (protocol: stable_hash)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()
