"""How many examples a property test tries."""

from __future__ import annotations

import os

QUICK = bool(os.environ.get("FLOWKIT_QUICK"))
"""`make check` sets it."""


def examples(thorough: int) -> int:
    """`thorough`, of which `make check` tries a fifth."""
    return thorough // 5 if QUICK else thorough
