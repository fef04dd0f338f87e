"""SIGINT and SIGTERM of a process that runs until it is stopped: the first one stops it, the second one ends it."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_TOGETHER_SEC = 0.1
"""Signals within this time are one: programs such as `timeout` send theirs to a process and to its group."""


def on_stop_signals(stop: Callable[[], object], end: Callable[[], object]) -> None:
    """Call `stop` for the first SIGINT or SIGTERM from now on, and `end` for each later one.

    Python calls them between two instructions of the main thread, also while code blocks its event loop.
    """
    stopped_at: float | None = None

    def handle(*_: object) -> None:
        nonlocal stopped_at
        if stopped_at is None:
            stopped_at = time.monotonic()
            stop()
        elif time.monotonic() - stopped_at > _TOGETHER_SEC:
            end()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
