"""The figures of cases that measure a latency and have no baseline."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class Latency:
    """A row without a baseline: it has samples in milliseconds."""

    name: str
    target_ms: float
    """The largest median that is allowed."""
    always: bool = False
    """Whether the row runs without `--rows all`."""

    def result(self, samples: Sequence[float], took_sec: float) -> dict[str, Any]:
        """Return the figures for the table and for the file."""
        ordered = sorted(samples)
        return {
            "case": self.name,
            "unit": "ms",
            "p50": statistics.median(ordered),
            "p90": ordered[int(len(ordered) * 0.9)],
            "samples": [*samples],
            "target": f"p50 <= {self.target_ms:.0f} ms",
            "took_sec": round(took_sec, 1),
            "load": os.getloadavg()[0],
            "measured_at": time.time(),
        }
