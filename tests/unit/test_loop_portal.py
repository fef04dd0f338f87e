"""LoopPortal.start: the outcome of work on the loop of another thread, and its cancels."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.core.loop_portal import LoopPortal

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def portal() -> Iterator[LoopPortal]:
    """Return a portal to a loop on another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield LoopPortal(loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def test_work_runs_on_the_other_loop_and_its_outcome_arrives_on_this_one(portal: LoopPortal) -> None:
    async def work() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def fail() -> None:
        raise ValueError("no")

    assert await portal.start(work()) is not asyncio.get_running_loop()
    with pytest.raises(ValueError, match="no"):
        await portal.start(fail())


async def test_a_cancel_waits_for_the_end_of_the_work_which_may_still_succeed(portal: LoopPortal) -> None:
    begun, cancelled, end = threading.Event(), threading.Event(), asyncio.Event()

    async def work() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
        await end.wait()
        return "done"

    started = portal.start(work())
    await asyncio.to_thread(begun.wait)
    assert started.cancel()
    await asyncio.to_thread(cancelled.wait)
    assert not started.done()
    portal.call(end.set)

    assert await started == "done"
    assert not started.cancel()


async def test_a_second_cancel_ends_the_wait_at_once(portal: LoopPortal) -> None:
    begun, end = threading.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        while not end.is_set():
            with suppress(asyncio.CancelledError):
                await end.wait()

    started = portal.start(work())
    await asyncio.to_thread(begun.wait)
    started.cancel()
    assert not started.done()
    started.cancel()

    assert started.cancelled()
    portal.call(end.set)


async def test_a_cancel_after_a_change_that_the_work_waits_for_does_not_reach_its_clean_up(
    portal: LoopPortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the other loop does all that it can after each thing that is scheduled on it."""
    begun, flag, release, cleaned = threading.Event(), asyncio.Event(), asyncio.Event(), threading.Event()
    loop = portal._loop
    schedule = loop.call_soon_threadsafe

    def until_done(*args: Any, **kwargs: Any) -> asyncio.Handle:
        handle = schedule(*args, **kwargs)
        for _ in range(10):
            turn = threading.Event()
            schedule(turn.set)
            turn.wait()
        return handle

    async def work() -> None:
        begun.set()
        try:
            await flag.wait()
        finally:
            await release.wait()
            cleaned.set()

    started = portal.start(work())
    await asyncio.to_thread(begun.wait)
    monkeypatch.setattr(loop, "call_soon_threadsafe", until_done)
    portal.cancel(started, flag.set)
    monkeypatch.undo()
    portal.call(release.set)
    await asyncio.wait([started])
    assert cleaned.is_set()
