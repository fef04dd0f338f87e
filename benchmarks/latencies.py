"""The figures of cases that measure a latency and have no baseline."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Latency:
    """The samples of one case, in milliseconds."""

    name: str
    target_ms: float
    samples: list[float]
    took_sec: float

    @property
    def result(self) -> dict[str, Any]:
        """Return the figures for the table and for the file."""
        ordered = sorted(self.samples)
        return {
            "case": self.name,
            "unit": "ms",
            "p50": statistics.median(ordered),
            "p90": ordered[int(len(ordered) * 0.9)],
            "samples": self.samples,
            "target": f"p50 <= {self.target_ms:.0f} ms",
            "took_sec": round(self.took_sec, 1),
            "load": os.getloadavg()[0],
            "measured_at": time.time(),
        }
