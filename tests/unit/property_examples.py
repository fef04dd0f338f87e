"""The number of examples in a property test."""

from __future__ import annotations

import os

QUICK = bool(os.environ.get("FLOWKIT_QUICK"))
"""`make check` sets it."""

THOROUGH = bool(os.environ.get("FLOWKIT_THOROUGH"))
"""`make fuzz` sets it."""


def examples(usual: int) -> int:
    """Return `usual` in `make test`, a fifth of it in `make check`, and twenty times as many in `make fuzz`."""
    if THOROUGH:
        return usual * 20
    return usual // 5 if QUICK else usual
