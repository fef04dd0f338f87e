"""Thousands of nodes with pulling children end together: FlowKit still writes all markers and the document."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowFailureError

from flowkit import limits
from flowkit.models import TaskStatus
from tests.integration.handlers import Failing, Paced
from tests.integration.world import node

if TYPE_CHECKING:
    from tests.integration.world import World

pytestmark = pytest.mark.server

LARGE = bool(os.environ.get("FLOWKIT_LARGE"))
NODES = 5_000 if LARGE else 1_000
"""`make large` runs the large case."""

WIDTH = 100
TIMEOUT_SEC = 300.0 if LARGE else 120.0
PULL = {"input_adapter": "pull.from_artifacts"}


def pulled(first: dict[str, Any]) -> list[dict[str, Any]]:
    """Return `first` and layers of nodes that each pull from a node of the previous layer."""
    nodes = [first]
    above = [first["node_id"]] * WIDTH
    while len(nodes) < NODES:
        layer = [f"n{len(nodes) + place}" for place in range(min(WIDTH, NODES - len(nodes)))]
        nodes += [node(name, "q", parent, inline=PULL) for name, parent in zip(layer, above, strict=False)]
        above = layer
    assert len(json.dumps({"nodes": nodes})) < limits.TASK_INPUT_BYTES
    return nodes


async def ended(world: World, task_id: str) -> dict[str, Any]:
    """Return the document of a task that did not finish."""
    with pytest.raises(WorkflowFailureError):
        await asyncio.wait_for((await world.handle(task_id)).result(), TIMEOUT_SEC)
    return await world.document(task_id)


async def markers(world: World, task_id: str) -> dict[str, int]:
    """Return the number of complete markers for each kind of end."""
    found: dict[str, int] = {}
    async for row in world.db.artifacts.find({"task_id": task_id, "status": "complete"}):
        found[row["meta"]["ended"]] = found.get(row["meta"]["ended"], 0) + 1
    return found


def sources(nodes: list[dict[str, Any]]) -> int:
    """Return the number of nodes that other nodes pull from."""
    return len({parent for each in nodes for parent in each["depends_on"]})


@pytest.mark.timeout(TIMEOUT_SEC + 60)
async def test_failure_of_one_node_ends_all_nodes_that_pull_from_it(world: World) -> None:
    await world.engine()
    await world.worker({"failing": Failing()})
    failing = node("first", "failing", inline={"failures": 9, "permanent": True})
    nodes = pulled(failing)
    task_id = await world.create(*nodes, on_node_failure="continue")
    document = await ended(world, task_id)
    assert document["status"] == TaskStatus.FAILED
    statuses = [each["status"] for each in document["graph"]["nodes"]]
    assert (statuses[0], set(statuses[1:])) == ("failed", {"skipped"})
    assert await markers(world, task_id) == {"failed": 1, "skipped": sources(nodes) - 1}


@pytest.mark.timeout(TIMEOUT_SEC + 60)
async def test_cancel_ends_all_pulling_nodes(world: World) -> None:
    await world.engine()
    await world.worker({"paced": Paced()})
    nodes = pulled(node("first", "paced", inline={"batches": 2, "pause": 600}))
    task_id = await world.create(*nodes)
    await world.until_node(task_id, "first", "running")
    begun = time.monotonic()
    await world.coordinator.cancel_task(task_id, reason="enough")
    document = await ended(world, task_id)
    assert document["status"] == TaskStatus.CANCELLED
    assert {each["status"] for each in document["graph"]["nodes"]} == {"cancelled", "skipped"}
    assert await markers(world, task_id) == {"cancelled": 1, "skipped": sources(nodes) - 1}
    assert time.monotonic() - begun < TIMEOUT_SEC
