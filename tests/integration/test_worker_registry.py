"""Native workers appear in `worker_registry` and their attempts in `worker_events`, on real servers."""

from __future__ import annotations

import signal
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowFailureError

from flowkit import WorkerConfig
from flowkit.activities.handlers import version_of
from flowkit.worker import Worker
from tests.integration.handlers import Failing, Paced, Quick
from tests.integration.harness import eventually, node

if TYPE_CHECKING:
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server


async def workers(harness: Harness) -> list[dict[str, Any]]:
    """Return the rows of the registry."""
    return [row async for row in harness.db.worker_registry.find({}, {"_id": 0, "session": 0})]


async def until_worker(harness: Harness, status: str) -> dict[str, Any]:
    """Wait for a row with this status."""

    async def look() -> dict[str, Any] | None:
        return next((row for row in await workers(harness) if row["status"] == status), None)

    return await eventually(look)


async def until_reported(harness: Harness, task_id: str, count: int) -> list[tuple[str, str, int]]:
    """Return node, kind and epoch of a task's events in order, once there are `count`."""

    async def look() -> list[dict[str, Any]] | None:
        rows = [row async for row in harness.db.worker_events.find({"task_id": task_id})]
        return rows if len(rows) >= count else None

    rows = sorted(await eventually(look), key=lambda row: (row["ts_ms"], row["_id"]))
    return [(row["node_id"], row["payload"]["kind"], row["attempt_epoch"]) for row in rows]


async def reported(harness: Harness, kind: str) -> dict[str, Any]:
    """Return the event of a kind."""
    found: Any = await harness.db.worker_events.find_one({"payload.kind": kind})
    return dict(found)


async def test_worker_is_online_while_it_runs(harness: Harness) -> None:
    worker = await harness.worker({"quick": Quick(), "paced": Paced()}, concurrency=3)
    [row] = await workers(harness)
    began = row.pop("last_seen")
    assert row == {
        "worker_id": worker.worker_id,
        "type": "quick,paced",
        "capabilities": {"roles": ["quick", "paced"]},
        "version": "2.0.0",
        "leaked_threads": 0,
        "status": "online",
        "capacity": {"tasks": 6},
        "announce_interval_sec": 60,
        "queue": harness.queue,
        "handlers": [
            {"role": role, "version": version_of(Quick()), "engine": False} for role in ("paced", "quick")
        ],
    }
    await worker.stop()
    [row] = await workers(harness)
    assert row["status"] == "offline"
    assert row["last_seen"] >= began


async def test_worker_refreshes_its_registration(harness: Harness) -> None:
    cfg = WorkerConfig(roles=["quick"], queue=harness.queue, announce_interval_sec=0.2)
    worker = Worker(db=harness.db, cfg=cfg, handlers={"quick": Quick()})
    await worker.start()
    try:
        [first] = await workers(harness)

        async def seen_later() -> bool:
            return bool([row for row in await workers(harness) if row["last_seen"] > first["last_seen"]])

        assert await eventually(seen_later)
    finally:
        await worker.stop()


async def test_stopped_worker_process_goes_offline(harness: Harness) -> None:
    process = harness.worker_process("Quick")
    row = await until_worker(harness, "online")
    assert row["type"] == "quick"
    process.send_signal(signal.SIGTERM)
    assert (await until_worker(harness, "offline"))["worker_id"] == row["worker_id"]


async def test_killed_worker_goes_offline_after_its_expiry(harness: Harness) -> None:
    long_ago = datetime.now(UTC) - timedelta(minutes=4)
    row = {"worker_id": "killed", "status": "online", "last_seen": long_ago, "type": "quick"}
    row["announce_interval_sec"] = 0.5
    await harness.db.worker_registry.insert_one(row)
    await harness.worker()
    await harness.engine()
    assert (await until_worker(harness, "offline"))["worker_id"] == "killed"
    assert (await until_worker(harness, "online"))["worker_id"] != "killed"


@pytest.mark.usefixtures("quick_attempts")
async def test_attempt_logs_its_end_and_also_its_start_unless_it_ends_quickly(harness: Harness) -> None:
    await harness.engine()
    await harness.worker({"quick": Quick(), "failing": Failing()})
    task_id = await harness.create(
        node("first", inline={"batches": 5}),
        node(
            "second",
            "failing",
            "first",
            inline={"failures": 1},
            retry_policy={"max": 1, "backoff_sec": 0.1},
        ),
    )
    await harness.result(task_id)
    assert await until_reported(harness, task_id, 5) == [
        ("first", "TASK_DONE", 1),
        ("second", "TASK_ACCEPTED", 1),
        ("second", "BATCH_FAILED", 1),
        ("second", "TASK_FAILED", 1),
        ("second", "TASK_DONE", 2),
    ]
    failure = await reported(harness, "TASK_FAILED")
    assert failure["payload"]["reason_code"] == "flaky"
    assert failure["payload"]["permanent"] is False


async def test_events_of_an_attempt_include_its_lease_and_worker(harness: Harness) -> None:
    await harness.engine()
    worker = await harness.worker({"paced": Paced()})
    task_id = await harness.create(node("only", "paced", inline={"pause": 7}))
    await harness.result(task_id)
    await until_reported(harness, task_id, 2)
    accepted = await reported(harness, "TASK_ACCEPTED")
    shown = await harness.node(task_id, "only")
    assert accepted["payload"]["worker_id"] == worker.worker_id
    assert accepted["payload"]["lease_id"] == shown["lease"]["lease_id"]
    assert accepted["step_type"] == "paced"


async def test_cancelled_attempt_is_logged(harness: Harness) -> None:
    await harness.engine()
    await harness.worker({"paced": Paced()})
    task_id = await harness.create(node("long", "paced", inline={"pause": 60}))
    await harness.until_node(task_id, "long", "running")
    await harness.coordinator.cancel_task(task_id, reason="enough")
    with pytest.raises(WorkflowFailureError):
        await harness.result(task_id)
    assert await until_reported(harness, task_id, 2) == [
        ("long", "TASK_ACCEPTED", 1),
        ("long", "CANCELLED", 1),
    ]


async def test_handed_over_attempt_is_logged_and_continues_on_another_worker(harness: Harness) -> None:
    await harness.engine()
    first = await harness.worker({"paced": Paced()})
    task_id = await harness.create(node("long", "paced", inline={"pause": 3}))
    await harness.until_node(task_id, "long", "running")
    await harness.worker({"paced": Paced()})
    await first.stop()
    await harness.result(task_id)
    assert await until_reported(harness, task_id, 3) == [
        ("long", "TASK_ACCEPTED", 1),
        ("long", "TASK_FAILED", 1),
        ("long", "TASK_DONE", 2),
    ]
    handed = await reported(harness, "TASK_FAILED")
    assert handed["payload"]["reason_code"] == "worker_shutdown"
    statuses = sorted(row["status"] for row in await workers(harness))
    assert statuses == ["offline", "online"]
