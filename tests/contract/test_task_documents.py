"""The document of a new task has the documented form and never replaces an existing one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.contract.builders import AT, TASK, documents_of, new_task, seconds, stored, stored_node

from flowkit.adapters.mongo import iso
from flowkit.adapters.tasks import fields
from flowkit.adapters.tasks.store import TaskStore
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from datetime import datetime

RUNTIME_FIELDS = {
    "status": "queued",
    "attempt_epoch": 0,
    "stats": {},
    "lease": {},
    "depends_on": [],
    "fan_in": "all",
}


async def test_a_new_document_has_the_documented_fields(db: Any, tasks: TaskStore) -> None:
    await tasks.insert_task(new_task("a", params={"sku": "x"}))
    document = await stored(db)
    assert (document["id"], document["pipeline_id"], document["status"]) == (TASK, TASK, "queued")
    assert document["params"] == {"sku": "x"}
    assert set(document["graph"]) == {"nodes", "edges", "edges_ex"}
    assert document["result"] is document["finished_at"] is document["next_retry_at_ms"] is None
    assert document["coordinator"] == {"liveness": {"state": "ok"}}
    assert document["last_event_recv_ms"] == int(AT * 1000)


async def test_iso_dates_of_a_new_document_end_in_utc(db: Any, tasks: TaskStore) -> None:
    await tasks.insert_task(new_task("a"))
    document = await stored(db)
    [change] = document["status_history"]
    assert document["started_at"] == change["at"] == iso(AT)
    assert document["started_at"].endswith("+00:00")
    assert (change["from"], change["to"]) == (None, "queued")


async def test_dates_are_stored_in_utc(db: Any, tasks: TaskStore) -> None:
    document = new_task("a")
    written: datetime = document["updated_at"]
    offset = written.utcoffset()
    assert offset is not None
    assert not offset
    await tasks.insert_task(document)
    assert seconds((await stored(db))["updated_at"]) == AT


async def test_every_node_starts_with_the_documented_runtime_fields(db: Any, tasks: TaskStore) -> None:
    await tasks.insert_task(new_task("a"))
    assert await stored_node(db) == {"node_id": "a", "type": "crawler", **RUNTIME_FIELDS}


async def test_runtime_fields_of_a_given_graph_are_reset_and_all_others_kept(
    db: Any, tasks: TaskStore
) -> None:
    node = {
        "node_id": "a",
        "type": "crawler",
        "status": "finished",
        "attempt_epoch": 7,
        "fan_in": "any",
        "x-own": 1,
    }
    graph = {"nodes": [node], "edges": [["a", "b"]], "schema_version": "1.0"}
    await tasks.insert_task(fields.new_task(TASK, {}, graph, AT))
    document = await stored(db)
    assert document["graph"]["nodes"] == [{**node, **RUNTIME_FIELDS, "fan_in": "any"}]
    assert (document["graph"]["edges"], document["graph"]["schema_version"]) == ([["a", "b"]], "1.0")


async def test_second_insert_changes_nothing(db: Any, tasks: TaskStore) -> None:
    await tasks.insert_task(new_task("a"))
    first = await stored(db)
    await tasks.insert_task(new_task("b", "c", params={"other": True}))
    assert await documents_of(db.tasks) == [first]


async def test_concurrent_inserts_leave_one_document(db: Any, tasks: TaskStore) -> None:
    await asyncio.gather(*(tasks.insert_task(new_task("a")) for _ in range(10)))
    assert len(await documents_of(db.tasks)) == 1


async def test_database_has_one_deployment_id_for_all_processes(db: Any) -> None:
    seen = await asyncio.gather(*(TaskStore(db).database_id() for _ in range(10)))
    assert len(set(seen)) == 1
    assert seen[0] == await TaskStore(db).database_id() != ""


async def test_two_databases_have_different_deployment_ids(tasks: TaskStore) -> None:
    assert await tasks.database_id() != await TaskStore(memory_database()).database_id()
