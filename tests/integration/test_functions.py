"""Coordinator functions on real servers: built-in ones, and the user's own."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ApplicationError

from flowkit import Coordinator
from flowkit.client import TaskFailed
from flowkit.coordinator.adapters import AdapterError, default_adapters
from flowkit.models import TaskStatus
from tests.integration.world import node, wait_seconds

if TYPE_CHECKING:
    from tests.integration.world import World

pytestmark = pytest.mark.server

ONCE = {"retry_policy": {"max": 0}}
SOON = {"retry_policy": {"max": 2, "backoff_sec": 0.1}}


def call(
    node_id: str, fn: str, *parents: str, args: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Return a node that calls a coordinator function."""
    return {
        "node_id": node_id,
        "type": "coordinator_fn",
        "depends_on": list(parents),
        "io": {"fn": fn, "fn_args": args or {}},
        **more,
    }


async def activities(world: World, task_id: str) -> list[str]:
    """Return the names of the regular activities that ran nodes of the task."""
    history = await (await world.handle(task_id)).fetch_history()
    names = [e.activity_task_scheduled_event_attributes.activity_type.name for e in history.events]
    return [name for name in names if name and name not in {"open_task", "record", "close_task"}]


async def markers(world: World, task_id: str) -> int:
    """Return the number of local activities in the task's history, without the one that opens the task."""
    history = await (await world.handle(task_id)).fetch_history()
    found = [e for e in history.events if e.event_type == EventType.EVENT_TYPE_MARKER_RECORDED]
    return len(found) - 1


async def failure(world: World, task_id: str) -> str:
    """Return why the task failed."""
    with pytest.raises(TaskFailed) as failed:
        await world.coordinator.result(task_id, timeout=60)
    return str(failed.value)


# --- built-in functions -----------------------------------------------------------------------------------------


async def test_set_merge_incr_unset_in_a_row(world: World) -> None:
    await world.engine()
    task_id = await world.create(
        call("set", "vars.set", args={"kv": {"sla.max": 500, "flags": {"ab": True}, "gone": {"x": 1}}}),
        call("merge", "vars.merge", "set", args={"data": {"flags": {"beta": False}, "sla": {"min": 5}}}),
        call("incr", "vars.incr", "merge", args={"key": "counters.pages", "by": 2}),
        call("unset", "vars.unset", "incr", args={"keys": ["gone.x", "never.there"]}),
        call("nothing", "noop", "unset", args={"what": "ever"}),
    )
    assert (await world.result(task_id)).status is TaskStatus.FINISHED
    assert await world.coordinator.vars(task_id) == {
        "sla": {"max": 500, "min": 5},
        "flags": {"ab": True, "beta": False},
        "counters": {"pages": 2},
    }
    assert (await activities(world, task_id), await markers(world, task_id)) == ([], 5)
    nodes = (await world.document(task_id))["graph"]["nodes"]
    assert {(n["status"], n["attempt_epoch"], n["applied_generation"]) for n in nodes} == {("finished", 1, 0)}
    assert all(n["started_at"] <= n["finished_at"] for n in nodes)
    complete = {"task_id": task_id, "status": "complete"}
    assert await world.db.artifacts.count_documents(complete) == len(nodes)


async def test_a_long_row_of_functions_lets_the_server_have_a_word(world: World) -> None:
    await world.engine()
    task_id = await world.create(*(call(f"n{i}", "noop", *([f"n{i - 1}"] if i else [])) for i in range(60)))
    await world.result(task_id)
    assert (await activities(world, task_id), await markers(world, task_id)) == (["noop"], 59)


async def test_functions_beside_each_other_go_through_the_server(world: World) -> None:
    await world.engine()
    task_id = await world.create(*(call(f"n{i}", "vars.incr", args={"key": "n"}) for i in range(5)))
    await world.result(task_id)
    assert await world.coordinator.vars(task_id) == {"n": 5}
    assert (await activities(world, task_id), await markers(world, task_id)) == (["vars.incr"] * 5, 0)


async def test_what_a_role_has_left_is_summed_up_and_merged(world: World) -> None:
    await world.engine()
    await world.worker()
    task_id = await world.create(
        node("work", inline={"batches": 3}),
        call("stats", "metrics.aggregate", "work", args={"node_id": "work"}),
        call("merge", "merge.generic", "stats", args={"from_nodes": ["work"], "target": {}}),
        call("other", "merge.generic", "merge", args={"from_nodes": ["work"], "target": {"node_id": "sum"}}),
    )
    await world.result(task_id)
    rows = await world.rows(task_id, "work")
    summed = {key: sum(row["metrics"][key] for row in rows) for key in rows[0]["metrics"]}
    stats = (await world.node(task_id, "work"))["stats"]
    assert {key: stats[key] for key in summed} == summed
    for name, epoch in (("merge", 1), ("sum", 0)):
        artifact: Any = await world.db.artifacts.find_one({"task_id": task_id, "node_id": name})
        assert (artifact["status"], artifact["attempt_epoch"]) == ("complete", epoch)
        assert artifact["meta"]["complete_nodes"] == ["work"]
        assert artifact["meta"]["partial_batches"] == len(rows) == 3


async def test_a_refusal_fails_the_node_at_once_and_names_the_path(world: World) -> None:
    await world.engine()
    task_id = await world.create(
        call("one", "vars.set", args={"a": 1, "secret": "hunter2hunter2"}),
        call("two", "vars.incr", "one", args={"key": "secret"}, **SOON),
    )
    told = await failure(world, task_id)
    assert "adapter_error: vars.incr: coordinator.vars.secret holds a str, not a number" in told
    assert "hunter2" not in told
    failed = await world.node(task_id, "two")
    assert (failed["status"], failed["attempt_epoch"]) == ("failed", 1)
    assert failed["started_at"]
    assert await world.coordinator.vars(task_id) == {"a": 1, "secret": "hunter2hunter2"}


@pytest.mark.parametrize(
    ("fn", "args", "told"),
    [
        (
            "vars.incr",
            {},
            "io.fn_args do not match the parameters of 'vars.incr': missing a required argument: 'key'",
        ),
        ("vars.incr", {"key": "n", "step": 2}, "unexpected keyword argument 'step'"),
        ("vars.incr", {"key": "a.$b"}, "'coordinator.vars.a.$b' has a segment that begins with '$'"),
        ("merge.generic", {"from_nodes": ["x"]}, "'target' must be a dict, not null"),
        ("merge.generic", {"from_nodes": ["x"], "target": "y"}, "'target' must be a dict, not a str"),
        ("metrics.aggregate", {"node_id": "ghost"}, "has no node 'ghost'"),
    ],
)
async def test_arguments_that_cannot_work_are_never_retried(
    world: World, fn: str, args: dict[str, Any], told: str
) -> None:
    await world.engine()
    task_id = await world.create(call("only", fn, args=args, **SOON))
    assert told in await failure(world, task_id)
    assert (await world.node(task_id, "only"))["attempt_epoch"] == 1


# --- the user's own ---------------------------------------------------------------------------------------------


async def test_a_plain_function_runs_on_a_thread_and_holds_nobody_up(world: World) -> None:
    threads: list[int] = []
    gate = threading.Event()

    def slow(task_id: str) -> None:
        threads.append(threading.get_ident())
        gate.wait(60)

    engine = await world.engine(slow=slow)
    asked = await engine.create_task(params={}, graph={"nodes": [call("s", "slow")]})
    other = await engine.create_task(params={}, graph={"nodes": [call("n", "noop")]})
    assert (await world.result(other)).status is TaskStatus.FINISHED
    gate.set()
    assert (await world.result(asked)).status is TaskStatus.FINISHED
    assert threads
    assert threads[0] != threading.get_ident()


async def test_any_other_error_follows_the_nodes_policy(world: World) -> None:
    calls: list[int] = []

    async def flaky(task_id: str) -> None:
        calls.append(len(calls))
        if len(calls) < 3:
            raise KeyError("not yet")

    await world.engine(flaky=flaky)
    task_id = await world.create(call("f", "flaky", **SOON))
    assert (await world.result(task_id)).status is TaskStatus.FINISHED
    assert (await world.node(task_id, "f"))["attempt_epoch"] == len(calls) == 3


async def test_a_function_that_cancels_itself_has_failed(world: World) -> None:
    async def strange(task_id: str) -> None:
        raise asyncio.CancelledError

    await world.engine(strange=strange)
    task_id = await world.create(call("s", "strange", retry_policy={"max": 1, "backoff_sec": 0.1}))
    assert "cancelled_by_worker" in await failure(world, task_id)
    assert (await world.node(task_id, "s"))["attempt_epoch"] == 2


async def test_a_function_may_refuse_for_good(world: World) -> None:
    async def picky(task_id: str, limit: int) -> None:
        raise AdapterError(f"limit {limit} is too low")

    await world.engine(picky=picky)
    task_id = await world.create(call("p", "picky", args={"limit": 3}, **SOON))
    assert "adapter_error: limit 3 is too low" in await failure(world, task_id)
    wrong = await world.create(call("p", "picky", args={"limits": 3}, **SOON))
    assert "io.fn_args do not match the parameters of 'picky'" in await failure(world, wrong)


async def test_a_function_that_takes_too_long_fails_by_its_own_timeout(world: World) -> None:
    cancelled = asyncio.Event()

    async def endless(task_id: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    world.settings["lease_ttl_sec"] = 4
    await world.engine(endless=endless)
    task_id = await world.create(call("e", "endless", timeout_sec=2, **ONCE))
    assert "timeout" in await failure(world, task_id)
    await asyncio.wait_for(cancelled.wait(), 30)


async def test_a_long_function_keeps_its_lease(world: World) -> None:
    async def long(task_id: str) -> None:
        await wait_seconds(4.5)

    world.settings["lease_ttl_sec"] = 1.5
    await world.engine(long=long)
    task_id = await world.create(call("l", "long", **ONCE))
    await world.result(task_id)
    assert (await world.node(task_id, "l"))["attempt_epoch"] == 1


async def test_a_function_that_is_registered_later_serves_as_well(world: World) -> None:
    engine = await world.engine()
    with pytest.raises(ValueError, match="unknown function 'late'"):
        await world.create(call("n", "late"))
    called: list[dict[str, Any]] = []

    async def late(task_id: str, **arguments: Any) -> None:
        called.append(arguments)

    engine.adapters["late"] = late
    task_id = await world.create(call("n", "late", args={"target": {"key": "k"}}))
    await world.result(task_id)
    assert called == [{"target": {"node_id": "n", "key": "k"}}]


async def test_a_built_in_function_can_be_replaced(world: World) -> None:
    engine = await world.engine()
    called: list[str] = []

    async def own(task_id: str, **arguments: Any) -> None:
        called.append(task_id)

    engine.adapters["noop"] = own
    task_id = await world.create(call("n", "noop"))
    await world.result(task_id)
    assert called == [task_id]


async def test_an_engine_without_the_function_loses_the_node_to_one_that_has_it(world: World) -> None:
    called: list[str] = []

    async def rare(task_id: str) -> None:
        called.append(task_id)

    knowing = Coordinator(db=world.db, cfg=world.config, adapters={"rare": rare})
    await knowing.start()
    gate = {"retry_policy": {"max": 0}}
    await world.worker()
    task_id = await knowing.create_task(
        params={},
        graph={"nodes": [node("first", "paced", inline={"pause": 0.5}), call("r", "rare", "first", **gate)]},
    )
    await world.until_node(task_id, "first", "running")
    await knowing.stop()
    ignorant = await world.engine()
    deferred = await world.until_node(task_id, "r", "deferred")
    assert "dispatch_lost" in deferred["last_error"]
    assert "has no coordinator function 'rare'" in deferred["last_error"]
    ignorant.adapters["rare"] = rare
    assert (await world.result(task_id)).status is TaskStatus.FINISHED
    assert called == [task_id]


async def test_a_sensitive_value_is_refused_when_the_node_asks_for_that(world: World) -> None:
    world_adapters = default_adapters(db=world.db, detector=lambda path, value: value == "s3cret")
    await world.engine(**world_adapters)
    task_id = await world.create(call("s", "vars.set", args={"kv": {"k": "s3cret"}, "block_sensitive": True}))
    told = await failure(world, task_id)
    assert "vars.set blocked: 1 sensitive-looking values" in told
    assert "s3cret" not in told
    handle = await world.handle(task_id)
    with pytest.raises(WorkflowFailureError) as failed:
        await handle.result()
    assert isinstance(failed.value.cause, ApplicationError)
