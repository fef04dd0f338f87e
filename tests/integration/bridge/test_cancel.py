"""Cancels of nodes that external workers run: flags and signals, and what a worker may send afterwards."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.models import TaskStatus
from flowkit.testing.external import Final, Misbehavior, Result
from tests.integration.bridge.external_tasks import codes
from tests.integration.bridge.gates import Gate
from tests.integration.bridge.reading import signals, until_signals
from tests.integration.harness import eventually, node
from tests.integration.test_cancel_terminate_reset import cancelled, reset

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.testing import ExternalWorker
    from tests.integration.bridge.external_tasks import ExternalTasks
    from tests.kafka_server import Broker

pytestmark = pytest.mark.server

ONCE: dict[str, Any] = {"retry_policy": {"max": 0}}
BLIND = 3_600_000
"""Milliseconds between two looks of a worker at the cancel flags: it learns of cancels by signals only."""


async def waiting(run: Any) -> AsyncIterator[Any]:
    """Yield a batch, then wait for the cancel."""
    yield Result({"number": 0}, "b0")
    await run.cancellable(asyncio.Event().wait())


async def disobedient(run: Any) -> AsyncIterator[Any]:
    """Yield a batch, wait for the cancel, and finish nevertheless."""
    yield Result({"number": 0}, "b0")
    await run.cancel_flag.wait()
    yield Final({"total": 1})


async def failing(run: Any) -> AsyncIterator[Any]:
    """Yield a batch, wait for the cancel, and fail."""
    yield Result({"number": 0}, "b0")
    await run.cancel_flag.wait()
    raise ConnectionError("the source is gone")


async def running(external: ExternalTasks, *handlers: Any, **options: Any) -> tuple[str, ExternalWorker]:
    """Start a task of one external node, and wait for its first batch. The worker only learns of signals."""
    await external.served_engine()
    worker = await external.external(*handlers, db_cancel_poll_ms=BLIND, **options)
    task_id = await external.create(node("extract", external.role, **ONCE))
    await external.until_batches(task_id, "extract", 1)
    return task_id, worker


async def outcome(external: ExternalTasks, task_id: str, node_id: str = "extract", epoch: int = 1) -> Any:
    """Wait until the outcome of an attempt is reported, and return it."""

    async def look() -> Any:
        record = await external.dispatch(task_id, node_id, epoch)
        return record["outcome"] if record["state"] == "reported" else None

    return await eventually(look)


async def created_again(external: ExternalTasks, task_id: str, node_id: str) -> None:
    """Delete the document of a closed task, and create a task with the same id."""
    await external.db.tasks.delete_one({"id": task_id})
    graph = {"nodes": [node(node_id, external.role, **ONCE)]}
    await external.coordinator.create_task(params={}, graph=graph, task_id=task_id)


async def test_cancel_flags_are_set_before_the_first_signal(external: ExternalTasks) -> None:
    """H10."""
    seen: list[Any] = []

    async def watching(run: Any) -> AsyncIterator[Any]:
        yield Result({"number": 0}, "b0")
        await run.cancel_flag.wait()
        seen.append((run.cancel_reason, await external.document(run.task_id)))
        await run.raise_if_cancelled()

    task_id, worker = await running(external, watching)
    assert await external.coordinator.cancel_task(task_id, reason="budget is spent")
    await worker.wait_for("CANCELLED")
    ((reason, document),) = seen
    assert reason == "budget is spent"
    assert document["coordinator"]["cancelled"] is True
    (extract,) = document["graph"]["nodes"]
    assert (extract["status"], extract["coordinator"]["cancelled"]) == ("cancelling", True)
    assert (await cancelled(external, task_id))["status"] == "cancelled"
    assert await external.statuses(task_id) == {"extract": "cancelled"}
    assert (await outcome(external, task_id))["worker_id"] == worker.worker_id


async def test_cancel_signals_name_worker_epoch_and_deadline_and_are_repeated(
    external: ExternalTasks,
) -> None:
    """H10: the signals end with the terminal event of the worker."""
    external.settings["cancel_grace_sec"] = 60
    task_id, worker = await running(external, waiting, misbehavior=Misbehavior(hold=("CANCELLED",)))
    await external.coordinator.cancel_task(task_id)
    sent = await until_signals(external, "extract", lambda found: len(found) >= 3)
    assert {each["target_worker_id"] for each in sent} == {worker.worker_id}
    assert {each["payload"]["reason"] for each in sent} == {"user_request"}
    assert all(each["payload"]["deadline_ts_ms"] > each["ts_ms"] for each in sent)
    await worker.release()
    await cancelled(external, task_id)
    assert (await outcome(external, task_id))["worker_id"] == worker.worker_id
    assert external.bridge.supervisor.attempts == 0


async def test_worker_that_ignores_its_cancel_is_abandoned_after_the_grace_period(
    external: ExternalTasks,
) -> None:
    """H10."""
    external.settings["cancel_grace_sec"] = 8
    task_id, worker = await running(external, disobedient, misbehavior=Misbehavior(no_terminal=True))
    await external.coordinator.cancel_task(task_id)
    assert (await cancelled(external, task_id))["status"] == "cancelled"
    assert len(await signals(external, "extract")) >= 2
    ended = await outcome(external, task_id)
    assert (ended["kind"], ended["worker_id"]) == ("cancelled", "")
    assert worker.sent_for("extract", "TASK_DONE") == []


@pytest.mark.parametrize(("handler", "kind"), [(disobedient, "TASK_DONE"), (failing, "TASK_FAILED")])
async def test_every_end_after_a_cancel_request_counts_as_cancelled(
    external: ExternalTasks, handler: Any, kind: str
) -> None:
    """H11."""
    task_id, worker = await running(external, handler)
    await external.coordinator.cancel_task(task_id)
    await worker.wait_for(kind)
    assert (await cancelled(external, task_id))["status"] == "cancelled"
    ended = await outcome(external, task_id)
    assert (ended["kind"], ended["worker_id"]) == ("cancelled", worker.worker_id)
    assert await external.statuses(task_id) == {"extract": "cancelled"}
    assert await external.db.metrics_raw.count_documents({"task_id": task_id, "batch_uid": "__final__"}) == 0
    assert len(await external.rows(task_id, "extract")) == 1


@pytest.mark.parametrize("handler", [disobedient, failing])
async def test_end_of_a_worker_that_sees_the_flag_before_the_bridge_counts_as_cancelled(
    external: ExternalTasks, kafka: Broker, handler: Any
) -> None:
    """H11."""
    unused = f"{external.names.prefix}-unused"
    await kafka.create_topics(unused)
    await external.served_engine()
    worker = await external.external(handler, db_cancel_poll_ms=5, topic_signals=unused)
    task_id = await external.create(node("extract", external.role, **ONCE))
    await external.until_batches(task_id, "extract", 1)
    await external.coordinator.cancel_task(task_id)
    await cancelled(external, task_id)
    assert worker.runs[0].cancel_reason == "db_flag"
    assert (await outcome(external, task_id))["kind"] == "cancelled"
    assert await external.statuses(task_id) == {"extract": "cancelled"}


async def test_command_that_no_worker_has_read_is_cancelled_at_once(external: ExternalTasks) -> None:
    """H10: without a worker, nothing has to be stopped."""
    external.settings["cancel_grace_sec"] = 600
    await external.served_engine()
    task_id = await external.create(node("extract", external.role, **ONCE))
    await external.dispatch(task_id, "extract")
    await external.until_node(task_id, "extract", "running")
    await external.coordinator.cancel_task(task_id)
    await cancelled(external, task_id)
    assert (await outcome(external, task_id))["kind"] == "cancelled"


@pytest.mark.parametrize("again", [reset, created_again], ids=["reset", "created again"])
async def test_queued_command_of_a_cancelled_run_does_not_disturb_the_next_run(
    external: ExternalTasks, again: Any
) -> None:
    """H12, H25: the worker reads the outdated command first, and gets a cancel signal for its epoch only."""
    external.settings |= {"kafka_cmd_partitions": 1, "cancel_grace_sec": 600}
    await external.served_engine()
    task_id = await external.create(node("extract", external.role, **ONCE))
    await external.until_node(task_id, "extract", "running")
    await external.coordinator.cancel_task(task_id)
    await cancelled(external, task_id)
    await again(external, task_id, "extract")
    await external.until_node(task_id, "extract", "running", epoch=2)
    gate = Gate()
    worker = await external.external(gate.handler)
    stale = await worker.wait_for("cancel_requested", epoch=1)
    assert stale.reason == "stale_epoch"
    await worker.wait_for("TASK_ACCEPTED", epoch=2)
    gate.open()
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    (row_0, row_1) = await external.rows(task_id, "extract")
    assert {row_0["attempt_epoch"], row_1["attempt_epoch"]} == {2}
    assert [r["attempt_epoch"] for r in await external.dispatches(task_id)] == [1, 2]
    assert [entry.kind for entry in worker.entries if entry.kind == "cancel_requested"] == [
        "cancel_requested"
    ]


async def test_direct_write_of_the_flag_cancels_task_and_worker(external: ExternalTasks) -> None:
    """H10: the worker sees the flag itself, and the bridge makes Temporal cancel the task."""
    await external.served_engine()
    worker = await external.external(waiting)
    task_id = await external.create(node("extract", external.role, **ONCE))
    await external.until_batches(task_id, "extract", 1)
    await external.db.tasks.update_one({"id": task_id}, {"$set": {"coordinator.cancelled": True}})
    document = await cancelled(external, task_id)
    assert document["coordinator"]["cancel_reason"] == "db_flag"
    await worker.wait_for("CANCELLED")
    ended = await outcome(external, task_id)
    assert (ended["kind"], ended["worker_id"]) == ("cancelled", worker.worker_id)
    assert [r["attempt_epoch"] for r in await external.dispatches(task_id)] == [1]


async def test_hard_failure_of_a_sibling_cancels_the_external_node(external: ExternalTasks) -> None:
    """H10, H12."""
    await external.served_engine()
    await external.worker()
    worker = await external.external(waiting, db_cancel_poll_ms=BLIND)
    task_id = await external.create(
        node("extract", external.role, **ONCE),
        node("start", "paced", inline={"pause": 2}),
        node("bad", "failing", "start", inline={"failures": 9, "permanent": True}, **ONCE),
    )
    assert (await external.until_status(task_id, "failed"))["status"] == "failed"
    await worker.wait_for("CANCELLED", node="extract")
    await external.until_node(task_id, "extract", "cancelled")
    assert (await outcome(external, task_id))["kind"] == "cancelled"
    assert await external.statuses(task_id) == {"extract": "cancelled", "start": "finished", "bad": "failed"}


async def test_bridge_that_starts_during_a_cancel_continues_it(external: ExternalTasks) -> None:
    """H10."""
    external.settings |= {"cancel_grace_sec": 60, "lease_ttl_sec": 2}
    task_id, worker = await running(external, waiting, misbehavior=Misbehavior(hold=("CANCELLED",)))
    await external.coordinator.cancel_task(task_id)
    await worker.wait_for("held", node="extract")
    await external.coordinator.restart()
    await worker.release()
    assert (await cancelled(external, task_id))["status"] == "cancelled"
    assert (await outcome(external, task_id))["kind"] == "cancelled"
    assert await external.statuses(task_id) == {"extract": "cancelled"}


async def test_terminate_stops_the_worker_of_a_running_node(external: ExternalTasks) -> None:
    """H6."""
    task_id, worker = await running(external, waiting)
    await (await external.handle(task_id)).terminate(reason="pressed the button")
    await worker.wait_for("cancel_requested", node="extract")
    await external.until_status(task_id, "failed")
    assert (await outcome(external, task_id))["kind"] == "cancelled"
    assert external.bridge.supervisor.attempts == 0


async def test_reset_stops_the_old_run_and_counts_every_batch_once(external: ExternalTasks) -> None:
    """H7, H12, H25: the new run has a new epoch, and the worker of the old one gets a signal.

    The busy worker may drop the first command of the new run while the group rebalances (H2).
    """
    await external.served_engine()
    gate = Gate()
    old = await external.external(gate.handler)
    task_id = await external.create(node("extract", external.role, **ONCE))
    await external.until_batches(task_id, "extract", 1)
    new = await external.external(gate.handler)
    await reset(external, task_id, "extract")
    await old.wait_for("cancel_requested", node="extract", epoch=1)
    await external.dispatch(task_id, "extract", epoch=2)
    gate.open()
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    epoch = (await external.node(task_id, "extract"))["attempt_epoch"]
    rows = await external.rows(task_id, "extract")
    assert sorted(row["batch_uid"] for row in rows) == ["b0", "b1"]
    kinds = [record["outcome"]["kind"] for record in await external.dispatches(task_id)]
    assert (kinds[0], kinds[-1]) == ("cancelled", "done")
    assert set((await codes(external, task_id, "extract"))[1:]) <= {"dispatch_lost", None}
    done = [*old.sent_for("extract", "TASK_DONE"), *new.sent_for("extract", "TASK_DONE")]
    assert {entry.attempt_epoch for entry in done} == {epoch}


async def test_reset_after_a_cancel_runs_the_node_again(external: ExternalTasks) -> None:
    """H12: the flags of the cancelled run are gone before the worker gets the command."""
    await external.served_engine()
    gate = Gate()
    worker = await external.external(gate.handler, db_cancel_poll_ms=50)
    task_id = await external.create(node("extract", external.role, **ONCE))
    await external.until_batches(task_id, "extract", 1)
    await external.coordinator.cancel_task(task_id)
    await cancelled(external, task_id)
    await reset(external, task_id, "extract")
    await worker.wait_for("TASK_ACCEPTED", epoch=2)
    gate.open()
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    assert worker.runs[-1].cancel_reason is None
    assert "cancelled" not in (await external.document(task_id))["coordinator"]
