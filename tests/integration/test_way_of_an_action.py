"""A page lists the modules that run for one action, so that a reader can follow it from file to file."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.engine.activations import Activations
from flowkit.workflows.task import Task
from tests.integration.handlers import Quick
from tests.integration.harness import EVENT_TIMEOUT_SEC, Harness, node
from tests.tools.way_of_a_node import CHAIN, Way, documented, leave_undisturbed, not_listed

if TYPE_CHECKING:
    from flowkit.local import Stack
    from flowkit.worker import Batch, BatchResult
    from flowkit.worker.context import RunContext

SECTION = "The way of an action"
MOST_FILES = 21


class Endless(Quick):
    """Runs until it is stopped, and tells when it has begun."""

    def __init__(self) -> None:
        self.began = asyncio.Event()

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait for the end of the attempt."""
        self.began.set()
        await asyncio.Event().wait()
        return await super().process_batch(batch, ctx)


REST = "the rest of its activation"


def divide(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """End a way when the handler of the update has its answer, and the rest of it with the activation.

    The workflow then awaits what it has started in the background: activities and timers.
    """
    apply, run = Task._apply, Activations.run

    async def noted(self: Task, name: str, given: Any) -> dict[str, Any]:
        try:
            return await apply(self, name, given)
        finally:
            way.end(REST)

    def ran(self: Activations, activation: Any) -> Any:
        try:
            return run(self, activation)
        finally:
            if any(job.HasField("do_update") for job in activation.jobs):
                way.end()

    monkeypatch.setattr(Task, "_apply", noted)
    monkeypatch.setattr(Activations, "run", ran)


@pytest.mark.slow(40)
@pytest.mark.server
async def test_contributing_lists_the_files_on_the_way_of_an_action(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(temporal=stack.temporal_address, mongo=stack.mongo_url)
    leave_undisturbed(harness, monkeypatch)
    way, handler = Way(), Endless()
    divide(way, monkeypatch)
    with way.recorded():
        await harness.engine()
        await harness.worker({"endless": handler})
        task = await harness.create(node("a", "endless"), node("b", "endless", "a"))
        for name in CHAIN:
            await asyncio.wait_for(handler.began.wait(), EVENT_TIMEOUT_SEC)
            handler.began.clear()
            way.note(name)
            await harness.coordinator.retry_node(task, "a", interrupt=True)
        await harness.coordinator.cancel_task(task)
        await harness.close()
    listed = documented(SECTION)
    answered = way.modules() - not_listed()
    assert answered == {*listed["an action"]}
    assert way.modules(REST) - not_listed() - answered == {*listed[REST]}


def test_the_way_of_an_action_is_no_longer_than_a_reader_can_follow() -> None:
    assert len(documented(SECTION)["an action"]) <= MOST_FILES
