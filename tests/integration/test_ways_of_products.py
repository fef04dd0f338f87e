"""A page lists the modules that run for a task, a request of an admission queue and a job of a flow."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from flowkit import Admission
from flowkit.admission.process import AdmissionProcess, AdmissionSettings
from tests.integration.flows.world import FlowWorld
from tests.integration.handlers import Quick
from tests.integration.harness import Harness, eventually, node
from tests.tools.way_of_a_node import CHAIN, Way, documented, leave_undisturbed, not_listed

if TYPE_CHECKING:
    from flowkit.local import Stack

pytestmark = pytest.mark.server

SECTION = "The ways of a task, a request and a job"


class Inline(Quick):
    """The same inside the engine."""

    inline = True


GRAPH = {"nodes": [node("only", "inline")]}
OF_CALLERS = {"src/flowkit/testing/supervisor.py", "src/flowkit/gateway/client.py"}
"""The supervisor and the caller of the test, which are not on the way: any programs can take their places."""


async def task(harness: Harness, way: Way) -> None:
    """Run tasks of one node, one after the other."""
    await harness.engine({"inline": Inline()})
    for name in CHAIN:
        way.note(name)
        task = await harness.coordinator.create_task(params={}, graph=GRAPH)
        await harness.coordinator.result(task)


async def request(harness: Harness, way: Way) -> None:
    """Submit tasks of one node to an admission queue, one after the other."""
    await harness.engine({"inline": Inline()})
    process = AdmissionProcess(
        db=harness.db, client=await harness.client(), settings=AdmissionSettings(queue=harness.queue)
    )
    await process.start()
    try:
        for name in CHAIN:
            way.note(name)
            task = await harness.coordinator.create_task(
                params={}, graph=GRAPH, admit=Admission(user_id="dora")
            )
            await harness.coordinator.result(task)
    finally:
        await process.stop()


async def job(harness: Harness, way: Way) -> None:
    """Start a flow with one job again and again."""
    async with FlowWorld(harness) as world:
        await world.start()
        await world.create({501: {}})
        for number, name in enumerate(CHAIN, 1):
            way.note(name)
            await world.call("flow.start", **world.own)
            await eventually(partial(has_finished, world, world.run_id(str(number))))


async def has_finished(world: FlowWorld, run_id: str) -> bool:
    state = await world.call("flow.status", **world.own)
    return bool(state["run_id"] == run_id and state["status"] == "Finished")


@pytest.mark.parametrize(("kind", "play"), [("a task", task), ("a request", request), ("a job", job)])
async def test_contributing_lists_the_files_on_the_way_of(
    kind: str, play: Any, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(temporal=stack.temporal_address, mongo=stack.mongo_url)
    leave_undisturbed(harness, monkeypatch)
    monkeypatch.setenv("SUPERVISOR_SECRET", FlowWorld.SECRET)
    way = Way()
    with way.recorded():
        await play(harness, way)
        await harness.close()
    ways = documented(SECTION)
    known = [*documented().values(), *([ways["a task"]] if kind != "a task" else [])]
    others = not_listed() | OF_CALLERS | {file for files in known for file in files}
    assert way.modules() - others == set(ways[kind])
