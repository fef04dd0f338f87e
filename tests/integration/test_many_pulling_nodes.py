"""Thousands of nodes with pulling children end together: FlowKit still writes all markers and the document."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowFailureError

from flowkit import limits
from flowkit.models import TaskStatus
from tests.integration.handlers import Failing, Paced
from tests.integration.harness import node

if TYPE_CHECKING:
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

LARGE = bool(os.environ.get("FLOWKIT_LARGE"))
NODES = 5_000 if LARGE else 1_000
"""`make large` runs the large case."""

WIDTH = 100
TIMEOUT_SEC = 900.0 if LARGE else 300.0
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


async def ended(harness: Harness, task_id: str) -> dict[str, Any]:
    """Return the document of a task that did not finish."""
    with pytest.raises(WorkflowFailureError):
        await asyncio.wait_for((await harness.handle(task_id)).result(), TIMEOUT_SEC)
    return await harness.document(task_id)


async def markers(harness: Harness, task_id: str) -> dict[str, int]:
    """Return the number of complete markers for each kind of end."""
    found: dict[str, int] = {}
    async for row in harness.db.artifacts.find({"task_id": task_id, "status": "complete"}):
        found[row["meta"]["ended"]] = found.get(row["meta"]["ended"], 0) + 1
    return found


def sources(nodes: list[dict[str, Any]]) -> int:
    """Return the number of nodes that other nodes pull from."""
    return len({parent for each in nodes for parent in each["depends_on"]})


@pytest.mark.timeout(TIMEOUT_SEC + 60)
async def test_failure_of_one_node_ends_all_nodes_that_pull_from_it(harness: Harness) -> None:
    await harness.engine()
    await harness.worker({"failing": Failing()})
    failing = node("first", "failing", inline={"failures": 9, "permanent": True})
    nodes = pulled(failing)
    task_id = await harness.create(*nodes, on_node_failure="continue")
    document = await ended(harness, task_id)
    assert document["status"] == TaskStatus.FAILED
    statuses = [each["status"] for each in document["graph"]["nodes"]]
    assert (statuses[0], set(statuses[1:])) == ("failed", {"skipped"})
    assert await markers(harness, task_id) == {"failed": 1, "skipped": sources(nodes) - 1}


@pytest.mark.timeout(TIMEOUT_SEC + 60)
async def test_cancel_ends_all_pulling_nodes(harness: Harness) -> None:
    await harness.engine()
    await harness.worker({"paced": Paced()})
    nodes = pulled(node("first", "paced", inline={"batches": 2, "pause": 600}))
    task_id = await harness.create(*nodes)
    await harness.until_node(task_id, "first", "running")
    await harness.coordinator.cancel_task(task_id, reason="enough")
    document = await ended(harness, task_id)
    assert document["status"] == TaskStatus.CANCELLED
    assert {each["status"] for each in document["graph"]["nodes"]} == {"cancelled", "skipped"}
    assert await markers(harness, task_id) == {"cancelled": 1, "skipped": sources(nodes) - 1}
