"""Decides when a pulling attempt reads its sources again: soon while batches arrive, and rarely while none do."""

from __future__ import annotations

_BUSY_SEC = 0.05
"""The shortest time between two scans."""
_IDLE_SEC = 0.5
"""The shortest time between two scans that find nothing. Together with its reads of source states and cancel flags, a
waiting attempt reads MongoDB less than 5 times a second, whatever `poll_ms` and `backoff_max_ms` say."""
_SHARE = 4.0
"""The pause after a scan is at least this many times as long as the scan, which limits the load of long scans."""
_MOST_DOUBLINGS = 30


class ScanSchedule:
    """The time of the next scan, in seconds of a monotonic clock that the caller reads.

    `poll_sec` is the time from one scan to the next while scans find batches, and also after the first one that finds
    none. Each further scan without a batch doubles it, up to `most_sec`.
    """

    def __init__(self, poll_sec: float, most_sec: float) -> None:
        self._poll_sec = poll_sec
        self._most_sec = max(poll_sec, most_sec)
        self._empty = 0
        self._earliest = self._due = 0.0

    def scanned(self, began: float, took: float, *, found: bool) -> None:
        """Note a scan, the seconds that it took, and whether it found batches to deliver."""
        self._empty = 0 if found else self._empty + 1
        doublings = min(max(0, self._empty - 1), _MOST_DOUBLINGS)
        pause = self._poll_sec if not doublings else min(self._poll_sec * 2**doublings, self._most_sec)
        least = _IDLE_SEC if doublings else _BUSY_SEC
        self._earliest = began + took + max(_BUSY_SEC, took * _SHARE)
        self._due = max(began + max(pause, least), self._earliest)

    def hasten(self) -> None:
        """Make the next scan due as early as its load on the database allows."""
        self._due = min(self._due, self._earliest)

    def left(self, now: float) -> float:
        """Return the seconds until the next scan is due; 0 or less if it is."""
        return self._due - now
