"""Several workers with the same epoch, dead owners, and owners that a bridge has given up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from flowkit.testing import Misbehavior
from tests.integration.bridge.checks import (
    NO_RETRY,
    check_finished,
    forged,
    outcomes,
    until_owner,
    until_processed,
)
from tests.integration.bridge.gates import Gate
from tests.integration.harness import node

if TYPE_CHECKING:
    from tests.integration.bridge.external_tasks import ExternalTasks

pytestmark = pytest.mark.server

ENDS = ("TASK_DONE", "TASK_FAILED", "CANCELLED")

LONG_LEASE = {"lease_ttl_sec": 60.0}
SHORT_LEASE = {"lease_ttl_sec": 1.0}


def opened() -> Any:
    """Return the handler of an open gate: two batches and final metrics."""
    gate = Gate()
    gate.open()
    return gate.handler


async def started(external: ExternalTasks, **fields: Any) -> str:
    """Start a task of one external node `n`, which may not use a retry."""
    return await external.create(node("n", external.role, **{"retry_policy": NO_RETRY, **fields}))


async def test_crash_after_a_batch_is_a_loss_and_the_batch_counts_once(external: ExternalTasks) -> None:
    """H6."""
    await external.served_engine()
    doomed = await external.external(
        Gate().handler, misbehavior=Misbehavior(crash_after="BATCH_OK"), **SHORT_LEASE
    )
    task_id = await started(external)
    await doomed.wait_for("killed")
    await external.external(opened())
    await check_finished(external, task_id, ["lease_lost", "done"])


async def test_redelivered_command_continues_the_epoch_at_another_worker(external: ExternalTasks) -> None:
    """H7: a worker crashes before it commits its command. A redelivered acceptance does not take the run back."""
    await external.served_engine()
    crash = Misbehavior(crash_after_accepted="before_commit")
    doomed = await external.external(opened(), misbehavior=crash, **LONG_LEASE)
    task_id = await started(external)
    accepted = await doomed.wait_for("TASK_ACCEPTED")
    await doomed.wait_for("killed")
    gate = Gate()
    heir = await external.external(gate.handler)
    await until_owner(external, task_id, heir.worker_id)
    await heir.send_raw(accepted.topic, accepted.value, accepted.key)
    await until_processed(external)
    await until_owner(external, task_id, heir.worker_id)
    gate.open()
    await check_finished(external, task_id, ["done"])


async def test_redelivered_command_of_a_lost_epoch_runs_nowhere_to_its_end(external: ExternalTasks) -> None:
    """H7, stale epochs: the lease ends before Kafka redelivers the command, so a worker accepts an ended epoch."""
    external.settings["kafka_cmd_partitions"] = 1
    await external.served_engine()
    crash = Misbehavior(crash_after_accepted="before_commit")
    doomed = await external.external(opened(), misbehavior=crash, **SHORT_LEASE)
    task_id = await started(external)
    await doomed.wait_for("killed")
    await external.dispatch(task_id, "n", epoch=2)
    gate = Gate()
    heir = await external.external(gate.handler)
    stale = await heir.wait_for("TASK_ACCEPTED", epoch=1)
    assert (await heir.wait_for("cancel_requested", epoch=1)).reason == "stale_epoch"
    gate.open()
    assert (await external.result(task_id)).status == "finished"
    assert await outcomes(external, task_id) == ["lease_lost", "done"]
    assert stale.payload["lease_id"] not in str(await external.dispatch(task_id, "n", epoch=1))


async def test_redelivered_acceptance_of_an_earlier_lease_does_not_cancel_its_worker(
    external: ExternalTasks,
) -> None:
    """H7: the owner has accepted the same epoch twice. A signal about the first lease would stop the second run."""
    await external.served_engine()
    gate = Gate()
    worker = await external.external(gate.handler, lease_ttl_sec=60.0, hb_interval_sec=60.0)
    task_id = await started(external)
    first = await worker.wait_for("TASK_ACCEPTED")
    again = forged(first, "TASK_ACCEPTED", lease_id="second", lease_deadline_ts_ms=2**52)
    for value in (again, first.value):
        await worker.send_raw(first.topic, value, first.key)
    await until_processed(external)
    assert (await external.dispatch(task_id, "n"))["lease"]["lease_id"] == "second"
    gate.open()
    await check_finished(external, task_id, ["done"])
    assert not [entry for entry in worker.entries if entry.kind.startswith("cancel_")]


async def test_newest_of_two_owners_finishes_and_the_older_one_is_cancelled(external: ExternalTasks) -> None:
    """H7, H16: two workers run the same epoch, and their events have the same ids."""
    await external.served_engine()
    gates = Gate(), Gate()
    one = await external.external(gates[0].handler)
    two = await external.external(gates[1].handler, misbehavior=Misbehavior(second_owner=True))
    task_id = await started(external)
    workers = {worker.worker_id: worker for worker in (one, two)}
    for worker in workers.values():
        await worker.wait_for("BATCH_OK")
    await until_processed(external)
    owner_id = (await external.dispatch(task_id, "n"))["lease"]["worker_id"]
    owner = workers.pop(owner_id)
    (older,) = workers.values()
    assert (await older.wait_for("cancel_requested", epoch=1)).reason == "stale_epoch"
    await older.wait_for("CANCELLED")
    await until_processed(external)
    for gate in gates:
        gate.open()
    await check_finished(external, task_id, ["done"])
    assert (await external.dispatch(task_id, "n"))["outcome"]["worker_id"] == owner_id
    assert owner.sent_for("n", "TASK_DONE")
    assert not older.sent_for("n", "TASK_DONE")


async def test_ends_of_the_older_of_two_owners_change_nothing(external: ExternalTasks) -> None:
    """H7, H16: the older worker ends first. Both workers send batches and ends with the same ids."""
    await external.served_engine()
    older = await external.external(Gate().handler)
    task_id = await started(external)
    batch = await older.wait_for("BATCH_OK")
    accepted = older.sent_for("n", "TASK_ACCEPTED")[0]
    newer: dict[str, Any] = {"worker_id": "newer", "lease_id": "newer", "lease_deadline_ts_ms": 2**52}
    failure: dict[str, Any] = {"reason_code": "late", "permanent": True}
    values = [
        forged(accepted, "TASK_ACCEPTED", **newer),
        *(forged(accepted, kind, reason="cancelled", **failure) for kind in ENDS),
        forged(batch, "BATCH_OK", worker_id="newer", batch_uid="b0", metrics={"by": "newer"}),
    ]
    for value in values:
        await older.send_raw(accepted.topic, value, accepted.key)
    await older.wait_for("CANCELLED")
    await until_processed(external)
    assert await outcomes(external, task_id) == ["open"]
    await older.send_raw(accepted.topic, forged(accepted, "TASK_DONE", worker_id="newer"), accepted.key)
    await check_finished(external, task_id, ["done"], uids=("b0",))
    assert (await external.dispatch(task_id, "n"))["outcome"]["worker_id"] == "newer"
