"""A run that opens a task takes over its own document and no other."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import (
    AT,
    FIRST_RUN,
    RUN,
    TASK,
    attempt,
    begun,
    close,
    graph,
    new_task,
    opened,
    opening,
    seconds,
    stored,
)

from flowkit.adapters.tasks import fields
from flowkit.adapters.tasks.open_tasks import OpenTasks
from flowkit.errors import TaskIdTaken
from flowkit.models import TaskStatus

if TYPE_CHECKING:
    from flowkit.adapters.tasks.store import TaskStore


async def test_missing_document_is_inserted_as_running(db: Any, tasks: TaskStore) -> None:
    assert await tasks.open_task(opening("a")) == (1, [])
    document = await stored(db)
    assert (document["status"], document["first_run_id"], document["run_id"]) == ("running", FIRST_RUN, RUN)
    assert (document["run_seq"], document["params"]) == (1, {"n": 1})
    assert seconds(document["updated_at"]) == AT


async def test_document_of_the_same_first_run_is_continued(db: Any, tasks: TaskStore) -> None:
    await tasks.open_task(opening("a"))
    await tasks.open_task(opening("a", run="run-2"))
    document = await stored(db)
    assert (document["status"], document["first_run_id"], document["run_id"]) == (
        "running",
        FIRST_RUN,
        "run-2",
    )


async def test_queued_document_without_a_run_is_adopted_unchanged(db: Any, tasks: TaskStore) -> None:
    await tasks.insert_task(new_task("a", params={"from": "client"}))
    await tasks.open_task(opening("a"))
    document = await stored(db)
    assert (document["status"], document["first_run_id"]) == ("running", FIRST_RUN)
    assert document["params"] == {"from": "client"}


async def test_document_of_another_task_is_not_changed(db: Any, tasks: TaskStore) -> None:
    await tasks.open_task(opening("a"))
    before = await stored(db)
    with pytest.raises(TaskIdTaken, match=TASK):
        await tasks.open_task(opening("a", first_run="other"))
    assert await stored(db) == before


async def test_finished_document_of_another_task_is_not_changed(tasks: TaskStore) -> None:
    await tasks.open_task(opening("a"))
    await tasks.close_task(close())
    with pytest.raises(TaskIdTaken):
        await tasks.open_task(opening("a", first_run="other"))


async def test_document_closed_by_the_sweep_is_not_adopted(tasks: TaskStore) -> None:
    await tasks.insert_task(new_task("a"))
    assert await OpenTasks(tasks.database).close_orphan(TASK, None, "lost", AT)
    with pytest.raises(TaskIdTaken):
        await tasks.open_task(opening("a"))


async def test_run_seq_increases_with_every_opening(tasks: TaskStore) -> None:
    assert [await opened(tasks, "a", run=f"run-{n}") for n in range(4)] == [1, 2, 3, 4]


async def test_late_retry_of_an_opening_does_not_fence_its_own_run(db: Any, tasks: TaskStore) -> None:
    await tasks.insert_task(new_task("a"))
    first, _ = await tasks.open_task(opening("a"))
    assert await tasks.open_task(opening("a")) == (first, [])
    await tasks.close_task(close(run_seq=first))
    assert (await stored(db))["status"] == "finished"


async def test_retry_of_an_opening_after_the_close_does_not_reopen_the_document(
    db: Any, tasks: TaskStore
) -> None:
    await tasks.open_task(opening("a"))
    await tasks.close_task(close())
    before = await stored(db)
    await tasks.open_task(opening("a"))
    assert await stored(db) == before


async def test_opening_returns_the_highest_used_epochs(tasks: TaskStore) -> None:
    await tasks.open_task(opening("a", "b", "c"))
    for epoch in (1, 2, 5):
        await begun(tasks, attempt("a", epoch=epoch))
    await begun(tasks, attempt("c", index=2, epoch=3))
    _, epochs = await tasks.open_task(opening("a", "b", "c", run="run-2"))
    assert epochs == [5, 0, 3]


async def test_repeated_opening_does_not_skip_the_epoch_of_an_attempt_of_its_own_run(
    tasks: TaskStore,
) -> None:
    """An engine that is killed in the first workflow task has opened the task and begun inline attempts."""
    await tasks.open_task(opening("a", "b", "c", run="run-0"))
    await begun(tasks, attempt("a", epoch=3), run="run-0")
    await begun(tasks, attempt("b", index=1, epoch=2), run="run-0")
    await tasks.open_task(opening("a", "b", "c"))
    await begun(tasks, attempt("a", epoch=4))
    await begun(tasks, attempt("c", index=2, epoch=1))
    _, epochs = await tasks.open_task(opening("a", "b", "c"))
    assert epochs == [3, 2, 0]


async def test_one_of_two_concurrent_tasks_gets_the_id(db: Any, tasks: TaskStore) -> None:
    results = await asyncio.gather(
        *(tasks.open_task(opening("a", first_run=f"first-{n}")) for n in range(10)), return_exceptions=True
    )
    assert [type(result) for result in results if isinstance(result, Exception)] == [TaskIdTaken] * 9
    assert (await stored(db))["run_seq"] == 1


async def test_opening_clears_the_flags_of_an_earlier_end(db: Any, tasks: TaskStore) -> None:
    await tasks.open_task(opening("a"))
    await tasks.close_task(close(status=TaskStatus.CANCELLED, reason="enough"))
    await tasks.open_task(opening("a", run="run-2"))
    document = await stored(db)
    assert document["coordinator"] == {"liveness": {"state": "ok"}}
    assert "closed_run_id" not in document
    assert await tasks.flags.find_flag(attempt()) is None


async def test_opening_clears_the_earlier_outcome_of_the_task(db: Any, tasks: TaskStore) -> None:
    await tasks.open_task(opening("a"))
    await tasks.close_task(close(status=TaskStatus.FINISHED, reason="done"))
    await tasks.open_task(opening("a", run="run-2"))
    document = await stored(db)
    assert document["status"] == "running"
    assert [document[field] for field in ("finished_at", "reason", "result")] == [None, None, None]


# --- namespace and database of a document -----------------------------------------------------------------------


async def test_document_keeps_the_namespace_and_the_database_that_opened_it(
    db: Any, tasks: TaskStore
) -> None:
    await tasks.open_task(opening("a"), namespace_id="ns-1", database_id="db-1")
    document = await stored(db)
    assert (document["namespace_id"], document["database_id"]) == ("ns-1", "db-1")


async def test_document_without_a_namespace_gets_that_of_its_first_run(db: Any, tasks: TaskStore) -> None:
    await tasks.insert_task(new_task("a"))
    await tasks.open_task(opening("a"), namespace_id="ns-1")
    assert (await stored(db))["namespace_id"] == "ns-1"


async def test_engine_without_a_namespace_id_keeps_the_one_of_the_client(db: Any, tasks: TaskStore) -> None:
    await tasks.insert_task(new_task("a") | {"namespace_id": "ns-1"})
    await tasks.open_task(opening("a"))
    document = await stored(db)
    assert (document["namespace_id"], "database_id" in document) == ("ns-1", False)


async def test_queued_document_of_another_namespace_is_not_changed(db: Any, tasks: TaskStore) -> None:
    await tasks.insert_task(new_task("a") | {"namespace_id": "ns-2"})
    before = await stored(db)
    with pytest.raises(TaskIdTaken):
        await tasks.open_task(opening("a"), namespace_id="ns-1")
    assert await stored(db) == before


GRAPHS: dict[str, tuple[dict[str, Any], str]] = {
    "fewer nodes": (
        {"nodes": [{"node_id": "a", "type": "crawler"}]},
        "its document has 1 nodes, not 2",
    ),
    "another id": (
        {"nodes": [{"node_id": "a", "type": "crawler"}, {"node_id": "x", "type": "crawler"}]},
        "its document has node_id 'x' at graph.nodes[1], not 'b'",
    ),
    "another type": (
        {"nodes": [{"node_id": "a", "type": "crawler"}, {"node_id": "b", "type": "indexer"}]},
        "its document has type 'indexer' at graph.nodes[1], not 'crawler'",
    ),
    "another parent": (
        {**graph("a", "b"), "edges": [["a", "b"]]},
        "its document has depends_on ['a'] at graph.nodes[1], not []",
    ),
}


@pytest.mark.parametrize(("other", "reported"), GRAPHS.values(), ids=list(GRAPHS))
async def test_queued_document_with_another_graph_is_not_changed(
    db: Any, tasks: TaskStore, other: dict[str, Any], reported: str
) -> None:
    await tasks.insert_task(fields.new_task(TASK, {}, other, AT))
    before = await stored(db)
    with pytest.raises(TaskIdTaken) as caught:
        await tasks.open_task(opening("a", "b"))
    assert str(caught.value) == f"task id {TASK!r} was used for another graph: {reported}; choose another id"
    assert await stored(db) == before


async def test_queued_document_without_a_graph_is_not_changed(db: Any, tasks: TaskStore) -> None:
    await db.tasks.insert_one({"id": TASK, "status": "queued"})
    with pytest.raises(TaskIdTaken, match="contains no graph"):
        await tasks.open_task(opening("a"))


async def test_parents_can_be_given_by_edges_or_by_nodes(db: Any, tasks: TaskStore) -> None:
    nodes = graph("a", "b", "c")["nodes"]
    by_edges = {"nodes": nodes, "edges": [["a", "c"]], "edges_ex": [{"from": "b", "to": "c"}]}
    by_nodes = {"nodes": [*nodes[:2], {**nodes[2], "depends_on": ["b", "a"]}]}
    await tasks.insert_task(fields.new_task(TASK, {}, by_edges, AT))
    await tasks.open_task(replace(opening(), graph=by_nodes))
    assert (await stored(db))["graph"]["nodes"][2]["depends_on"] == ["a", "b"]
