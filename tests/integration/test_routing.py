"""Routing on real servers: targets, branches, remediators and handled failures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowFailureError

from flowkit.models import TaskStatus
from flowkit.worker import BatchResult
from tests.integration.handlers import ALL, Quick
from tests.integration.harness import Harness, node
from tests.integration.test_continue_as_new import histories, replay
from tests.integration.test_large_graphs import run_ids

if TYPE_CHECKING:
    from flowkit.worker import Batch
    from flowkit.worker.context import RunContext
    from flowkit.worker.runner import Worker

pytestmark = pytest.mark.server

BROKEN = {"failures": 9, "permanent": True}
NOOP = {"input_adapter": "noop"}


class Remedy(Quick):
    """Stores the failures that started its node."""

    role = "remedy"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the failures as `load_input` and the context show them."""
        loaded = batch.payload["failed_nodes"]
        return BatchResult(success=True, metrics={"loaded": loaded, "context": ctx.failed_nodes})


def routes(success: list[str] | None = None, failure: list[str] | None = None) -> dict[str, Any]:
    """Return the `routing` of a node."""
    return {"on_success": success or [], "on_failure": failure or []}


async def skip_reasons(harness: Harness, task_id: str) -> dict[str, str | None]:
    """Return the skip reason of each skipped node in the task document."""
    nodes = (await harness.document(task_id))["graph"]["nodes"]
    return {each["node_id"]: each["skip_reason"] for each in nodes if each["status"] == "skipped"}


def failed_node(worker: Worker, node_id: str, epoch: int, code: str = "flaky") -> dict[str, Any]:
    """Return what a remediator receives about a failure."""
    error = f"{code}: as ordered (worker {worker.worker_id}, version {worker.versions['failing']})"
    return {"node_id": node_id, "attempt_epoch": epoch, "reason_code": code, "error": error}


async def test_permanent_failure_starts_the_remediator_only(harness: Harness) -> None:
    await harness.engine()
    worker = await harness.worker({**ALL, "remedy": Remedy()})
    task_id = await harness.create(
        node("u", "failing", inline=BROKEN, routing=routes(["succ"], ["remed"])),
        node("succ"),
        node("remed", "remedy", inline=NOOP),
        node("behind", "quick", "succ", "remed"),
    )
    result = await harness.result(task_id)
    assert (result.status, result.handled_failures) == (TaskStatus.FINISHED, ["u"])
    expected = {"u": "failed", "succ": "skipped", "remed": "finished", "behind": "finished"}
    assert await harness.statuses(task_id) == expected
    assert await skip_reasons(harness, task_id) == {"succ": "routing"}
    assert (await harness.document(task_id))["result"]["handled_failures"] == ["u"]
    (row,) = await harness.rows(task_id, "remed")
    assert row["metrics"] == {
        "loaded": [failed_node(worker, "u", 1)],
        "context": [failed_node(worker, "u", 1)],
    }
    await replay(await histories(harness, task_id))


async def test_explicit_edges_take_precedence_over_on_success(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(
        node("src", routing=routes(["should_not_run"])),
        node("only_edges", "quick", "src"),
        node("should_not_run", "quick", "src"),
        edges=[["src", "only_edges"]],
    )
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    expected = {"src": "finished", "only_edges": "finished", "should_not_run": "skipped"}
    assert await harness.statuses(task_id) == expected
    assert await skip_reasons(harness, task_id) == {"should_not_run": "routing"}
    assert await harness.rows(task_id, "should_not_run") == []


async def test_success_takes_its_branch_and_skips_the_remediator(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(
        node("u", routing=routes(["succ"], ["remed"])),
        node("succ"),
        node("remed"),
        node("last", "quick", "remed"),
    )
    result = await harness.result(task_id)
    assert (result.status, result.handled_failures) == (TaskStatus.FINISHED, [])
    assert await skip_reasons(harness, task_id) == {"remed": "routing", "last": "routing"}


async def test_remediator_waits_for_the_last_retry_and_for_every_router(harness: Harness) -> None:
    await harness.engine()
    worker = await harness.worker({**ALL, "remedy": Remedy()})
    retries = {"max": 1, "backoff_sec": 0.1}
    task_id = await harness.create(
        node("a", "failing", inline={"failures": 9}, retry_policy=retries, routing=routes(failure=["remed"])),
        node("b", "failing", inline={**BROKEN, "code": "full"}, routing=routes(failure=["remed"])),
        node("remed", "remedy", inline={}),
    )
    result = await harness.result(task_id)
    assert (result.status, result.handled_failures) == (TaskStatus.FINISHED, ["a", "b"])
    (row,) = await harness.rows(task_id, "remed")
    assert row["metrics"]["context"] == [failed_node(worker, "a", 2), failed_node(worker, "b", 1, "full")]


async def test_failed_remediator_fails_the_task(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(
        node("u", "failing", inline=BROKEN, routing=routes(failure=["remed"])),
        node("remed", "failing", inline={**BROKEN, "code": "broken"}),
        node("aside", "paced", inline={"pause": 60}),
    )
    with pytest.raises(WorkflowFailureError):
        await harness.result(task_id)
    document = await harness.document(task_id)
    first = next(each for each in document["graph"]["nodes"] if each["node_id"] == "u")
    assert first["last_error"].startswith("flaky: as ordered (worker ")
    assert document["reason"] == f"node 'u' failed: {first['last_error']} (and 1 more failed nodes)"
    assert document["coordinator"]["cancel_reason"] == "hard_fail:broken"
    assert not (document.get("result") or {}).get("handled_failures")


async def test_coordinator_function_receives_the_failures_that_started_it(harness: Harness) -> None:
    received: list[Any] = []

    async def tell(task_id: str, failed_nodes: list[dict[str, Any]], channel: str) -> None:
        received.append((channel, failed_nodes))

    await harness.engine(tell=tell)
    worker = await harness.worker()
    task_id = await harness.create(
        node("u", "failing", inline=BROKEN, routing=routes(failure=["tell", "note"])),
        {"node_id": "tell", "type": "coordinator_fn", "io": {"fn": "tell", "fn_args": {"channel": "ops"}}},
        {"node_id": "note", "type": "coordinator_fn", "io": {"fn": "vars.set", "fn_args": {"kv": {"x": 1}}}},
    )
    assert (await harness.result(task_id)).handled_failures == ["u"]
    assert received == [("ops", [failed_node(worker, "u", 1)])]


async def test_cancel_while_the_remediator_runs_leaves_the_failure_unhandled(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(
        node("u", "failing", inline=BROKEN, routing=routes(failure=["remed"])),
        node("remed", "paced", inline={"pause": 60}),
    )
    await harness.until_node(task_id, "remed", "running")
    await (await harness.handle(task_id)).cancel()
    document = await harness.until_status(task_id, "cancelled")
    assert not (document.get("result") or {}).get("handled_failures")
    assert await harness.statuses(task_id) == {"u": "failed", "remed": "cancelled"}


async def test_routes_survive_new_runs_of_the_workflow(short_runs: Harness) -> None:
    await short_runs.engine()
    worker = await short_runs.worker({**ALL, "remedy": Remedy()})
    chain = [node("n0"), *(node(f"n{i}", "quick", f"n{i - 1}") for i in range(1, 25))]
    task_id = await short_runs.create(
        node("u", "failing", inline=BROKEN, routing=routes(["succ"], ["remed"])),
        node("succ"),
        node("remed", "remedy", "n24", inline={}),
        *chain,
    )
    result = await short_runs.result(task_id)
    assert (result.status, result.handled_failures) == (TaskStatus.FINISHED, ["u"])
    assert len(await run_ids(short_runs, task_id)) > 1
    (row,) = await short_runs.rows(task_id, "remed")
    assert row["metrics"]["context"] == [failed_node(worker, "u", 1)]
    assert await skip_reasons(short_runs, task_id) == {"succ": "routing"}
    await replay(await histories(short_runs, task_id))
