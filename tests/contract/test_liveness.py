"""The fields of a task document for silent attempts, and the cancel flag of a single node."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import (
    RUN,
    TASK,
    attempt,
    begun,
    close,
    opened,
    record,
    shown,
    stored,
    stored_node,
)

from flowkit.adapters.dispatches import last_event_times
from flowkit.adapters.tasks.cancel_flags import CancelFlag
from flowkit.adapters.worker_registry import WorkerRegistry
from flowkit.models import NodeStatus, TaskStatus

if TYPE_CHECKING:
    from flowkit.adapters.tasks.store import TaskStore

DEFERRED = TaskStatus.DEFERRED


@pytest.fixture(autouse=True)
async def _running(tasks: TaskStore) -> None:
    await opened(tasks, "a", "b")
    await begun(tasks, attempt())
    await begun(tasks, attempt("b", index=1))


async def test_silent_nodes_are_shown_until_they_are_heard(tasks: TaskStore, db: Any) -> None:
    await tasks.record(replace(record(status=DEFERRED), silent={0: "a", 1: "b"}))
    document = await stored(db)
    assert (document["liveness"], document["status"]) == ("silent", "deferred")
    liveness = document["coordinator"]["liveness"]
    assert (liveness["state"], liveness["silent_nodes"]) == ("suspected", ["a", "b"])
    await tasks.record(replace(record(), silent={1: "b"}, heard=[0]))
    document = await stored(db)
    assert (document["liveness"], document["coordinator"]["liveness"]["silent_nodes"]) == ("silent", ["b"])
    assert ["liveness" in node for node in document["graph"]["nodes"]] == [False, True]
    await tasks.record(replace(record(), heard=[1]))
    document = await stored(db)
    assert ("liveness" in document, document["coordinator"]["liveness"]) == (False, {"state": "ok"})
    assert ["liveness" in node for node in document["graph"]["nodes"]] == [False, False]


async def test_record_about_nodes_only_leaves_the_liveness_as_it_is(tasks: TaskStore, db: Any) -> None:
    await tasks.record(record(shown("a", NodeStatus.DEFERRED, epoch=1)))
    document = await stored(db)
    assert ("liveness" in document, document["coordinator"]["liveness"]) == (False, {"state": "ok"})


@pytest.mark.parametrize(("dead", "state"), [(True, "dead"), (False, "ok")])
async def test_task_that_failed_for_silence_is_dead(
    tasks: TaskStore, db: Any, dead: bool, state: str
) -> None:
    failed = shown("a", NodeStatus.FAILED, epoch=1)
    assert await tasks.close_task(close(failed, status=TaskStatus.FAILED, dead=dead))
    assert (await stored(db))["coordinator"]["liveness"] == {"state": state}


async def test_task_that_a_later_run_continues_is_no_longer_dead(tasks: TaskStore, db: Any) -> None:
    await tasks.close_task(close(shown("a", NodeStatus.FAILED, epoch=1), status=TaskStatus.FAILED, dead=True))
    await tasks.reopen(TASK, "run-2")
    assert (await stored(db))["coordinator"]["liveness"] == {"state": "ok"}


async def test_flag_of_a_single_node_stops_only_its_attempt_and_names_the_run(tasks: TaskStore) -> None:
    stopped = shown("b", NodeStatus.CANCELLING, index=1, epoch=1, cancel_reason="deadline")
    await tasks.record(record(stopped))
    flag = await tasks.flags.find_flag(attempt("b", index=1))
    assert flag == CancelFlag(reason="deadline", run_id=RUN)
    assert (flag.concerns(RUN), flag.concerns("a-later-run")) == (True, False)
    assert await tasks.flags.find_flag(attempt()) is None


async def test_flag_of_the_task_precedes_that_of_a_node(tasks: TaskStore) -> None:
    stopped = shown("b", NodeStatus.CANCELLING, index=1, epoch=1, cancel_reason="deadline")
    await tasks.record(record(stopped, cancel="enough"))
    assert await tasks.flags.find_flag(attempt("b", index=1)) == CancelFlag(reason="enough", run_id=RUN)


async def test_next_attempt_removes_the_flag_of_its_node(tasks: TaskStore, db: Any) -> None:
    stopped = shown("a", NodeStatus.CANCELLING, epoch=1, cancel_reason="deadline")
    await tasks.record(record(stopped))
    await begun(tasks, attempt(epoch=2), run="run-2")
    assert "coordinator" not in await stored_node(db)


async def test_role_is_served_while_one_of_its_workers_is_online(db: Any) -> None:
    registry = WorkerRegistry(db)
    await registry.register("w-1", ["index", "c.d"], "1", 1, 1.0)
    await registry.record_announcement("w-2", {"type": "enrich"}, 1.0)
    roles = ("index", "c.d", "enrich", "cxd", "ind", "dex")
    assert [await registry.is_served(role) for role in roles] == [True, True, True, False, False, False]
    await registry.mark_offline("w-2", 2.0)
    assert not await registry.is_served("enrich")


async def test_last_event_of_an_external_attempt_follows_from_its_lease(db: Any) -> None:
    rows: list[dict[str, Any]] = [
        {"node_id": "new", "accepted_at": 90.0, "lease": {"expires_at": 140.0, "ttl_sec": 60.0}},
        {"node_id": "old", "accepted_at": 20.0, "lease": {"expires_at": 140.0, "ttl_sec": 60.0}},
        {"node_id": "queued", "accepted_at": None, "lease": None},
        {"node_id": "ended", "accepted_at": 20.0, "lease": None, "state": "reported"},
    ]
    base: dict[str, Any] = {"task_id": "t", "attempt_epoch": 3, "state": "open"}
    for number, row in enumerate(rows):
        await db.dispatches.insert_one({"_id": str(number), **base, **row})
    assert await last_event_times(db, "t") == {("new", 3): 90.0, ("old", 3): 80.0}
