"""A workflow task that takes long is no deadlock: it ends, and the engine still stops."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from flowkit.engine import activations
from flowkit.models import TaskStatus
from flowkit.workflows.scheduling.scheduler import Scheduler
from tests.integration.handlers import Quick
from tests.integration.harness import Harness, node
from tests.integration.test_continue_as_new import histories

pytestmark = pytest.mark.server

SLOW_SEC = 3.0
"""Longer than the two seconds after which the SDK suspects a deadlock by default."""
STOP_SEC = 60.0


class Slow:
    """Makes the first workflow tasks of each run of a task last long."""

    def __init__(self, patch: pytest.MonkeyPatch, times: int) -> None:
        self.interrupted: list[BaseException] = []
        self._times = times
        self._prepare = Scheduler.__init__
        patch.setattr(Scheduler, "__init__", lambda *given, **named: self._run(*given, **named))

    def _run(self, *given: Any, **named: Any) -> None:
        begun, self._times = time.monotonic(), self._times - 1
        try:
            while self._times >= 0 and time.monotonic() - begun < SLOW_SEC:
                pass
        except BaseException as error:
            self.interrupted.append(error)
            raise
        self._prepare(*given, **named)


async def run_one(harness: Harness) -> int:
    """Run a task of one node, stop the engine, and return how many workflow tasks failed."""
    engine = await harness.engine()
    await harness.worker({"quick": Quick()})
    task_id = await harness.create(node("a", "quick"))
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    (history,) = await histories(harness, task_id)
    await asyncio.wait_for(engine.stop(), STOP_SEC)
    return sum(each.HasField("workflow_task_failed_event_attributes") for each in history.events)


async def test_workflow_task_of_three_seconds_is_neither_failed_nor_interrupted(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch, times=1)
    assert (await run_one(harness), slow.interrupted) == (0, [])


async def test_engine_forgets_a_workflow_whose_task_exceeds_the_limit_when_it_has_ended(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(activations, "_WORKFLOW_TASK_SEC", 1)
    slow = Slow(monkeypatch, times=1)
    assert (await run_one(harness), slow.interrupted) == (1, [])
    assert "tasks remain" not in caplog.text
