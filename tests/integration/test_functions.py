"""Coordinator functions on real servers: built-in ones, and the user's own."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ApplicationError

from flowkit import Coordinator
from flowkit.client import TaskFailed
from flowkit.coordinator.adapters import default_adapters
from flowkit.models import TaskStatus
from tests.integration.handlers import Gated
from tests.integration.harness import EVENT_TIMEOUT_SEC, is_local_attempt, node, wait_seconds

if TYPE_CHECKING:
    from tests.integration.harness import Harness

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("patient")]

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


async def activities(harness: Harness, task_id: str) -> list[str]:
    """Return the names of the regular activities that ran nodes of the task."""
    history = await (await harness.handle(task_id)).fetch_history()
    names = [e.activity_task_scheduled_event_attributes.activity_type.name for e in history.events]
    return [name for name in names if name and name not in {"open_task", "record", "close_task"}]


async def markers(harness: Harness, task_id: str) -> int:
    """Return the number of local activities in the task's history that ran attempts."""
    history = await (await harness.handle(task_id)).fetch_history()
    return sum(map(is_local_attempt, history.events))


async def failure(harness: Harness, task_id: str) -> str:
    """Return why the task failed."""
    with pytest.raises(TaskFailed) as failed:
        await harness.coordinator.result(task_id, timeout=EVENT_TIMEOUT_SEC)
    return str(failed.value)


# --- built-in functions -----------------------------------------------------------------------------------------


async def test_set_merge_incr_and_unset_run_in_sequence(harness: Harness) -> None:
    await harness.engine()
    task_id = await harness.create(
        call("set", "vars.set", args={"kv": {"sla.max": 500, "flags": {"ab": True}, "gone": {"x": 1}}}),
        call("merge", "vars.merge", "set", args={"data": {"flags": {"beta": False}, "sla": {"min": 5}}}),
        call("incr", "vars.incr", "merge", args={"key": "counters.pages", "by": 2}),
        call("unset", "vars.unset", "incr", args={"keys": ["gone.x", "never.there"]}),
        call("nothing", "noop", "unset", args={"what": "ever"}),
    )
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert await harness.coordinator.vars(task_id) == {
        "sla": {"max": 500, "min": 5},
        "flags": {"ab": True, "beta": False},
        "counters": {"pages": 2},
    }
    assert (await activities(harness, task_id), await markers(harness, task_id)) == ([], 5)
    nodes = (await harness.document(task_id))["graph"]["nodes"]
    assert {(n["status"], n["attempt_epoch"], n["applied_generation"]) for n in nodes} == {("finished", 1, 0)}
    assert all(n["started_at"] <= n["finished_at"] for n in nodes)
    complete = {"task_id": task_id, "status": "complete"}
    assert await harness.db.artifacts.count_documents(complete) == len(nodes)


async def test_long_sequence_of_functions_runs_as_local_activities(
    harness: Harness,
) -> None:
    await harness.engine()
    task_id = await harness.create(*(call(f"n{i}", "noop", *([f"n{i - 1}"] if i else [])) for i in range(60)))
    await harness.result(task_id)
    assert (await activities(harness, task_id), await markers(harness, task_id)) == ([], 60)


async def test_parallel_functions_run_as_regular_activities(harness: Harness) -> None:
    await harness.engine()
    task_id = await harness.create(*(call(f"n{i}", "vars.incr", args={"key": "n"}) for i in range(5)))
    await harness.result(task_id)
    assert await harness.coordinator.vars(task_id) == {"n": 5}
    assert (await activities(harness, task_id), await markers(harness, task_id)) == (["vars.incr"] * 5, 0)


async def test_results_of_a_role_are_aggregated_and_merged(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(
        node("work", inline={"batches": 3}),
        call("stats", "metrics.aggregate", "work", args={"node_id": "work"}),
        call("merge", "merge.generic", "stats", args={"from_nodes": ["work"], "target": {}}),
        call("other", "merge.generic", "merge", args={"from_nodes": ["work"], "target": {"node_id": "sum"}}),
    )
    await harness.result(task_id)
    rows = await harness.rows(task_id, "work")
    summed = {key: sum(row["metrics"][key] for row in rows) for key in rows[0]["metrics"]}
    stats = (await harness.node(task_id, "work"))["stats"]
    assert {key: stats[key] for key in summed} == summed
    for name, epoch in (("merge", 1), ("sum", 0)):
        artifact: Any = await harness.db.artifacts.find_one({"task_id": task_id, "node_id": name})
        assert (artifact["status"], artifact["attempt_epoch"]) == ("complete", epoch)
        assert artifact["meta"]["complete_nodes"] == ["work"]
        assert artifact["meta"]["partial_batches"] == len(rows) == 3


# --- the user's own ---------------------------------------------------------------------------------------------


async def test_plain_function_runs_on_a_thread_without_blocking_others(harness: Harness) -> None:
    threads: list[int] = []
    gate = threading.Event()

    def slow(task_id: str) -> None:
        threads.append(threading.get_ident())
        gate.wait(EVENT_TIMEOUT_SEC)

    engine = await harness.engine(slow=slow)
    asked = await engine.create_task(params={}, graph={"nodes": [call("s", "slow")]})
    other = await engine.create_task(params={}, graph={"nodes": [call("n", "noop")]})
    assert (await harness.result(other)).status is TaskStatus.FINISHED
    gate.set()
    assert (await harness.result(asked)).status is TaskStatus.FINISHED
    assert threads
    assert threads[0] != threading.get_ident()


async def test_function_that_raises_cancelled_error_has_failed(harness: Harness) -> None:
    async def self_cancelling(task_id: str) -> None:
        raise asyncio.CancelledError

    await harness.engine(self_cancelling=self_cancelling)
    task_id = await harness.create(call("s", "self_cancelling", retry_policy={"max": 1, "backoff_sec": 0.1}))
    assert "cancelled_by_worker" in await failure(harness, task_id)
    assert (await harness.node(task_id, "s"))["attempt_epoch"] == 2


async def test_slow_function_fails_with_its_own_timeout(harness: Harness) -> None:
    cancelled = asyncio.Event()

    async def endless(task_id: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    harness.settings["lease_ttl_sec"] = 4
    await harness.engine(endless=endless)
    task_id = await harness.create(call("e", "endless", timeout_sec=2, **ONCE))
    assert "timeout" in await failure(harness, task_id)
    await asyncio.wait_for(cancelled.wait(), EVENT_TIMEOUT_SEC)


async def test_long_function_keeps_its_lease(harness: Harness) -> None:
    async def long(task_id: str) -> None:
        await wait_seconds(6.0)

    harness.settings["lease_ttl_sec"] = 4
    await harness.engine(long=long)
    task_id = await harness.create(call("l", "long", **ONCE))
    await harness.result(task_id)
    assert (await harness.node(task_id, "l"))["attempt_epoch"] == 1


async def test_function_can_be_registered_after_the_start(harness: Harness) -> None:
    engine = await harness.engine()
    with pytest.raises(ValueError, match="unknown function 'late'"):
        await harness.create(call("n", "late"))
    called: list[dict[str, Any]] = []

    async def late(task_id: str, **arguments: Any) -> None:
        called.append(arguments)

    engine.adapters["late"] = late
    task_id = await harness.create(call("n", "late", args={"target": {"key": "k"}}))
    await harness.result(task_id)
    assert called == [{"target": {"node_id": "n", "key": "k"}}]


async def test_built_in_function_can_be_replaced_and_then_falls_back_at_no_charge(harness: Harness) -> None:
    engine = await harness.engine()
    called: list[str] = []

    async def own(task_id: str, **arguments: Any) -> None:
        called.append(task_id)

    engine.adapters["noop"] = own
    task_id = await harness.create(call("n", "noop", **ONCE))
    await harness.result(task_id)
    assert called == [task_id]
    assert (await harness.node(task_id, "n"))["attempt_epoch"] == 2
    assert (await activities(harness, task_id), await markers(harness, task_id)) == (["noop"], 1)


async def test_node_moves_from_an_engine_without_its_function_to_one_that_has_it(harness: Harness) -> None:
    called: list[str] = []

    async def late_registered(task_id: str) -> None:
        called.append(task_id)

    with_function = Coordinator(
        db=harness.db, cfg=harness.config, adapters={"late_registered": late_registered}
    )
    await with_function.start()
    gated = Gated()
    await harness.worker({"gated": gated})
    task_id = await with_function.create_task(
        params={},
        graph={
            "nodes": [
                node("first", "gated"),
                call("r", "late_registered", "first", **ONCE),
            ]
        },
    )
    await harness.until_node(task_id, "first", "running")
    await with_function.stop()
    gated.gate.set()
    without_function = await harness.engine()
    deferred = await harness.until_node(task_id, "r", "deferred")
    assert "dispatch_lost" in deferred["last_error"]
    assert "has no coordinator function 'late_registered'" in deferred["last_error"]
    without_function.adapters["late_registered"] = late_registered
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert called == [task_id]


async def test_sensitive_value_is_rejected_if_the_node_requests_it(harness: Harness) -> None:
    harness_adapters = default_adapters(db=harness.db, detector=lambda path, value: value == "s3cret")
    await harness.engine(**harness_adapters)
    task_id = await harness.create(
        call("s", "vars.set", args={"kv": {"k": "s3cret"}, "block_sensitive": True})
    )
    reported = await failure(harness, task_id)
    assert "vars.set blocked: 1 sensitive-looking values" in reported
    assert "s3cret" not in reported
    handle = await harness.handle(task_id)
    with pytest.raises(WorkflowFailureError) as failed:
        await handle.result()
    assert isinstance(failed.value.cause, ApplicationError)
