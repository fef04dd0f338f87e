"""Which tasks are open, which engine sweeps them, and how FlowKit closes one whatever its document contains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import AT, RUN, documents_of, new_task, opening, seconds, stored
from tests.contract.drivers import connected
from tests.contract.test_durability import Commands

from flowkit.adapters.mongo import moment
from flowkit.adapters.tasks import open_tasks
from flowkit.adapters.tasks.open_tasks import OpenTasks

if TYPE_CHECKING:
    from tests.contract.conftest import Steady

    from flowkit.adapters.tasks.store import TaskStore


@pytest.fixture
def found(db: Any) -> OpenTasks:
    """Return the open tasks of `db`."""
    return OpenTasks(db)


async def ids(found: OpenTasks, namespace_id: str = "", database_id: str = "") -> set[str]:
    """Return the ids of open tasks."""
    pages = found.pages(namespace_id=namespace_id, database_id=database_id)
    return {document["id"] async for page in pages for document in page}


async def test_open_documents_are_those_that_have_not_ended(tasks: TaskStore, found: OpenTasks) -> None:
    for task_id in ("ended", "running"):
        await tasks.open_task(opening("a", task_id=task_id))
    await tasks.insert_task(new_task("a", task_id="queued"))
    await found.close_orphan("ended", RUN, "lost", AT)
    [page] = [page async for page in found.pages(namespace_id="")]
    shown = {document["id"]: document for document in page}
    assert set(shown) == {"running", "queued"}
    assert (shown["running"]["run_id"], shown["queued"].get("run_id")) == (RUN, None)
    assert all(seconds(document["updated_at"]) == AT for document in page)


async def test_namespace_includes_its_own_documents_and_those_without_a_namespace(
    tasks: TaskStore, found: OpenTasks
) -> None:
    for task_id, more in {
        "none": {},
        "own": {"namespace_id": "ns-1", "database_id": "db-1"},
        "other": {"namespace_id": "ns-2", "database_id": "db-1"},
        "copied": {"namespace_id": "ns-1", "database_id": "db-2"},
    }.items():
        await tasks.insert_task(new_task("a", task_id=task_id) | more)
    assert await ids(found, "ns-1", "db-1") == {"none", "own"}
    assert await ids(found, "ns-1") == {"none", "own", "copied"}
    assert await ids(found) == {"none"}
    assert await found.counts() == {None: 1, "ns-1": 2, "ns-2": 1}
    assert [[each["id"] for each in page] async for page in found.pages_of("ns-2")] == [["other"]]


async def test_documents_are_read_in_pages_one_at_a_time(
    tasks: TaskStore, found: OpenTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_tasks, "_OF_ONE_PAGE", 2)
    for number in range(5):
        await tasks.insert_task(new_task("a", task_id=f"t{number}"))
    pages = found.pages(namespace_id="ns-1")
    first = [each["id"] for each in await anext(pages)]
    left = sorted({f"t{number}" for number in range(5)}.difference(first))
    for ended in (first[0], left.pop()):
        await found.close_orphan(ended, None, "lost", AT)
    assert len(first) == 2
    [second] = [page async for page in pages]
    assert sorted(each["id"] for each in second) == left


@pytest.mark.parametrize(
    "graph", [{}, {"graph": None}, {"graph": {"nodes": None}}, {"graph": {"nodes": [{"node_id": "a"}]}}]
)
async def test_task_with_malformed_nodes_can_be_closed(
    db: Any, found: OpenTasks, graph: dict[str, Any]
) -> None:
    await db.tasks.insert_one({"id": "odd", "status": "running", "run_id": RUN, **graph})
    assert await found.close_orphan("odd", RUN, "lost", AT)
    document = await stored(db, "odd")
    assert (document["status"], document["reason"]) == ("failed", "lost")


# --- one sweep at a time ----------------------------------------------------------------------------------------


async def test_one_engine_sweeps_until_another_one_has_seen_no_renewal_for_its_time(
    db: Any, found: OpenTasks, steady: Steady
) -> None:
    other = OpenTasks(db)
    assert await found.take_turn("ns", "one", 10)
    steady.forward(9)
    assert not await other.take_turn("ns", "two", 10)
    assert await found.take_turn("ns", "one", 10)
    for _ in range(2):
        steady.forward(9)
        assert not await other.take_turn("ns", "two", 10)
    steady.forward(2)
    assert await other.take_turn("ns", "two", 10)
    assert not await found.take_turn("ns", "one", 10)


async def test_each_namespace_has_its_own_sweep_lease(found: OpenTasks) -> None:
    for namespace_id in ("ns-1", "ns-2", ""):
        assert await found.take_turn(namespace_id, "one", 10)


async def test_released_sweep_lease_is_free_immediately(db: Any, found: OpenTasks) -> None:
    await found.take_turn("ns", "one", 10)
    await found.end_turn("ns", "two")
    assert not await found.take_turn("ns", "two", 10)
    await found.end_turn("ns", "one")
    assert await found.take_turn("ns", "two", 10)
    assert len(await documents_of(db.flowkit_meta)) == 1


@pytest.mark.server
async def test_queries_for_open_tasks_fit_the_index_that_contains_no_ended_task(
    contract_mongo_url: str,
) -> None:
    """MongoDB chooses a partial index if the query has its filter, and needs no sort if the keys end in the order.

    The stand-in has no secondary indexes, so the test compares the queries with the index.
    """
    commands = Commands()
    async with connected("motor", contract_mongo_url, event_listeners=[commands]) as client:
        found = OpenTasks(client["contract_open_tasks"])
        await found.prepare()
        await ids(found, "ns-1", "db-1")
        [page async for page in found.pages_of("ns-1")]
        await found.counts()
        await client.drop_database("contract_open_tasks")
    sent = dict(commands.sent)
    [index] = sent["createIndexes"]["indexes"]
    keys, contained = list(index["key"]), index["partialFilterExpression"]
    assert contained == {"finished_at": None}, "a task that has ended has a time here"
    assert keys == ["finished_at", "namespace_id", "_id"]
    reads = [command for name, command in commands.sent if name == "find"]
    assert len(reads) == 2
    for read in reads:
        assert contained.items() <= read["filter"].items()
        assert set(keys[:-1]) <= set(read["filter"]), "the leading keys have fixed values"
        assert list(read["sort"].items()) == [("_id", 1)]
    assert contained.items() <= sent["aggregate"]["pipeline"][0]["$match"].items()


async def test_a_failed_task_is_open_until_its_last_attempt_has_ended(
    tasks: TaskStore, found: OpenTasks, db: Any
) -> None:
    for task_id, finished_at in (("failing", None), ("failed", moment(AT))):
        await tasks.insert_task(
            new_task("a", task_id=task_id) | {"status": "failed", "finished_at": finished_at}
        )
    assert await ids(found) == {"failing"}
