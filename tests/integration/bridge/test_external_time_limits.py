"""Deadlines and heartbeat rules of nodes that external workers run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowFailureError

from flowkit.models import TaskStatus
from flowkit.testing.external import Final, Misbehavior, Result
from tests.integration.bridge.reading import until_signals
from tests.integration.bridge.test_cancel import BLIND, outcome, waiting
from tests.integration.harness import node
from tests.integration.test_silence import until_liveness

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.bridge.external_tasks import ExternalTasks

pytestmark = pytest.mark.server

LONG_LEASE = {"lease_ttl_sec": 40.0}


async def test_external_worker_is_signalled_at_the_deadline_of_its_node_only(external: ExternalTasks) -> None:
    await external.served_engine()
    reasons: list[str | None] = []

    async def watching(run: Any) -> AsyncIterator[Any]:
        yield Result({"number": 0}, "b0")
        await run.cancel_flag.wait()
        reasons.append(run.cancel_reason)
        await run.raise_if_cancelled()

    async def steady(run: Any) -> AsyncIterator[Any]:
        yield Final({"total": 1})

    worker = await external.external(watching, db_cancel_poll_ms=BLIND)
    await external.external(steady, steady, roles=[external.other_role])
    task_id = await external.create(
        node("slow", external.role, deadline_sec=10, allow_failure=True),
        node("behind", external.other_role, "slow", fan_in="any"),
        node("aside", external.other_role),
    )
    await worker.wait_for("CANCELLED")
    result = await external.result(task_id)
    assert (result.status, result.handled_failures) == (TaskStatus.FINISHED, ["slow"])
    assert reasons == ["deadline"]
    entry = await external.node(task_id, "slow")
    (first, *_) = await until_signals(external, "slow", bool)
    assert first["payload"]["reason"] == "deadline"
    assert (await outcome(external, task_id, "slow"))["kind"] == "cancelled"
    assert entry["last_error"].startswith("deadline_exceeded: the node took longer than 10 s")
    expected = {"slow": "failed", "behind": "skipped", "aside": "finished"}
    assert await external.statuses(task_id) == expected


async def test_attempt_of_an_external_worker_ends_at_its_time_limit(external: ExternalTasks) -> None:
    await external.served_engine()
    worker = await external.external(waiting, db_cancel_poll_ms=BLIND)
    task_id = await external.create(node("n", external.role, timeout_sec=8, retry_policy={"max": 0}))
    with pytest.raises(WorkflowFailureError):
        await external.result(task_id)
    error = (await external.node(task_id, "n"))["last_error"]
    assert error == "timeout: the attempt took longer than 8 s (timeout_sec)"
    await worker.wait_for("CANCELLED")


@pytest.mark.slow
async def test_silent_external_worker_defers_the_task_and_then_fails_it(external: ExternalTasks) -> None:
    """H33 below the lease: the bridge sends heartbeats to Temporal, but the worker sends none."""
    external.settings |= {"heartbeat_soft_sec": 7, "heartbeat_hard_sec": 10}
    await external.served_engine()
    silent = Misbehavior(silence=True)
    worker = await external.external(waiting, misbehavior=silent, **LONG_LEASE)
    task_id = await external.create(node("n", external.role))
    await worker.wait_for("TASK_ACCEPTED")
    document = await until_liveness(external, task_id, "silent")
    assert (document["status"], (await external.node(task_id, "n"))["liveness"]) == ("deferred", "silent")
    with pytest.raises(WorkflowFailureError):
        await external.result(task_id)
    document = await external.document(task_id)
    limit = "the attempt sent no heartbeat for 10 s (heartbeat_hard_sec)"
    assert document["reason"] == f"node 'n' failed: heartbeat_timeout: {limit}"
    assert document["coordinator"]["liveness"] == {"state": "dead"}
