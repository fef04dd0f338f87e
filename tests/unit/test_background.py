"""A background loop survives every error, ends on request, and reports its health."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import pytest

from flowkit.attempt import background
from flowkit.attempt.background import BackgroundLoop, Expected, Health

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_AFTER_ERROR_SEC", 0.0)


class Steps:
    """Runs the steps of the test one by one, and waits when none is left."""

    def __init__(self, *each: Callable[[], object]) -> None:
        self._left = list(each)
        self.done = asyncio.Event()

    def then(self, step: Callable[[], object]) -> None:
        """Add a step."""
        self._left.append(step)

    async def step(self) -> None:
        """Run the next step."""
        if self._left:
            self._left.pop(0)()
            return
        self.done.set()
        await asyncio.Event().wait()


def fail() -> None:
    raise KeyError("id")


async def run(steps: Steps) -> tuple[BackgroundLoop, asyncio.Task[None]]:
    """Return a loop that has run all steps, and its task."""
    loop = BackgroundLoop("the test", steps.step)
    task = asyncio.create_task(loop.run())
    await asyncio.wait_for(steps.done.wait(), 10)
    return loop, task


async def test_error_is_logged_and_recorded_and_the_loop_continues(caplog: pytest.LogCaptureFixture) -> None:
    before = time.time()
    loop, task = await run(Steps(fail, fail))
    assert loop.health.running
    assert loop.health.last_error == "'id'"
    assert (loop.health.last_error_at or 0) >= before
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert ["the test" in record.getMessage() for record in errors] == [True, True]
    task.cancel()
    await asyncio.wait([task])
    assert not loop.health.running


async def test_loop_ends_even_if_its_step_swallows_the_cancel() -> None:
    begun = asyncio.Event()

    async def ignores_cancel() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    task = asyncio.create_task(BackgroundLoop("deaf", ignores_cancel).run())
    await begun.wait()
    task.cancel()
    await asyncio.wait_for(asyncio.wait([task]), 10)
    assert task.done()


async def test_stopped_loop_is_unhealthy() -> None:
    loop, task = await run(Steps())
    assert Health(running=True, loops=(loop.health,)).ok
    assert not Health(running=False, loops=(loop.health,)).ok
    task.cancel()
    await asyncio.wait([task])
    assert not Health(running=True, loops=(loop.health,)).ok


async def test_successful_step_is_recorded() -> None:
    loop = BackgroundLoop("the test", asyncio.Event().wait)
    assert loop.health.last_ok_at is None
    loop.worked()
    assert loop.health.last_ok_at is not None


async def test_expected_error_is_logged_by_the_owner_and_the_loop_counts_all_other_steps_as_successes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logged: list[Exception] = []
    away, steps = ConnectionError("away"), Steps(lambda: None)
    expected = Expected(errors=(ConnectionError,), log=logged.append)
    loop = BackgroundLoop("the test", steps.step, expected=expected)

    def refuse() -> None:
        assert loop.health.last_ok_at is not None
        loop.health.last_ok_at = None
        raise away

    steps.then(refuse)
    task = asyncio.create_task(loop.run())
    await asyncio.wait_for(steps.done.wait(), 10)
    assert (logged, loop.health.last_error, loop.health.last_ok_at) == ([away], "away", None)
    assert not caplog.records
    task.cancel()
