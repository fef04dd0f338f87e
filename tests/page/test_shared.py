"""Reads that many pages share."""

from __future__ import annotations

import asyncio

import pytest

from flowkit.page.shared import SharedReads
from tests.unit.event_loop import let_other_tasks_run


async def test_pages_that_ask_at_once_share_one_read_also_if_the_first_one_leaves() -> None:
    reads: list[str] = []
    gate = asyncio.Event()

    async def read(key: str) -> str:
        reads.append(key)
        await gate.wait()
        return key.upper()

    found = SharedReads(read)
    asking = [asyncio.create_task(found.get("a")) for _ in range(50)]
    await let_other_tasks_run()
    asking[0].cancel()
    gate.set()
    assert await asyncio.gather(*asking[1:]) == ["A"] * 49
    assert await found.get("a") == "A"
    assert await found.get("b") == "B"
    assert reads == ["a", "b"]


async def test_a_result_is_read_again_after_a_while_and_a_failure_at_once() -> None:
    now = 0.0
    results: list[int | Exception] = [ValueError("first"), 1, 2]

    async def read(key: str) -> int:
        nonlocal now
        now += 3.0
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    found = SharedReads(read, clock=lambda: now)
    with pytest.raises(ValueError, match="first"):
        await found.get("a")
    assert await found.get("a") == 1
    now += 11.9
    assert await found.get("a") == 1
    now += 0.2
    assert await found.get("a") == 2
