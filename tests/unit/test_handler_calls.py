"""Hooks can be coroutines, plain functions, generators of either kind, or functions that return a list."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.integration.harness import EVENT_TIMEOUT_SEC as TIMEOUT_SEC
from tests.unit.event_loop import let_other_tasks_run

from flowkit.activities.batches.inputs import check_batch
from flowkit.activities.calls import Threads
from flowkit.activities.handlers import Batch, BatchResult
from flowkit.activities.role_attempt import check_result
from flowkit.adapters.outages import AttemptClock, measured_by
from flowkit.core import loop_portal
from flowkit.core.loop_portal import cancel_until_done

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    made = Threads(2, "hook")
    yield made
    await made.close()


async def call(threads: Threads, hook: Callable[..., Any], *args: Any) -> Any:
    """Return the hook's result, or raise TimeoutError."""
    return await asyncio.wait_for(threads.call(hook, *args), TIMEOUT_SEC)


async def all_of(threads: Threads, hook: Callable[..., Any], *args: Any) -> list[Any]:
    """Return everything that a hook yields."""

    async def collect() -> list[Any]:
        return [item async for item in threads.iterate(hook, *args)]

    return await asyncio.wait_for(collect(), TIMEOUT_SEC)


def here() -> str:
    """Return the name of the calling thread."""
    return threading.current_thread().name


async def here_async() -> str:
    """Return the name of the calling thread."""
    return here()


class Wrapped:
    """An object that can be called like a function."""

    def __call__(self, word: str) -> str:
        return f"{word} {here()}"


# --- calls ------------------------------------------------------------------------------------------------------


async def test_coroutine_runs_on_the_loop(threads: Threads) -> None:
    assert await call(threads, here_async) == here()


@pytest.mark.parametrize("hook", [here, partial(here), lambda: here()])
async def test_plain_function_runs_on_a_thread(threads: Threads, hook: Callable[[], str]) -> None:
    assert (await call(threads, hook)).startswith("hook")


async def test_hook_receives_its_arguments(threads: Threads) -> None:
    assert (await call(threads, Wrapped(), "ran on")).startswith("ran on hook")


async def test_awaitable_returned_by_a_plain_function_is_awaited_on_the_loop(threads: Threads) -> None:
    assert await call(threads, lambda: here_async()) == here()


async def test_blocked_plain_function_does_not_block_the_loop(threads: Threads) -> None:
    released = threading.Event()
    blocked = asyncio.create_task(call(threads, partial(released.wait, TIMEOUT_SEC)))
    assert await call(threads, here_async) == here()
    assert not blocked.done()
    released.set()
    assert await blocked is True


async def test_context_variables_are_visible_on_the_thread_and_do_not_leak_back(
    threads: Threads,
) -> None:
    trace: contextvars.ContextVar[str] = contextvars.ContextVar("trace", default="nothing")
    trace.set("a request")

    def look() -> str:
        seen = trace.get()
        trace.set("changed")
        return seen

    assert await call(threads, look) == "a request"
    assert trace.get() == "a request"


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("no"), asyncio.CancelledError("no")])
async def test_exception_of_a_plain_function_propagates(threads: Threads, error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        await call(threads, fail)


async def test_stop_iteration_of_a_plain_hook_is_an_error_and_does_not_hang(threads: Threads) -> None:
    nothing: Iterator[int] = iter(())
    with pytest.raises(RuntimeError):
        await asyncio.wait_for(threads.call(lambda: next(nothing)), 3)


# --- calls whose caller no longer waits -------------------------------------------------------------------------


async def test_abandoned_call_keeps_its_thread_but_frees_its_slot(
    threads: Threads, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_portal, "IGNORED_SEC", 0.02)
    released = threading.Event()
    stuck = [asyncio.create_task(threads.call(released.wait, TIMEOUT_SEC)) for _ in range(2)]
    waiting = asyncio.create_task(call(threads, here))
    await let_other_tasks_run()
    for each in stuck:
        cancel_until_done(each)
    assert (await waiting).startswith("hook"), "as many calls as slots were given up"
    assert threads.leaked == 2
    assert "leaked threads: 2" in caplog.messages[-1]
    released.set()
    while threads.leaked:
        await let_other_tasks_run()


async def test_cancelled_caller_waits_for_a_function_that_cleans_up(threads: Threads) -> None:
    asked, cleaned = threading.Event(), threading.Event()

    def clean_up() -> None:
        asked.wait(TIMEOUT_SEC)
        cleaned.set()

    calling = asyncio.create_task(call(threads, clean_up))
    await let_other_tasks_run()
    calling.cancel()
    await let_other_tasks_run()
    assert not calling.done()
    asked.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert cleaned.is_set()
    assert threads.leaked == 0


@pytest.mark.parametrize("ends", [True, False])
async def test_close_waits_a_while_for_calls_that_were_given_up(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    released = threading.Event()
    monkeypatch.setattr(loop_portal, "IGNORED_SEC", 0.02)
    stuck = asyncio.create_task(threads.call(released.wait, TIMEOUT_SEC))
    await let_other_tasks_run()
    cancel_until_done(stuck)
    await asyncio.wait([stuck])
    monkeypatch.setattr(loop_portal, "IGNORED_SEC", TIMEOUT_SEC if ends else 0.05)
    closing = asyncio.create_task(threads.close())
    await let_other_tasks_run()
    assert not closing.done()
    if ends:
        released.set()
    await closing
    assert threads.leaked == (0 if ends else 1)
    assert ("the process ends without 1 synchronous function that did not stop" in caplog.messages) != ends
    released.set()


async def test_call_that_ends_on_cancel_leaves_no_thread_behind(threads: Threads) -> None:
    def stop() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await call(threads, stop)
    assert threads.leaked == 0


async def test_concurrent_calls_do_not_exceed_the_slots(threads: Threads) -> None:
    now, most, lock = 0, 0, threading.Lock()

    def count() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        threading.Event().wait(0.01)
        with lock:
            now -= 1

    await asyncio.gather(*(call(threads, count) for _ in range(20)))
    assert most == 2


async def test_waiting_for_a_slot_does_not_count_as_attempt_time(threads: Threads) -> None:
    begun = time.monotonic()
    clock, released = AttemptClock(), threading.Event()
    stuck = [asyncio.create_task(call(threads, partial(released.wait, TIMEOUT_SEC))) for _ in range(2)]
    await let_other_tasks_run()
    with measured_by(clock):
        waiting = asyncio.create_task(call(threads, here))
    await let_other_tasks_run()
    began = time.monotonic()
    await asyncio.wait([waiting], timeout=0.5)
    waited = time.monotonic() - began
    released.set()
    await asyncio.gather(waiting, *stuck)
    in_all = time.monotonic() - begun
    assert clock.spent() <= in_all - waited


# --- generators -------------------------------------------------------------------------------------------------


async def counted_async(upto: int) -> AsyncIterator[int]:
    """Yield numbers from an async generator."""
    for number in range(upto):
        yield number


def counted(upto: int) -> Iterator[int]:
    """Yield numbers from a plain generator."""
    yield from range(upto)


async def listed_async(upto: int) -> list[int]:
    """Return numbers in a list, from a coroutine."""
    return list(range(upto))


FORMS: dict[str, Callable[[int], Any]] = {
    "async generator": counted_async,
    "plain generator": counted,
    "list": lambda upto: list(range(upto)),
    "tuple": lambda upto: tuple(range(upto)),
    "iterator": lambda upto: iter(range(upto)),
    "coroutine with a list": listed_async,
    "function that returns an async generator": lambda upto: counted_async(upto),
    "partial of a generator": partial(counted),
}


@pytest.mark.parametrize("form", FORMS)
async def test_every_form_of_iter_batches_yields_the_same(threads: Threads, form: str) -> None:
    for upto in [0, 1, 5]:
        assert await all_of(threads, FORMS[form], upto) == list(range(upto))


async def test_every_step_of_a_plain_generator_runs_on_a_thread(threads: Threads) -> None:
    def steps() -> Iterator[str]:
        yield here()
        yield here()

    assert all(name.startswith("hook") for name in await all_of(threads, steps))


async def test_plain_generator_is_advanced_only_on_demand(threads: Threads) -> None:
    made: list[int] = []

    def eager() -> Iterator[int]:
        for number in range(9):
            made.append(number)
            yield number

    stream = threads.iterate(eager)
    assert [await anext(stream), await anext(stream)] == [0, 1]
    assert made == [0, 1]


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_exception_of_a_generator_propagates_after_its_items(threads: Threads, kind: str) -> None:
    def plain() -> Iterator[int]:
        yield 1
        raise ConnectionError("the source broke")

    async def coroutine() -> AsyncIterator[int]:
        yield 1
        raise ConnectionError("the source broke")

    stream = threads.iterate(plain if kind == "plain" else coroutine)
    assert await anext(stream) == 1
    with pytest.raises(ConnectionError, match="the source broke"):
        await anext(stream)


@pytest.mark.parametrize("nothing", [None, 7])
async def test_iter_batches_that_yields_nothing_is_named_in_the_error(
    threads: Threads, nothing: object
) -> None:
    def iter_batches() -> Any:
        return nothing

    with pytest.raises(TypeError, match=r"iter_batches must yield batches, not return (NoneType|int)"):
        await all_of(threads, iter_batches)


# --- what hooks return --------------------------------------------------------------------------------------------


def test_valid_result_and_batch_are_returned_unchanged() -> None:
    result, batch = BatchResult(success=True), Batch(payload={"a": 1})
    assert check_result(result) is result
    assert check_batch(batch) is batch


@pytest.mark.parametrize("given", [None, {"success": True}, True, ("b1", {}), Batch()])
def test_invalid_result_is_rejected_and_the_hook_is_named(given: object) -> None:
    with pytest.raises(
        TypeError, match=f"process_batch must return BatchResult.* not {type(given).__name__}"
    ):
        check_result(given)


@pytest.mark.parametrize("given", [None, {"batch_uid": "b1"}, "b1", BatchResult(success=True)])
def test_invalid_batch_is_rejected_and_the_hook_is_named(given: object) -> None:
    with pytest.raises(TypeError, match=f"iter_batches must yield Batch.* not {type(given).__name__}"):
        check_batch(given)
