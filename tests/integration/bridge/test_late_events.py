"""Events that are late, repeated, out of order, of another epoch, or sent without a request."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.testing import Misbehavior
from flowkit.testing.external import Result
from tests.integration.bridge.checks import (
    NO_RETRY,
    batch_uids,
    check_finished,
    delay_events,
    outcomes,
    until_processed,
    until_sent,
)
from tests.integration.bridge.gates import Gate
from tests.integration.harness import eventually, node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.bridge.external_tasks import ExternalTasks

pytestmark = pytest.mark.server

LATE = ("TASK_HEARTBEAT", "BATCH_OK", "TASK_DONE", "TASK_FAILED", "CANCELLED")


def opened() -> Any:
    """Return the handler of an open gate: two batches and final metrics."""
    gate = Gate()
    gate.open()
    return gate.handler


async def started(external: ExternalTasks, **fields: Any) -> str:
    """Start a task of one external node `n`, which may not use a retry."""
    return await external.create(node("n", external.role, **{"retry_policy": NO_RETRY, **fields}))


async def test_events_after_the_end_change_nothing(external: ExternalTasks) -> None:
    """H17, all kinds: neither of the node that ended, nor of the node that depends on it."""
    await external.served_engine()
    gate = Gate()
    worker = await external.external(
        opened(), gate.handler, misbehavior=Misbehavior(after_end=LATE), worker_id="late"
    )
    task_id = await external.create(
        node("n", external.role, retry_policy=NO_RETRY), node("next", external.other_role, "n")
    )
    await worker.wait_for("BATCH_OK", node="next")
    await until_processed(external)
    before = await external.node(task_id, "n")
    gate.open()
    assert (await external.result(task_id)).status == "finished"
    assert await outcomes(external, task_id) == ["done"]
    assert await batch_uids(external, task_id) == ["b0", "b1"]
    assert before["status"] == (await external.node(task_id, "n"))["status"] == "finished"


async def test_events_of_a_failed_epoch_do_not_end_the_next_one(external: ExternalTasks) -> None:
    """H17, stale epochs: all kinds of events of epoch 1 arrive while epoch 2 runs."""
    await external.served_engine()
    gate = Gate()

    async def fails_once(run: Any) -> AsyncIterator[Any]:
        if run.attempt_epoch == 1:
            yield Result(batch_uid="b0", success=False, reason_code="first")
        async for each in gate.handler(run):
            yield each

    worker = await external.external(fails_once, misbehavior=Misbehavior(after_end=LATE))
    policy = {"max": 1, "backoff_sec": 0.1}
    task_id = await started(external, retry_policy=policy)
    await worker.wait_for("BATCH_OK", epoch=2)
    for entry in [each for each in worker.sent_for("n") if each.attempt_epoch == 1]:
        await worker.send_raw(entry.topic, entry.value, entry.key)
    await until_processed(external)
    assert await outcomes(external, task_id) == ["first", "open"]
    gate.open()
    assert (await external.result(task_id)).status == "finished"
    assert await outcomes(external, task_id) == ["first", "done"]
    assert (await external.node(task_id, "n"))["attempt_epoch"] == 2


async def test_cancelled_without_a_request_uses_one_retry(external: ExternalTasks) -> None:
    """H13."""
    await external.served_engine()
    worker = await external.external(opened(), misbehavior=Misbehavior(leak_cancel_at=1))
    task_id = await started(external, retry_policy={"max": 1, "backoff_sec": 0.1})
    await worker.wait_for("CANCELLED", epoch=1)
    worker.misbehavior.reset()
    assert (await external.result(task_id)).status == "finished"
    assert await outcomes(external, task_id) == ["cancelled", "done"]
    assert await batch_uids(external, task_id) == ["b0", "b1"]


async def test_cancelled_without_a_request_fails_a_node_without_retries(external: ExternalTasks) -> None:
    """H13: it is a failure, so there is no endless loop of new attempts."""
    await external.served_engine()
    await external.external(opened(), misbehavior=Misbehavior(leak_cancel_at=0))
    task_id = await started(external)
    await external.until_status(task_id, "failed")
    assert "cancelled_by_worker" in str(await external.node(task_id, "n"))
    assert len(await external.dispatches(task_id)) == 1


async def test_events_of_a_stale_epoch_are_ignored_and_the_command_is_sent_again(
    external: ExternalTasks,
) -> None:
    """H3, stale epochs: every event of the worker names the epoch before."""
    await external.served_engine()
    worker = await external.external(opened(), misbehavior=Misbehavior(epoch_shift=-1))
    task_id = await started(external)
    await worker.wait_for("idle")
    worker.misbehavior.reset()
    await check_finished(external, task_id, ["dispatch_lost", "done"])


async def test_duplicated_events_count_once(external: ExternalTasks) -> None:
    """H16."""
    await external.served_engine()
    await external.external(opened(), misbehavior=Misbehavior(duplicate_events=3))
    await check_finished(external, await started(external), ["done"])


async def test_batches_that_overtake_the_acceptance_start_the_run(external: ExternalTasks) -> None:
    """Reordered events."""
    await external.served_engine()
    reorder = Misbehavior(silence=True, reorder_events=3)
    worker = await external.external(opened(), misbehavior=reorder)
    await check_finished(external, await started(external), ["done"])
    kinds = [entry.kind for entry in worker.sent_for("n")]
    assert kinds == ["BATCH_OK", "BATCH_OK", "TASK_ACCEPTED", "TASK_DONE"]


async def test_lease_that_passes_while_the_bridge_is_down_is_judged_after_the_events(
    external: ExternalTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delayed events, H6: the worker finishes while no bridge runs, and the next bridge reads its events late."""
    await external.served_engine()
    gate = Gate()
    worker = await external.external(gate.handler, lease_ttl_sec=1.0)
    task_id = await started(external)
    await worker.wait_for("BATCH_OK")
    await until_processed(external)
    processing = threading.Event()
    delay_events(monkeypatch, processing)
    await external.coordinator.stop()
    gate.open()
    await worker.wait_for("idle")
    await worker.wait_for("WORKER_ONLINE", count=5)
    await external.coordinator.start()
    await _until_suspected(external)
    assert await outcomes(external, task_id) == ["open"]
    processing.set()
    await check_finished(external, task_id, ["done"])


async def test_command_accepted_while_the_bridge_is_down_is_judged_after_the_events(
    external: ExternalTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delayed events, H2: the worker has read the command, and its acceptance is not processed yet."""
    await external.served_engine()
    task_id = await started(external)
    await until_sent(external, task_id)
    processing = threading.Event()
    delay_events(monkeypatch, processing)
    await external.coordinator.stop()
    worker = await external.external(opened())
    await worker.wait_for("idle")
    await external.coordinator.start()
    await _until_suspected(external)
    assert await outcomes(external, task_id) == ["open"]
    processing.set()
    await check_finished(external, task_id, ["done"])


async def _until_suspected(external: ExternalTasks) -> None:
    """Wait until the bridge suspects every attempt that it supervises."""

    async def look() -> bool:
        attempts = [*external.bridge.supervisor._attempts.values()]
        return bool(attempts) and all(attempt.unread_until for attempt in attempts)

    await eventually(look)
