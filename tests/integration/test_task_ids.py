"""`create_task` with the id of another task: equal input returns the id, different input is refused and named."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.errors import TaskIdTaken
from flowkit.models import temporal_names
from tests.integration.harness import node

if TYPE_CHECKING:
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

GRAPH: dict[str, Any] = {"nodes": [node("a", "coordinator_fn")], "edges": []}
SAME: dict[str, Any] = {"edges": [], "nodes": [dict(reversed(GRAPH["nodes"][0].items()))]}
OTHER: dict[str, Any] = {"nodes": [node("other", "coordinator_fn")]}


async def refused(harness: Harness, task_id: str, params: Any, graph: Any, named: str) -> None:
    """Check that another input is refused, and that nothing has changed."""
    before = await harness.db.tasks.find_one({"id": task_id})
    with pytest.raises(TaskIdTaken, match=f"started with {named}; choose another id"):
        await harness.coordinator.create_task(params=params, graph=graph, task_id=task_id)
    assert await harness.db.tasks.find_one({"id": task_id}) == before


async def test_id_of_a_task_belongs_to_the_input_with_which_it_started(harness: Harness) -> None:
    task_id, params = f"day-{uuid.uuid4().hex[:8]}", {"day": 1, "tags": ["a"]}
    create = harness.coordinator.create_task
    assert await create(params=params, graph=GRAPH, task_id=task_id) == task_id
    equal = {"tags": ("a",), "day": 1.0}
    assert await create(params=equal, graph=SAME, task_id=task_id) == task_id
    await refused(harness, task_id, {"day": 2}, GRAPH, "other params")

    await harness.db.tasks.delete_one({"id": task_id})  # as if the caller that started it were killed
    await refused(harness, task_id, params, OTHER, "another graph")
    assert await create(params=equal, graph=SAME, task_id=task_id) == task_id
    assert (await harness.document(task_id))["params"] == equal | {"tags": ["a"]}

    await harness.engine()
    await harness.until_status(task_id, "finished")
    await refused(harness, task_id, {}, OTHER, "other params and another graph")
    document = await harness.db.tasks.find_one_and_delete({"id": task_id})  # as if it were purged
    await refused(harness, task_id, {}, GRAPH, "other params")
    await harness.db.tasks.insert_one(document)
    await harness.coordinator.rerun(task_id, ["a"], params={"day": 3})
    await harness.result(task_id)
    assert (await harness.document(task_id))["params"]["day"] == 3
    assert await create(params=params, graph=GRAPH, task_id=task_id) == task_id
    await harness.db.tasks.delete_one({"id": task_id})  # the workflow of a rerun knows the first input, too
    await refused(harness, task_id, {"day": 3}, GRAPH, "other params")


async def test_task_that_temporals_client_started_and_that_failed_keeps_its_id(harness: Harness) -> None:
    async def fails(task_id: str) -> None:
        raise ValueError("as it should")

    await harness.engine(fails=fails)
    task_id = f"bare-{uuid.uuid4().hex[:8]}"
    graph = {"nodes": [node("a", "coordinator_fn", io={"fn": "fails"}, retry_policy={"max": 0})]}
    await (await harness.client()).start_workflow(
        temporal_names.TASK, {"params": {}, "graph": graph}, id=task_id, task_queue=harness.queue
    )
    await harness.until_status(task_id, "failed")
    await refused(harness, task_id, {}, GRAPH, "another graph")
