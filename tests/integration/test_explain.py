"""`flowkit explain` on a task with a failed attempt, an approval, a killed worker and, at last, without its history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import DeleteWorkflowExecutionRequest

from tests.integration.handlers import Gated
from tests.integration.harness import eventually, node
from tests.integration.test_handler_versions import printed

if TYPE_CHECKING:
    from tests.integration.harness import Harness

RETRY = {"retry_policy": {"max": 1, "backoff_sec": 0.3}}
LEASE_SEC = 2.0


def check_sums(report: dict[str, Any]) -> None:
    """Check that the parts sum to the whole, and the legs of the path follow each other."""
    assert sum(report["parts"].values()) == pytest.approx(report["seconds"], abs=0.001)
    bounds = [at for leg in report["path"] for at in (leg["since"], leg["until"])]
    assert bounds[0] == 0
    assert bounds[-1] == pytest.approx(report["seconds"], abs=0.001)
    assert bounds[1:-1:2] == bounds[2::2]
    assert min(report["parts"].values()) >= 0


async def delete_history(harness: Harness, task_id: str) -> None:
    """Delete the workflow of a task, as Temporal does after its retention."""
    client = await harness.client()
    execution = WorkflowExecution(workflow_id=task_id)
    request = DeleteWorkflowExecutionRequest(namespace=client.namespace, workflow_execution=execution)
    await client.workflow_service.delete_workflow_execution(request)

    async def is_gone() -> bool:
        return not (await printed(harness, "attempts", task_id))["complete"]

    await eventually(is_gone)


async def test_retries_approvals_and_kills_are_parts_of_the_time_of_a_task(harness: Harness) -> None:
    harness.settings |= {"lease_ttl_sec": LEASE_SEC}
    await harness.engine()
    await harness.worker()
    killed = harness.worker_process("Gated")
    task_id = await harness.create(
        node("load", "failing", inline={"failures": 1}, **RETRY),
        node("check", "approval", "load"),
        node("clean", "gated", "check"),
        node("side", "paced", inline={"pause": 0.05}),
    )
    await harness.until_node(task_id, "check", "deferred", epoch=0)
    asked = await printed(harness, "explain", task_id)
    check_sums(asked)
    assert asked["open"]
    assert "Node check is deferred: waits for a decision: approve or reject." in asked["waits_for"]
    assert [leg["node_id"] for leg in asked["path"]] == ["load", "check"]

    await harness.coordinator.decide(task_id, "check", "approve")
    await harness.until_node(task_id, "clean", "running")
    begun = {"task_id": task_id, "node_id": "clean"}
    await eventually(lambda: harness.db.worker_events.find_one(begun))
    killed.kill()
    killed.wait(10)
    opened = Gated()
    opened.gate.set()
    await harness.worker({"gated": opened})
    await harness.result(task_id)
    await harness.until_status(task_id, "finished")

    found = await printed(harness, "explain", task_id)
    check_sums(found)
    assert (found["waits_for"], found["missing"]) == ("", [])
    assert [leg["node_id"] for leg in found["path"]] == ["load", "check", "clean", None]
    load, check, clean = (leg["parts"] for leg in found["path"][:3])
    assert 0.25 < load["retry_waits"] < load["retry_waits"] + load["failed_work"] + load["work"]
    assert [*check] == ["people"]
    assert clean["failed_work"] > LEASE_SEC / 2
    first = found["speed_ups"][0]
    assert (first["node_id"], first["gain"]) == ("clean", first["work"])
    shown = await harness.command("explain", task_id)
    assert f"task {task_id}: finished, took " in shown
    assert "failed attempts" in shown

    await delete_history(harness, task_id)
    kept = await printed(harness, "explain", task_id)
    check_sums(kept)
    assert "Temporal no longer has the history of this task" in kept["missing"][0]
    assert kept["seconds"] == pytest.approx(found["seconds"], abs=0.1)
    assert kept["parts"]["people"] > 0
