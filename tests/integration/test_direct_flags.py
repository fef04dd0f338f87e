"""Cancel flags that a client writes into the task document: Temporal always learns of the cancel."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from flowkit.activities import cancelling
from flowkit.models import TaskStatus
from tests.integration.test_stopping import LONG, cancelled, reset
from tests.integration.world import eventually, node, wait_seconds

if TYPE_CHECKING:
    from tests.integration.world import World

pytestmark = pytest.mark.server

ONCE: dict[str, Any] = {"retry_policy": {"max": 0}}


async def raise_flag(world: World, task_id: str, **more: Any) -> None:
    """Write the flag as a script would that imitates the engine."""
    fields = {"cancelled": True, **more}
    flags = {f"coordinator.{name}": value for name, value in fields.items()}
    await world.db.tasks.update_one({"id": task_id}, {"$set": flags})


def function(node_id: str, fn: str, *parents: str) -> dict[str, Any]:
    """Return a node that calls a coordinator function."""
    return node(node_id, "coordinator_fn", *parents, io={"fn": fn}, **ONCE)


async def test_a_flag_with_a_time_beside_it_cancels_the_task(world: World) -> None:
    await world.engine()
    await world.worker()
    task_id = await world.create(node("a", "paced", inline=LONG, **ONCE), node("b", "quick", "a"))
    await world.until_node(task_id, "a", "running")
    await raise_flag(world, task_id, cancelled_at=datetime.now(UTC), cancel_reason="too dear")
    document = await cancelled(world, task_id)
    assert document["coordinator"]["cancel_reason"] == "too dear"
    assert await world.statuses(task_id) == {"a": "cancelled", "b": "skipped"}
    assert (await world.node(task_id, "a"))["attempt_epoch"] == 1


async def test_a_flag_stops_a_function_of_the_users(world: World) -> None:
    stopped = asyncio.Event()

    async def endless(task_id: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    await world.engine(endless=endless)
    task_id = await world.create(function("f", "endless"))
    await world.until_node(task_id, "f", "running")
    await raise_flag(world, task_id)
    assert (await cancelled(world, task_id))["coordinator"]["cancel_reason"] == "db_flag"
    assert stopped.is_set()


@pytest.mark.parametrize("beside", [0, 3])
async def test_a_task_of_short_attempts_alone_is_cancelled_as_well(world: World, beside: int) -> None:
    """Built-in functions run as local activities while only one node is open, and as regular activities otherwise."""
    gate = asyncio.Event()

    async def hold(task_id: str) -> None:
        await gate.wait()

    await world.engine(hold=hold)
    names = ["n", *(f"beside-{number}" for number in range(beside))]
    task_id = await world.create(
        function("first", "hold"), *(function(name, "noop", "first") for name in names)
    )
    await world.until_node(task_id, "first", "running")
    await raise_flag(world, task_id)
    gate.set()
    document = await cancelled(world, task_id)
    assert document["coordinator"]["cancel_reason"] == "db_flag"
    assert {name: (await world.statuses(task_id))[name] for name in names} == dict.fromkeys(
        names, "cancelled"
    )


async def test_the_first_attempt_of_a_task_sees_a_flag_before_it_begins(world: World) -> None:
    await world.engine()
    task_id = await world.create(node("a", **ONCE))
    await world.until_status(task_id, "running")
    await raise_flag(world, task_id)
    await world.worker()
    document = await cancelled(world, task_id)
    assert document["graph"]["nodes"][0].get("started_at") is None


async def test_where_temporal_refuses_the_cancel_the_node_backs_off_and_says_why(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    async def refuse(task_id: str, reason: str) -> None:
        tries.append(reason)
        raise RPCError("not allowed here", RPCStatusCode.PERMISSION_DENIED, b"")

    monkeypatch.setattr(cancelling, "_cancel_own_run", refuse)
    await world.engine()
    await world.worker()
    task_id = await world.create(node("a", "paced", inline={"batches": 3, "pause": 1}, **ONCE))
    await world.until_node(task_id, "a", "running")
    await raise_flag(world, task_id)
    deferred = await world.until_node(task_id, "a", "deferred", epoch=2)
    assert deferred["last_error"].startswith(
        "cancel_refused: coordinator.cancelled is set in the task document"
    )
    assert "not allowed here" in deferred["last_error"]
    assert len(tries) == 2, "with a pause of a second between them, then of two"
    await world.db.tasks.update_one({"id": task_id}, {"$unset": {"coordinator.cancelled": ""}})
    assert (await world.result(task_id)).status is TaskStatus.FINISHED


async def test_the_flags_of_a_hard_failure_are_no_cancel(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def note(task_id: str, reason: str) -> None:
        asked.append(reason)

    monkeypatch.setattr(cancelling, "_cancel_own_run", note)
    await world.engine()
    await world.worker()
    task_id = await world.create(
        node("bad", "failing", "start", inline={"failures": 9, "permanent": True}, **ONCE),
        node("long", "paced", "start", inline=LONG, **ONCE),
        node("start", "paced", inline={"pause": 0.1}),
    )
    document = await world.until_status(task_id, "failed")

    async def closed() -> bool:
        return (await world.document(task_id))["finished_at"] is not None

    await eventually(closed)
    assert document["coordinator"]["cancel_run_id"] == document["run_id"]
    assert (await world.statuses(task_id))["long"] == "cancelled"
    assert (await world.node(task_id, "long"))["attempt_epoch"] == 1
    assert asked == []


async def test_a_reset_clears_the_flags_that_the_earlier_run_has_left(world: World) -> None:
    await world.engine()
    await world.worker()
    task_id = await world.create(
        node("a", inline={"batches": 2}), node("b", "paced", "a", inline={"batches": 4, "pause": 1}, **ONCE)
    )
    await world.until_batches(task_id, "b", 1)
    earlier = (await world.document(task_id))["run_id"]
    await raise_flag(world, task_id, cancel_run_id=earlier, cancelled_at=datetime.now(UTC))
    await reset(world, task_id, "b")
    assert (await world.result(task_id)).status is TaskStatus.FINISHED
    document = await world.document(task_id)
    assert "cancelled" not in document["coordinator"]
    assert (await world.node(task_id, "b"))["attempt_epoch"] == 2
    assert document["run_id"] != earlier


async def test_a_function_notices_terminate_at_once(world: World) -> None:
    stopped = asyncio.Event()

    async def endless(task_id: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    world.settings |= {"lease_ttl_sec": 600, "sweep_sec": 600}
    await world.engine(endless=endless)
    task_id = await world.create(function("f", "endless"))
    await world.until_node(task_id, "f", "running")
    await wait_seconds(3.0)  # until its first heartbeat, which Temporal's library sends at once, is gone
    await (await world.handle(task_id)).terminate()
    await asyncio.wait_for(stopped.wait(), 5)
