"""How long the fuzz runs, and with which seed."""

from __future__ import annotations

import os
import secrets
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _pytest.mark import ParameterSet

MINUTES = float(os.environ.get("FLOWKIT_FUZZ_MINUTES") or 0)
"""Time of the processor for all campaigns together; `make fuzz MINUTES=n` sets it."""
only_in_fuzz = pytest.mark.skipif(not MINUTES, reason="only `make fuzz` runs it")
SLOTS_SHARE = 1 / 6
"""The part of this time for the concurrency limits."""
SHARDS_SHARE = 1 / 6
"""The part of this time for nodes with shards."""
FLOWS_SHARE = 1 / 6
"""The part of this time for flows of the gateway: half for flows with planned ends, and half for random histories."""
ADMISSION_SHARE = 1 / 6
"""The part of this time for the admission queue. The rest is for the scheduler."""
GRAPHS = int(os.environ.get("FLOWKIT_FUZZ_GRAPHS") or 0)
"""Least number of graphs; `make fuzz GRAPHS=n` sets it."""


def chosen_seed() -> int:
    """Return the seed that `make fuzz SEED=n` sets, or a new one."""
    return int(os.environ.get("FLOWKIT_SEED") or secrets.randbelow(1_000_000))


def first_of(cases: Sequence[tuple[object, ...]]) -> list[ParameterSet]:
    """Return the cases as parameters, of which the suite runs the first, and `make fuzz` all."""
    return [pytest.param(*case, marks=only_in_fuzz if place else ()) for place, case in enumerate(cases)]


def show(capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Print the text, even when the test passes."""
    with capsys.disabled():
        sys.stdout.write(f"\n  {text}\n")
