"""FlowKit closes a task whatever its document contains: it truncates large values until the document fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import (
    AT,
    CHANGES,
    RUN,
    TASK,
    close,
    documents_of,
    opened,
    record,
    shown,
    stored,
    stored_statuses,
)
from tests.contract.recording_database import RecordingDatabase
from tests.contract.size_limited_database import SizeLimitedDatabase

from flowkit.adapters.tasks.store import TaskStore
from flowkit.errors import StoreTooLarge
from flowkit.models import NodeStatus, SkipReason, StatusChange, TaskStatus

if TYPE_CHECKING:
    from flowkit.models import NodeRecord

MANY = 350
ERROR = "e" * 500


def many(status: NodeStatus, **more: Any) -> list[NodeRecord]:
    """Return all nodes of a large graph."""
    return [shown(f"n{i}", status, index=i, **more) for i in range(MANY)]


async def large(db: Any) -> TaskStore:
    """An open task with many nodes."""
    tasks = TaskStore(db)
    await opened(tasks, *(f"n{i}" for i in range(MANY)))
    return tasks


async def test_many_nodes_are_closed_in_several_updates_and_the_task_in_the_last(db: Any) -> None:
    recording = RecordingDatabase(db)
    tasks = await large(recording)
    recording.updates.clear()
    skipped = many(NodeStatus.SKIPPED, skip_reason=SkipReason.UPSTREAM_FAILED)
    assert await tasks.close_task(close(*skipped, status=TaskStatus.FAILED, reason="node 'n0' failed: x"))
    assert [("status" in update["$set"]) for update in recording.updates] == [False, False, False, True]
    document = await stored(db)
    assert (document["status"], document["reason"]) == ("failed", "node 'n0' failed: x")
    assert {node["skip_reason"] for node in document["graph"]["nodes"]} == {"upstream_failed"}


async def test_interrupted_close_continues_where_it_stopped(db: Any) -> None:
    recording = RecordingDatabase(db)
    tasks = await large(recording)
    recording.before["tasks"] += [others, others, stop]
    with pytest.raises(ConnectionError):
        await tasks.close_task(close(*many(NodeStatus.SKIPPED), status=TaskStatus.FAILED))
    assert (await stored_statuses(db)).count("skipped") == 200
    recording.updates.clear()
    assert await tasks.close_task(close(*many(NodeStatus.SKIPPED), status=TaskStatus.FAILED))
    assert len(recording.updates) == 2, "150 nodes are left"
    assert set(await stored_statuses(db)) == {"skipped"}


async def test_close_sets_only_statuses_that_differ_from_nodes_written_before(db: Any) -> None:
    tasks = await large(db)
    written = many(NodeStatus.CANCELLED, last_error="stopped")
    await tasks.record(record(*written[:-2]))
    unfinished = {NodeStatus.CANCELLED: list(range(MANY - 1))}
    assert await tasks.close_task(close(status=TaskStatus.CANCELLED, unfinished=unfinished))
    nodes = (await stored(db))["graph"]["nodes"]
    assert [node["status"] for node in nodes] == ["cancelled"] * (MANY - 1) + ["finished"]
    assert [node.get("last_error") for node in nodes] == ["stopped"] * (MANY - 2) + [None] * 2


async def others() -> None:
    """Do nothing before an update."""


async def stop() -> None:
    """Stop the engine before an update."""
    raise ConnectionError("killed")


async def test_close_in_several_updates_does_not_change_a_newer_run(db: Any) -> None:
    tasks = await large(db)
    await opened(tasks, run="run-2")
    before = await stored(db)
    assert await tasks.close_task(close(*many(NodeStatus.SKIPPED), status=TaskStatus.FAILED, run_seq=1))
    assert await stored(db) == before


HISTORY = [StatusChange(from_="running", to="deferred", at=AT + n) for n in range(2_000)]


@pytest.mark.parametrize(
    ("room", "errors", "changes"),
    [(1_000_000, 500, 2_002), (300_000, 80, 2_002), (130_000, 0, 2)],
    ids=["all fits", "short errors", "no errors and a short history"],
)
async def test_errors_are_truncated_before_the_history(db: Any, room: int, errors: int, changes: int) -> None:
    tasks = await large(db)
    await tasks.record(record(*many(NodeStatus.DEFERRED, epoch=1, last_error=ERROR)))
    limited = SizeLimitedDatabase(db, bytes_at_most=room)
    ended = close(
        *many(NodeStatus.FAILED, epoch=1, last_error=ERROR), status=TaskStatus.FAILED, reason="x" * 2_000
    )
    ended.status_history[:] = [CHANGES[0], *HISTORY, CHANGES[1]]
    assert await TaskStore(limited).close_task(ended)
    ended.status_history[:] = CHANGES
    document = await stored(db)
    assert document["status"] == "failed"
    assert set(await stored_statuses(db)) == {"failed"}
    assert {len(node["last_error"] or "") for node in document["graph"]["nodes"]} == {errors}
    assert len(document["status_history"]) == changes
    assert document.get("status_history_omitted", 0) == 2_002 - changes
    assert document["coordinator"].get("truncated", False) is (room < 1_000_000)
    assert document["finished_at"] is not None


async def test_stats_are_omitted_from_the_result_so_that_the_task_can_close(db: Any) -> None:
    tasks = await large(db)
    stats = {f"graph.nodes.{i}.stats": {"text": "s" * 300} for i in range(MANY)}
    await db.tasks.update_one({"id": TASK}, {"$set": stats})
    assert await TaskStore(SizeLimitedDatabase(db, bytes_at_most=240_000)).close_task(close())
    result = (await stored(db))["result"]
    assert result["nodes"][0] == {"node_id": "n0", "stats": {}}
    assert (await stored(db))["coordinator"]["truncated"] is True
    assert await tasks.close_task(close())


async def test_close_gives_up_only_if_other_data_fills_the_document(db: Any) -> None:
    tasks = await large(db)
    limited = SizeLimitedDatabase(db, bytes_at_most=1_000)
    with pytest.raises(StoreTooLarge, match="remove other data from it"):
        await TaskStore(limited).close_task(close(status=TaskStatus.FAILED))
    assert limited.refused == 5
    assert (await stored(db))["run_id"] == RUN
    assert await tasks.close_task(close(status=TaskStatus.FAILED))


async def test_document_of_16_mb_is_closed(server_db: Any) -> None:
    tasks = await large(server_db)
    [document] = await documents_of(server_db.tasks)
    await server_db.tasks.update_one({"id": TASK}, {"$set": {"filler": "x" * (16 * 2**20 - 300_000)}})
    assert document["status"] == "running"
    ended = close(*many(NodeStatus.FAILED, epoch=1, last_error="e" * 1_900), status=TaskStatus.FAILED)
    assert await tasks.close_task(ended)
    assert (await server_db.tasks.find_one({"id": TASK}, {"status": 1}))["status"] == "failed"
