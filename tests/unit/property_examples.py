"""The number of examples in a property test."""

from __future__ import annotations

import os

THOROUGH = bool(os.environ.get("FLOWKIT_THOROUGH"))
"""`make fuzz` sets it: property tests then draw new examples, and more of them."""


def examples(usual: int) -> int:
    """Return `usual` in the suite, and fifty times as many in `make fuzz`."""
    return usual * 50 if THOROUGH else usual
