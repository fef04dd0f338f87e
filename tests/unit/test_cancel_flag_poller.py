"""The reads of cancel flags that all attempts of a process share."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.event_loop import let_other_tasks_run

from flowkit.attempt.supervision import CancelFlagPoller
from flowkit.core.loop_portal import LoopPortal
from flowkit.errors import StoreUnavailable


class Flags:
    """Holds each read until the test releases it."""

    def __init__(self) -> None:
        self.reads: list[tuple[list[str], asyncio.Future[set[str]]]] = []

    async def find_flagged(self, task_ids: list[str]) -> set[str]:
        """Read the flags of these tasks."""
        self.reads.append((task_ids, asyncio.get_running_loop().create_future()))
        return await self.reads[-1][1]


def poller(flags: Any, every_sec: float = 0.0) -> CancelFlagPoller:
    """Return a poller that reads flags again after `every_sec`."""
    return CancelFlagPoller(flags, LoopPortal(), every_sec)


async def test_slow_read_is_shared_until_it_ends() -> None:
    flags = Flags()
    shared = poller(flags)
    with shared.watching("a"), shared.watching("b"):
        asking = []
        for task_id in ("a", "b", "a"):
            asking.append(asyncio.create_task(shared.any_set(task_id)))
            await let_other_tasks_run()
            await let_other_tasks_run()
        assert [asked for asked, _ in flags.reads] == [["a", "b"]]
        flags.reads[0][1].set_result({"a"})
        assert await asyncio.gather(*asking) == [True, False, True]
        again = asyncio.create_task(shared.any_set("b"))
        await let_other_tasks_run()
        await let_other_tasks_run()
        flags.reads[1][1].set_result({"b"})
        assert await again


async def test_recent_read_is_used_again() -> None:
    flags = Flags()
    shared = poller(flags, every_sec=60)
    with shared.watching("a"):
        first = asyncio.create_task(shared.any_set("a"))
        await let_other_tasks_run()
        await let_other_tasks_run()
        flags.reads[0][1].set_result({"a"})
        assert await first
        assert await shared.any_set("a")
    assert len(flags.reads) == 1


async def test_error_of_a_read_reaches_its_callers_and_the_next_read_succeeds() -> None:
    flags = Flags()
    shared = poller(flags)
    with shared.watching("a"):
        first = asyncio.create_task(shared.any_set("a"))
        await let_other_tasks_run()
        await let_other_tasks_run()
        flags.reads[0][1].set_exception(StoreUnavailable("away"))
        with pytest.raises(StoreUnavailable):
            await first
        second = asyncio.create_task(shared.any_set("a"))
        await let_other_tasks_run()
        await let_other_tasks_run()
        flags.reads[1][1].set_result(set())
        assert not await second
