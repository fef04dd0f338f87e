"""CallThreads, which call MongoDB: outcomes, context, cancels, and how many there are."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from typing import Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient

from flowkit.adapters.mongo import durable
from flowkit.core.loop_portal import CallThreads

_variable: ContextVar[int] = ContextVar("variable", default=0)


def _meet(meet: threading.Barrier) -> int:
    """Return the id of this thread, when another one has called this function too."""
    meet.wait()
    return threading.get_ident()


async def test_a_call_runs_in_the_context_of_its_caller_and_returns_its_outcome() -> None:
    threads, loop = CallThreads(2), asyncio.get_running_loop()
    _variable.set(3)

    assert await threads.call(loop, lambda *given, more: (_variable.get(), *given, more), 1, more=2) == (
        3,
        1,
        2,
    )
    with pytest.raises(ValueError, match="invalid literal"):
        await threads.call(loop, int, "x")


async def test_calls_share_a_limited_number_of_threads_and_one_at_a_time_needs_one() -> None:
    threads, loop = CallThreads(2), asyncio.get_running_loop()
    meet = threading.Barrier(2)

    alone = {await threads.call(loop, threading.get_ident) for _ in range(5)}
    together = await asyncio.gather(*(threads.call(loop, _meet, meet) for _ in range(20)))

    assert len(alone) == 1
    assert len({*together} | alone) == 2


async def test_a_call_that_is_cancelled_before_it_begins_does_not_happen_and_a_later_cancel_ends_the_wait() -> (
    None
):
    threads, loop, go = CallThreads(1), asyncio.get_running_loop(), threading.Event()
    called: list[int] = []
    running = threads.call(loop, go.wait)
    queued = threads.call(loop, called.append, 1)

    queued.cancel()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    go.set()

    assert await threads.call(loop, called.copy) == []


async def test_after_a_fork_new_threads_start() -> None:
    threads, loop = CallThreads(1), asyncio.get_running_loop()
    before = await threads.call(loop, threading.current_thread)

    threads.forget()

    assert await threads.call(loop, threading.current_thread) is not before


async def test_reads_and_writes_of_flowkit_use_them_and_those_of_the_user_do_not() -> None:
    client: AsyncIOMotorClient[dict[str, Any]] = AsyncIOMotorClient("mongodb://127.0.0.1:1")
    given = client["some"]
    own = durable(given)

    run = "run_on_executor"
    assert getattr(own["tasks"]._framework, run) is not getattr(given["tasks"]._framework, run)
    assert (own.name, own.client) == (given.name, client)
    assert type(own["tasks"]).__name__ == type(given["tasks"]).__name__
    client.close()
