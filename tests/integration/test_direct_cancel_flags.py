"""Cancel flags that a client writes into the task document: Temporal always learns of the cancel."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from flowkit.attempt import supervision
from flowkit.models import TaskStatus
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, node, wait_seconds
from tests.integration.test_cancel_terminate_reset import LONG, cancelled, reset

if TYPE_CHECKING:
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

ONCE: dict[str, Any] = {"retry_policy": {"max": 0}}


async def write_flag(harness: Harness, task_id: str, **more: Any) -> None:
    """Write the flag as a script would that imitates the engine."""
    fields = {"cancelled": True, **more}
    flags = {f"coordinator.{name}": value for name, value in fields.items()}
    await harness.db.tasks.update_one({"id": task_id}, {"$set": flags})


def function(node_id: str, fn: str, *parents: str) -> dict[str, Any]:
    """Return a node that calls a coordinator function."""
    return node(node_id, "coordinator_fn", *parents, io={"fn": fn}, **ONCE)


async def test_flag_with_other_fields_cancels_the_task(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(node("a", "paced", inline=LONG, **ONCE), node("b", "quick", "a"))
    await harness.until_node(task_id, "a", "running")
    await write_flag(harness, task_id, cancelled_at=datetime.now(UTC), cancel_reason="too dear")
    document = await cancelled(harness, task_id)
    assert document["coordinator"]["cancel_reason"] == "too dear"
    assert await harness.statuses(task_id) == {"a": "cancelled", "b": "skipped"}
    assert (await harness.node(task_id, "a"))["attempt_epoch"] == 1


async def test_flag_stops_a_user_function(harness: Harness) -> None:
    stopped = asyncio.Event()

    async def endless(task_id: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    await harness.engine(endless=endless)
    task_id = await harness.create(function("f", "endless"))
    await harness.until_node(task_id, "f", "running")
    await write_flag(harness, task_id)
    assert (await cancelled(harness, task_id))["coordinator"]["cancel_reason"] == "db_flag"
    assert stopped.is_set()


@pytest.mark.parametrize("parallel", [0, 3])
async def test_flag_cancels_a_task_of_short_attempts(harness: Harness, parallel: int) -> None:
    """Built-in functions run as local activities while only one node is open, and as regular activities otherwise."""
    gate = asyncio.Event()

    async def hold(task_id: str) -> None:
        await gate.wait()

    await harness.engine(hold=hold)
    names = ["n", *(f"beside-{number}" for number in range(parallel))]
    task_id = await harness.create(
        function("first", "hold"), *(function(name, "noop", "first") for name in names)
    )
    await harness.until_node(task_id, "first", "running")
    await write_flag(harness, task_id)
    gate.set()
    document = await cancelled(harness, task_id)
    assert document["coordinator"]["cancel_reason"] == "db_flag"
    assert {name: (await harness.statuses(task_id))[name] for name in names} == dict.fromkeys(
        names, "cancelled"
    )


async def test_first_attempt_of_a_flagged_task_does_not_start(harness: Harness) -> None:
    await harness.engine()
    task_id = await harness.create(node("a", **ONCE))
    await harness.until_status(task_id, "running")
    await write_flag(harness, task_id)
    await harness.worker()
    document = await cancelled(harness, task_id)
    assert document["graph"]["nodes"][0].get("started_at") is None


async def test_node_backs_off_and_shows_the_reason_if_temporal_rejects_the_cancel(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    async def refuse(task_id: str, reason: str) -> None:
        tries.append(reason)
        raise RPCError("not allowed here", RPCStatusCode.PERMISSION_DENIED, b"")

    monkeypatch.setattr(supervision, "_cancel_own_run", refuse)
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(node("a", "paced", inline={"batches": 3, "pause": 1}, **ONCE))
    await harness.until_node(task_id, "a", "running")
    flagged = time.monotonic()
    await write_flag(harness, task_id)
    deferred = await harness.until_node(task_id, "a", "deferred", epoch=2)
    assert deferred["last_error"].startswith(
        "cancel_refused: coordinator.cancelled is set in the task document"
    )
    assert "not allowed here" in deferred["last_error"]
    seconds = time.monotonic() - flagged
    assert 2 <= len(tries) <= 2 + seconds, "with a pause of a second between them, then of two, then of four"
    await harness.db.tasks.update_one({"id": task_id}, {"$unset": {"coordinator.cancelled": ""}})
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED


async def test_flags_of_a_failed_task_are_not_a_cancel(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def note(task_id: str, reason: str) -> None:
        asked.append(reason)

    monkeypatch.setattr(supervision, "_cancel_own_run", note)
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(
        node("bad", "failing", "start", inline={"failures": 9, "permanent": True}, **ONCE),
        node("long", "paced", "start", inline=LONG, **ONCE),
        node("start", "paced", inline={"pause": 0.1}),
    )
    document = await harness.until_status(task_id, "failed")

    async def closed() -> bool:
        return (await harness.document(task_id))["finished_at"] is not None

    await eventually(closed)
    assert document["coordinator"]["cancel_run_id"] == document["run_id"]
    assert (await harness.statuses(task_id))["long"] == "cancelled"
    assert (await harness.node(task_id, "long"))["attempt_epoch"] == 1
    assert asked == []


async def test_reset_clears_the_flags_of_the_earlier_run(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(
        node("a", inline={"batches": 2}), node("b", "paced", "a", inline={"batches": 4, "pause": 1}, **ONCE)
    )
    await harness.until_batches(task_id, "b", 1)
    earlier = (await harness.document(task_id))["run_id"]
    await write_flag(harness, task_id, cancel_run_id=earlier, cancelled_at=datetime.now(UTC))
    await reset(harness, task_id, "b")
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    document = await harness.document(task_id)
    assert "cancelled" not in document["coordinator"]
    assert (await harness.node(task_id, "b"))["attempt_epoch"] == 2
    assert document["run_id"] != earlier


async def test_function_stops_immediately_after_terminate(harness: Harness) -> None:
    stopped = asyncio.Event()

    async def endless(task_id: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    harness.settings |= {"lease_ttl_sec": 600, "sweep_sec": 600}
    await harness.engine(endless=endless)
    task_id = await harness.create(function("f", "endless"))
    await harness.until_node(task_id, "f", "running")
    await wait_seconds(3.0)  # until the SDK has sent its first heartbeat, which it does not delay
    await (await harness.handle(task_id)).terminate()
    await asyncio.wait_for(stopped.wait(), EVENT_TIMEOUT_SEC)
