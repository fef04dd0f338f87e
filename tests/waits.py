"""How tests wait: for events, as long as a busy machine may need."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

EVENT_TIMEOUT_SEC = 200.0
"""Seconds after which an expected event counts as missing: ten times what the slowest one needs on a quiet machine.

The time limit of a test, `timeout` in pyproject.toml, is longer.
"""


async def eventually(look: Callable[[], Awaitable[T | None]], timeout_sec: float = EVENT_TIMEOUT_SEC) -> T:
    """Call `look` until it returns a truthy value, and return that. Raise AssertionError after the timeout."""
    end = time.monotonic() + timeout_sec
    while time.monotonic() < end:
        if found := await look():
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"nothing came of {look} within {timeout_sec} s")


async def wait_seconds(seconds: float) -> None:
    """Wait for a number of seconds, in tests of the time itself, such as an outage."""
    await asyncio.sleep(seconds)
