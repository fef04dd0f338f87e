"""The effect of a function node on its task counts once in each generation of the node, whatever happens in between."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import (
    AT,
    RUN,
    TASK,
    WORKER,
    attempt,
    begun,
    close,
    new_task,
    opened,
    record,
    seconds,
    shown,
    stored,
    stored_node,
)
from tests.contract.recording_database import RecordingDatabase
from tests.contract.variables import held, hold, refused, unchanged, write

from flowkit.adapters.tasks.open_tasks import OpenTasks
from flowkit.adapters.tasks.store import TaskStore
from flowkit.coordinator.adapters import AdapterError, CoordinatorAdapters
from flowkit.errors import EpochTaken, Fenced, StoreRefused
from flowkit.models import NodeStatus, SkipReason, TaskStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flowkit.adapters.tasks.attempts import NodeWrite

    Call = Callable[[CoordinatorAdapters], Awaitable[dict[str, Any]]]


async def count(adapters: CoordinatorAdapters, as_: NodeWrite) -> dict[str, Any]:
    """Count once more, as this attempt of a node."""
    return await adapters.for_node(as_).vars_incr(TASK, key="n", by=1)


IN_ONE: dict[str, Call] = {
    "set": lambda a: a.vars_set(TASK, kv={"x.y": 1}),
    "merge": lambda a: a.vars_merge(TASK, x={"y": 1}, z=2),
    "incr": lambda a: a.vars_incr(TASK, key="x.y"),
    "unset": lambda a: a.vars_unset(TASK, "x.old"),
    "noop": lambda a: a.noop(TASK, any_thing=1),
    "set nothing": lambda a: a.vars_set(TASK, kv={}),
    "unset nothing": lambda a: a.vars_unset(TASK),
}
one_update = pytest.mark.parametrize("call", IN_ONE.values(), ids=list(IN_ONE))

# --- one update -------------------------------------------------------------------------------------------------


@one_update
async def test_node_starts_and_finishes_in_the_update_that_applies_its_effect(
    db: Any, adapters: CoordinatorAdapters, call: Call
) -> None:
    await hold(db, {"x": {"old": 1, "kept": 2}})
    recording = RecordingDatabase(db)
    own = CoordinatorAdapters(db=recording).for_node(write(3, generation=2, at=AT + 5))
    assert (await call(own))["ok"] is True
    assert len(recording.updates) == 1
    node = await stored_node(db)
    assert (node["status"], node["attempt_epoch"], node["run_id"]) == ("finished", 3, RUN)
    assert node["lease"] == {"worker_id": WORKER, "deadline_ts_ms": 1}
    assert seconds(node["started_at"]) == seconds(node["finished_at"]) == AT + 5
    assert (node["applied_generation"], node["last_event_recv_ms"]) == (2, int((AT + 5) * 1000))
    assert (await stored(db))["last_event_recv_ms"] == int((AT + 5) * 1000)
    assert (await stored_node(db, 1))["status"] == "queued"


async def test_effect_of_a_node_equals_that_of_a_direct_call(db: Any, adapters: CoordinatorAdapters) -> None:
    await hold(db, {"x": {"old": 1}})
    for epoch, call in enumerate(IN_ONE.values(), start=1):
        await call(adapters.for_node(write(epoch, generation=epoch)))
    assert await held(db) == {"x": {"y": 2}, "z": 2}


async def test_finished_node_has_no_data_of_an_earlier_end(
    db: Any, tasks: TaskStore, adapters: CoordinatorAdapters
) -> None:
    ended = shown("a", NodeStatus.SKIPPED, last_error="x", skip_reason=SkipReason.USER)
    await tasks.record(record(ended))
    await count(adapters, write(2))
    node = await stored_node(db)
    assert (node["status"], node["last_error"], node["next_retry_at_ms"]) == ("finished", None, None)
    assert node.get("skip_reason") is None


async def test_started_attempt_applies_its_effect_and_finishes(
    db: Any, tasks: TaskStore, adapters: CoordinatorAdapters
) -> None:
    await begun(tasks, attempt())
    await count(adapters, write())
    assert await held(db) == {"n": 1}
    assert (await stored_node(db))["status"] == "finished"


async def test_nodes_and_direct_calls_take_effect_independently(
    db: Any, adapters: CoordinatorAdapters
) -> None:
    await count(adapters, write())
    await count(adapters, write(node="b", index=1))
    for _ in range(3):
        await adapters.vars_incr(TASK, key="n")
    assert await held(db) == {"n": 5}


# --- repetitions ------------------------------------------------------------------------------------------------


@one_update
async def test_repeated_attempt_changes_nothing(db: Any, adapters: CoordinatorAdapters, call: Call) -> None:
    await hold(db, {"x": {"old": 1, "kept": 2}})
    own = adapters.for_node(write())
    first = await call(own)
    async with unchanged(db):
        assert await call(own) == first


@one_update
async def test_another_attempt_of_the_generation_only_finishes_the_node(
    db: Any, adapters: CoordinatorAdapters, call: Call
) -> None:
    await hold(db, {"x": {"old": 1, "kept": 2}})
    first = await call(adapters.for_node(write()))
    variables = await held(db)
    assert await call(adapters.for_node(write(2, run="run-2", at=AT + 9))) == first
    assert await held(db) == variables
    node = await stored_node(db)
    assert (node["status"], node["attempt_epoch"], node["run_id"]) == ("finished", 2, "run-2")
    assert seconds(node["started_at"]) == seconds(node["finished_at"]) == AT + 9
    assert node["applied_generation"] == 0


async def test_writes_between_two_attempts_are_kept(db: Any, adapters: CoordinatorAdapters) -> None:
    await hold(db, {"gone": 1, "kept": 2})
    calls: list[tuple[str, Call]] = [
        ("a", lambda a: a.vars_set(TASK, kv={"by.node": 1})),
        ("b", lambda a: a.vars_unset(TASK, "gone")),
    ]
    for index, (node, call) in enumerate(calls):
        await call(adapters.for_node(write(node=node, index=index)))
    await adapters.vars_set(TASK, kv={"by.node": "others", "gone": "back"})
    for index, (node, call) in enumerate(calls):
        await call(adapters.for_node(write(2, node=node, index=index)))
    assert await held(db) == {"by": {"node": "others"}, "gone": "back", "kept": 2}


@pytest.mark.parametrize(
    ("value", "meanwhile"),
    [
        (1, {"x": "a text by now"}),
        ("x" * 5_000, {"x": "a text by now"}),
        ("x" * 5_000, {f"k{n}": "x" * 65_000 for n in range(16)}),
    ],
    ids=["conflict", "large, conflict", "large, no room"],
)
async def test_another_attempt_finishes_even_if_the_effect_would_now_fail(
    db: Any, adapters: CoordinatorAdapters, value: object, meanwhile: dict[str, Any]
) -> None:
    def call(epoch: int) -> Awaitable[object]:
        return adapters.for_node(write(epoch)).vars_set(TASK, kv={"x.y": value})

    await call(1)
    await hold(db, meanwhile)
    await call(2)
    assert await held(db) == meanwhile
    assert (await stored_node(db))["attempt_epoch"] == 2


async def test_next_generation_takes_effect_again(db: Any, adapters: CoordinatorAdapters) -> None:
    for epoch, generation in enumerate([0, 0, 1, 1, 2, 5, 5], start=1):
        await count(adapters, write(epoch, generation=generation))
    assert await held(db) == {"n": 4}
    assert (await stored_node(db))["applied_generation"] == 5


async def test_earlier_generation_that_returns_takes_no_effect(
    db: Any, adapters: CoordinatorAdapters
) -> None:
    """A reset to a point before the rerun: its epochs are new, but its generation is not."""
    for epoch, generation in ((1, 0), (2, 1), (3, 0), (4, 0)):
        await count(adapters, write(epoch, generation=generation, run=f"run-{epoch}"))
    assert await held(db) == {"n": 2}
    assert (await stored_node(db))["applied_generation"] == 1


async def test_twenty_concurrent_attempts_take_effect_once(db: Any, adapters: CoordinatorAdapters) -> None:
    others = [CoordinatorAdapters(db=db) for _ in range(4)]
    calls = (count(others[epoch % 4], write(epoch)) for epoch in range(1, 21))
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(result) for result in results} <= {dict, EpochTaken, Fenced}
    assert await held(db) == {"n": 1}
    node = await stored_node(db)
    assert (node["status"], node["attempt_epoch"]) == ("finished", 20)
    assert results[-1] == {"ok": True, "key": "n", "by": 1}


async def test_same_attempt_twenty_times_concurrently_takes_effect_once(
    db: Any, adapters: CoordinatorAdapters
) -> None:
    for generation in range(5):
        own = write(generation + 1, generation=generation)
        assert await asyncio.gather(*(count(adapters, own) for _ in range(20)))
        assert await held(db) == {"n": generation + 1}


async def test_twenty_concurrent_nodes_take_effect_once_each(db: Any, tasks: TaskStore) -> None:
    names = [f"node-{n}" for n in range(20)]
    await opened(tasks, *names)
    adapters = CoordinatorAdapters(db=db)
    writes = [write(node=name, index=index) for index, name in enumerate(names)]
    await asyncio.gather(*(count(adapters, own) for own in writes + writes))
    assert await held(db) == {"n": 20}


# --- rejections -------------------------------------------------------------------------------------------------


@one_update
@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize(("epoch", "run"), [(2, RUN), (2, "run-2"), (3, "run-2")])
async def test_older_epoch_and_epoch_of_another_run_are_rejected(
    db: Any,
    tasks: TaskStore,
    adapters: CoordinatorAdapters,
    call: Call,
    epoch: int,
    run: str,
    *,
    applied: bool,
) -> None:
    await hold(db, {"x": {"old": 1, "kept": 2}})
    if applied:
        await call(adapters.for_node(write(3)))
    else:
        await begun(tasks, attempt(epoch=3))
    async with unchanged(db):
        with pytest.raises(EpochTaken) as caught:
            await call(adapters.for_node(write(epoch, run=run)))
    assert caught.value.current == 3


async def test_older_generation_is_rejected(db: Any, adapters: CoordinatorAdapters) -> None:
    await count(adapters, write(1))
    await count(adapters, write(3, generation=1))
    for epoch in (1, 2):
        async with unchanged(db):
            with pytest.raises(EpochTaken):
                await count(adapters, write(epoch))
    assert await held(db) == {"n": 2}


async def test_attempt_that_is_overtaken_before_its_write_takes_no_effect(server_db: Any) -> None:
    await server_db.tasks.insert_one(new_task("a"))
    db, other = RecordingDatabase(server_db), TaskStore(server_db)
    db.before["tasks"].append(lambda: begun(other, attempt(epoch=2)))
    with pytest.raises(EpochTaken):
        await count(CoordinatorAdapters(db=db), write(1))
    assert await held(server_db) is None
    assert (await stored_node(server_db))["status"] == "running"


@pytest.mark.parametrize(("epoch", "applied"), [(1, False), (2, False), (2, True)])
async def test_attempt_of_the_run_that_closed_the_task_is_rejected(
    db: Any, tasks: TaskStore, adapters: CoordinatorAdapters, epoch: int, *, applied: bool
) -> None:
    if applied:
        await count(adapters, write(1))
    await tasks.close_task(close(shown("b", NodeStatus.SKIPPED, index=1), status=TaskStatus.FAILED))
    async with unchanged(db):
        with pytest.raises(Fenced, match="ended"):
            await count(adapters, write(epoch))


@pytest.mark.parametrize("applied", [True, False])
async def test_newer_run_continues_a_closed_task(
    db: Any, tasks: TaskStore, adapters: CoordinatorAdapters, *, applied: bool
) -> None:
    if applied:
        await count(adapters, write(1))
    assert await OpenTasks(tasks.database).close_orphan(TASK, RUN, "terminated", AT)
    await count(adapters, write(2, run="run-2"))
    document = await stored(db)
    assert (document["status"], document["run_id"], document["finished_at"]) == ("running", "run-2", None)
    assert await held(db) == {"n": 1}


@pytest.mark.parametrize("status", [NodeStatus.FAILED, NodeStatus.CANCELLED])
async def test_attempt_of_a_node_that_has_ended_otherwise_is_rejected(
    db: Any, tasks: TaskStore, adapters: CoordinatorAdapters, status: NodeStatus
) -> None:
    await begun(tasks, attempt())
    await tasks.record(record(shown("a", status, epoch=1)))
    async with unchanged(db):
        with pytest.raises(EpochTaken):
            await count(adapters, write())


async def test_conflict_changes_no_variables_and_the_next_attempt_takes_effect(
    db: Any, adapters: CoordinatorAdapters
) -> None:
    await hold(db, {"n": "text", "x": {"kept": 1}})
    await refused(count(adapters, write(1)), "n")
    await refused(adapters.for_node(write(2)).vars_set(TASK, kv={"x.new": 1, "n.m": 2}), "n")
    assert await held(db) == {"n": "text", "x": {"kept": 1}}
    node = await stored_node(db)
    assert (node["status"], node["attempt_epoch"], node.get("applied_generation")) == ("running", 2, None)
    await hold(db, {"n": 5})
    await count(adapters, write(3))
    assert await held(db) == {"n": 6}


async def test_invalid_operation_does_not_start_the_node(db: Any, adapters: CoordinatorAdapters) -> None:
    own = adapters.for_node(write())
    async with unchanged(db):
        await refused(own.vars_set(TASK, kv={"$x": 1}))
        await refused(own.vars_merge(TASK, a="A" * 24, block_sensitive=True))
        await refused(own.vars_incr(TASK, key="a", by=float("nan")))
        await refused(own.vars_unset(TASK, "a", "a.b"))


async def test_node_of_an_unknown_task_or_another_graph_is_rejected(
    db: Any, adapters: CoordinatorAdapters
) -> None:
    async with unchanged(db):
        for node, index in (("stranger", 0), ("a", 7)):
            with pytest.raises(StoreRefused, match="another graph"):
                await count(adapters, write(node=node, index=index))
    await db.tasks.delete_many({})
    for call in IN_ONE.values():
        with pytest.raises(AdapterError, match="no task"):
            await call(adapters.for_node(write()))
