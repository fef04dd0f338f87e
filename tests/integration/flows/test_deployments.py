"""Two gateways in one namespace whose flows have the same ids: each starts, shows and cancels its own runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.flows.world import FlowWorld

pytestmark = pytest.mark.server


async def test_flows_with_equal_ids_in_two_deployments_share_nothing(
    world: FlowWorld, other_world: FlowWorld
) -> None:
    for each in (world, other_world):
        await each.start()
        await each.create({1: {"prerequisites": ["go"]}})
        begun = await each.call("flow.start", **each.own)
        assert (begun["started"], begun["run_id"]) == (True, each.run_id())
    assert world.run_id() != other_world.run_id()
    assert world.wire_id(1) != other_world.wire_id(1)
    assert (await other_world.call("flow.cancel", **other_world.own))["requested"] is True
    await other_world.until("Error")
    await world.call("node.satisfy", **world.own, prerequisite="go")
    await world.until("Finished")
    assert (other_world.supervisor.executions, world.supervisor.executions) == ({}, {world.wire_id(1): 1})


async def test_a_flow_adopts_and_cancels_no_workflow_that_has_the_id_of_its_run(world: FlowWorld) -> None:
    await world.start(runs_jobs=False)
    await world.create({1: {"prerequisites": ["go"]}})
    client = await world.harness.client()
    graph = {"nodes": [{"node_id": "a", "type": "approval"}]}
    foreign = {"params": {}, "graph": graph}
    handle = await client.start_workflow("Task", foreign, id=world.run_id(), task_queue=world.harness.queue)
    begun = await world.call("flow.start", **world.own)
    assert (begun["started"], begun["run_id"]) == (True, world.run_id("2"))
    assert (await world.call("flow.cancel", **world.own))["requested"] is True
    await world.until("Error")
    await world.harness.db.flows.update_one({}, {"$set": {"task_id": world.run_id()}})
    assert (await world.call("flow.cancel", **world.own))["requested"] is False
    await handle.terminate("the test has ended")
