"""Stored graphs: an engine reads what a client stored, from the same database only, and validates it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from tests.contract.builders import TASK, engine_activities, graph, opening
from tests.contract.builders import stored as document

from flowkit.adapters.tasks import stored_graphs
from flowkit.adapters.tasks.purge import Purge
from flowkit.adapters.tasks.stored_graphs import StoredGraphs, pack_task, unpack_task
from flowkit.models import Opened, OpenTask, ReadStoredGraph, StoredGraph

if TYPE_CHECKING:
    from flowkit.adapters.tasks.store import TaskStore


async def put(tasks: TaskStore, *node_ids: str, **task: Any) -> StoredGraph:
    """Store a graph of these nodes."""
    content = pack_task({"graph": graph(*node_ids), "params": {"n": 1}, **task})
    database_id = await tasks.database_id()
    return await StoredGraphs(tasks.database).put(TASK, content, namespace_id="", database_id=database_id)


def opening_of(reference: StoredGraph) -> OpenTask:
    """Return the record with which a run opens a task whose graph is stored."""
    return replace(opening(), graph={}, params={}, stored=reference)


async def failure(tasks: TaskStore, reference: StoredGraph) -> ApplicationError:
    """Return the error with which an engine rejects to open a task."""
    with pytest.raises(ApplicationError) as caught:
        await ActivityEnvironment().run(engine_activities(tasks).open_task, opening_of(reference))
    return caught.value


async def test_task_is_opened_with_its_stored_graph(db: Any, tasks: TaskStore) -> None:
    found = await ActivityEnvironment().run(
        engine_activities(tasks).open_task, opening_of(await put(tasks, "a", "b"))
    )
    assert isinstance(found, Opened)
    opened = await document(db)
    assert [node["node_id"] for node in opened["graph"]["nodes"]] == ["a", "b"]
    assert (opened["params"], opened["status"]) == ({"n": 1}, "running")


async def test_parts_together_are_the_content(tasks: TaskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_graphs, "STORED_PART_BYTES", 20)
    reference = await put(tasks, "a", "b")
    assert reference.parts > 2
    read = [ReadStoredGraph(task_id=TASK, stored=reference, part=part) for part in range(reference.parts)]
    parts = [
        await ActivityEnvironment().run(engine_activities(tasks).read_stored_graph, each) for each in read
    ]
    assert len(b"".join(parts)) == reference.size
    assert unpack_task(b"".join(parts)) == {"graph": graph("a", "b"), "params": {"n": 1}}


async def test_storing_the_same_graph_again_changes_nothing(db: Any, tasks: TaskStore) -> None:
    assert await put(tasks, "a") == await put(tasks, "a")
    assert await db.stored_graphs.count_documents({}) == 1


async def test_deleted_graph_fails_the_task(db: Any, tasks: TaskStore) -> None:
    reference = await put(tasks, "a")
    await db.stored_graphs.delete_many({})
    error = await failure(tasks, reference)
    assert (error.type, error.non_retryable) == ("invalid_graph", True)
    assert "part 1 of 1 of the graph" in error.message


async def test_graph_in_another_database_is_left_to_another_engine(tasks: TaskStore) -> None:
    error = await failure(tasks, replace(await put(tasks, "a"), deployment="elsewhere"))
    assert (error.type, error.non_retryable) == ("wrong_database", False)


async def test_invalid_stored_graph_fails_the_task(tasks: TaskStore) -> None:
    error = await failure(tasks, await put(tasks, "a", graph={"nodes": [{"node_id": "*", "type": "r"}]}))
    assert (error.type, error.non_retryable) == ("invalid_graph", True)


async def test_engine_rejects_a_large_graph_with_its_own_external_role(
    tasks: TaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowkit.graph.submission.EXTERNAL_NODES", 1)
    given = opening("a", "b")
    role = given.graph["nodes"][0]["type"]
    with pytest.raises(ApplicationError, match=f"external role '{role}'"):
        await ActivityEnvironment().run(engine_activities(tasks, external_roles=(role,)).open_task, given)


async def put_of_schedule(tasks: TaskStore, namespace_id: str = "ns-1") -> StoredGraph:
    """Store the graph of the schedule `nightly`."""
    content = pack_task({"graph": graph("a"), "params": {}})
    ids = {"namespace_id": namespace_id, "database_id": await tasks.database_id(), "schedule_id": "nightly"}
    return await StoredGraphs(tasks.database).put("", content, **ids)


def purge_of(tasks: TaskStore, before: datetime) -> Purge:
    """Return a purge of the namespace `ns-1`."""
    return Purge(tasks.database, before=before.timestamp(), statuses=["finished"], namespace_id="ns-1")


async def test_purge_leaves_the_graph_of_a_schedule_of_the_same_name_in_another_namespace(
    tasks: TaskStore,
) -> None:
    own, other = await put_of_schedule(tasks), await put_of_schedule(tasks, "ns-2")
    purge = purge_of(tasks, datetime.now(UTC) + timedelta(minutes=1))
    assert await purge.schedules() == ["nightly"]
    assert await purge.count_graphs({"nightly": own.graph_id}) == 0
    gone = {"nightly": ""}
    assert (await purge.count_graphs(gone), await purge.remove_graphs(gone)) == (1, 1)
    stored = StoredGraphs(tasks.database)
    assert [await stored.part(TASK, each, 0) is None for each in (own, other)] == [True, False]


async def test_purge_leaves_the_graph_of_a_schedule_that_is_created_again_meanwhile(tasks: TaskStore) -> None:
    await put_of_schedule(tasks)
    await tasks.database.stored_graphs.update_many(
        {}, {"$set": {"created_at": datetime(2026, 1, 1, tzinfo=UTC)}}
    )
    purge = purge_of(tasks, datetime.now(UTC) - timedelta(minutes=1))
    assert await purge.schedules() == ["nightly"]
    again = await put_of_schedule(tasks)
    assert await purge.remove_graphs({"nightly": ""}) == 0
    assert await StoredGraphs(tasks.database).part(TASK, again, 0) is not None


async def test_a_task_without_the_graph_of_its_schedule_says_which_schedule_to_update(
    tasks: TaskStore,
) -> None:
    reference = await put_of_schedule(tasks)
    await tasks.database.stored_graphs.delete_many({})
    assert "update schedule 'nightly' with its graph" in (await failure(tasks, reference)).message
