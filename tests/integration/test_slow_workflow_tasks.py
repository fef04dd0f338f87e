"""A workflow task that takes long is no deadlock: it ends, and the engine still stops."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

import pytest

from flowkit.models import TaskStatus
from flowkit.workflows.scheduling.scheduler import Scheduler
from tests.integration.handlers import Quick
from tests.integration.harness import Harness, node
from tests.integration.test_continue_as_new import histories, replay

pytestmark = pytest.mark.server

SERVER_SEC = 2
SLOW_SEC = 3.0
"""Longer than the server waits for a workflow task of the test, and than the two seconds after which the SDK suspects
a deadlock.
"""
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


async def test_engine_ends_what_the_server_has_given_up_and_can_stop(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Slow(monkeypatch, times=1)
    engine = await harness.engine()
    await harness.worker({"quick": Quick()})
    task_id = f"slow-{harness.queue}"
    await (await harness.client()).start_workflow(
        "Task",
        {"params": {}, "graph": {"nodes": [node("a", "quick")]}},
        id=task_id,
        task_queue=harness.queue,
        task_timeout=timedelta(seconds=SERVER_SEC),
    )
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    (history,) = await histories(harness, task_id)
    await asyncio.wait_for(engine.stop(), STOP_SEC)
    kinds = {each.WhichOneof("attributes") for each in history.events}
    assert "workflow_task_timed_out_event_attributes" in kinds
    assert "workflow_task_failed_event_attributes" not in kinds
    assert slow.interrupted == []
    assert f"workflow {task_id} took" in caplog.text
    await replay([history])
