"""Graphs that are too large for the input of a workflow: `create_task` stores them, and the workflow reads them."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowFailureError

from flowkit import limits
from flowkit.models import TaskStatus
from tests.integration.handlers import Quick
from tests.integration.harness import Harness, node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.server


def large(count: int = 40, chars: int = 50_000) -> list[dict[str, Any]]:
    """Return a chain whose nodes have random text, which compression does not shorten by much."""
    rng = random.Random(1)
    parents = [()] + [(f"n{index}",) for index in range(count - 1)]
    return [
        node(f"n{index}", "quick", *own, inline={"text": f"{rng.randrange(16**chars):x}"})
        for index, own in enumerate(parents)
    ]


async def finished(harness: Harness, task_id: str) -> dict[str, Any]:
    """Wait until the task has finished, and return its document."""
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    return await harness.document(task_id)


async def test_task_with_a_graph_of_several_parts_runs(harness: Harness) -> None:
    nodes = large()
    assert len(json.dumps(nodes)) > limits.TASK_INPUT_BYTES
    await harness.engine()
    await harness.worker({"quick": Quick()})
    task_id = await harness.create(*nodes)
    document = await finished(harness, task_id)
    assert {entry["status"] for entry in document["graph"]["nodes"]} == {"finished"}
    assert document["graph"]["nodes"][7]["io"] == nodes[7]["io"]
    assert await harness.db.stored_graphs.count_documents({"task_id": task_id}) > 1
