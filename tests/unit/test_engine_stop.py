"""An engine of a program stops as a whole, also if a first stop was cut off."""

from __future__ import annotations

from typing import Any

import pytest

from flowkit import Coordinator
from flowkit.testing import memory_database


class Parts:
    """Stands in for what an engine consists of, and notes what ends."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.calls = self

    async def stop_loops(self) -> None:
        """Note it."""
        self.ended.append("loops")

    async def close(self) -> None:
        """Note it."""
        self.ended.append("calls")

    async def stop_lines(self) -> None:
        """Note it."""
        self.ended.append("lines")


class Thread:
    """Stands in for the workers of an engine, which fail to stop."""

    async def stop(self) -> None:
        """Fail."""
        raise TimeoutError


async def test_a_second_stop_ends_what_the_first_one_has_left() -> None:
    coordinator, parts = Coordinator(db=memory_database()), Parts()
    inside: Any = coordinator
    inside._thread, inside._parts = Thread(), parts
    with pytest.raises(TimeoutError):
        await coordinator.stop()
    assert parts.ended == ["loops"]
    await coordinator.stop()
    assert parts.ended == ["loops", "loops", "calls", "lines"]
