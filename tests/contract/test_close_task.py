"""`close_task` closes a task document permanently; `close_orphan` closes one whose workflow no longer exists."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import (
    AT,
    RUN,
    TASK,
    attempt,
    begun,
    close,
    new_task,
    opened,
    opening,
    record,
    seconds,
    shown,
    stored,
    stored_node,
    stored_statuses,
)
from tests.contract.recording_database import RecordingDatabase

from flowkit.adapters.tasks.open_tasks import OpenTasks
from flowkit.adapters.tasks.store import TaskStore
from flowkit.models import NodeStatus, SkipReason, TaskStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@pytest.fixture
async def finish(tasks: TaskStore) -> Callable[..., Awaitable[None]]:
    """Return a function that runs one node to its end."""

    async def run(node_id: str, index: int = 0, epoch: int = 1) -> None:
        await begun(tasks, attempt(node_id, index=index, epoch=epoch))
        await tasks.attempts.finish(attempt(node_id, index=index, epoch=epoch), RUN, AT - 5)

    await opened(tasks, "b", "a")
    return run


async def test_result_of_a_finished_task_has_its_stats_in_graph_order(
    db: Any, tasks: TaskStore, finish: Callable[..., Awaitable[None]]
) -> None:
    await finish("a", 1)
    await finish("b", 0)
    await db.tasks.update_one({"id": TASK}, {"$set": {"graph.nodes.1.stats": {"n": 3}}})
    assert await tasks.close_task(close(reason="all done"))
    document = await stored(db)
    assert document["result"] == {
        "nodes": [{"node_id": "b", "stats": {}}, {"node_id": "a", "stats": {"n": 3}}]
    }
    assert (document["status"], document["reason"], document["closed_run_id"]) == (
        "finished",
        "all done",
        RUN,
    )
    assert seconds(document["finished_at"]) == AT
    assert [change["to"] for change in document["status_history"]] == ["queued", "running"]
    assert [seconds(node["finished_at"]) for node in document["graph"]["nodes"]] == [AT - 5, AT - 5]


async def test_result_lists_the_tolerated_failures(
    db: Any, tasks: TaskStore, finish: Callable[..., Awaitable[None]]
) -> None:
    await finish("b")
    failed = shown("a", NodeStatus.FAILED, index=1, epoch=1)
    await tasks.close_task(close(failed, handled_failures=["a"]))
    result = (await stored(db))["result"]
    assert result["handled_failures"] == ["a"]
    assert "handled_failures_omitted" not in result
    assert "truncated" not in (await stored(db))["coordinator"]


async def test_result_counts_the_omitted_handled_failures(db: Any, tasks: TaskStore) -> None:
    await opened(tasks, "a")
    await tasks.close_task(close(handled_failures=["a"], handled_failures_omitted=2))
    document = await stored(db)
    assert document["result"]["handled_failures_omitted"] == 2
    assert document["coordinator"]["truncated"] is True


@pytest.mark.parametrize("status", [TaskStatus.FAILED, TaskStatus.CANCELLED])
async def test_only_a_finished_task_has_a_result(
    db: Any, tasks: TaskStore, finish: Callable[..., Awaitable[None]], status: TaskStatus
) -> None:
    await finish("b")
    await tasks.close_task(close(shown("a", NodeStatus.SKIPPED, index=1), status=status))
    document = await stored(db)
    assert (document["status"], document["result"]) == (status.value, None)


async def test_close_writes_what_the_document_missed(db: Any, tasks: TaskStore) -> None:
    await opened(tasks, "a", "b", "c")
    await begun(tasks, attempt("a", epoch=1))
    failed = shown("b", NodeStatus.FAILED, index=1, epoch=3, last_error="boom")
    skipped = shown("c", NodeStatus.SKIPPED, index=2, skip_reason=SkipReason.UPSTREAM_FAILED)
    await tasks.close_task(close(failed, skipped, status=TaskStatus.FAILED))
    nodes = (await stored(db))["graph"]["nodes"]
    assert [node["status"] for node in nodes] == ["finished", "failed", "skipped"]
    assert (nodes[1]["attempt_epoch"], nodes[1]["last_error"]) == (3, "boom")
    assert nodes[2]["skip_reason"] == "upstream_failed"
    assert [seconds(node["finished_at"]) for node in nodes[1:]] == [AT, AT]


async def test_close_adds_a_missing_finish_time(db: Any, tasks: TaskStore) -> None:
    await opened(tasks, "a")
    await begun(tasks, attempt("a", epoch=1))
    await tasks.close_task(close())
    assert (await stored_node(db)).get("finished_at") is not None


async def test_close_does_not_repeat_what_the_document_contains(
    db: Any, tasks: TaskStore, finish: Callable[..., Awaitable[None]]
) -> None:
    await finish("b")
    await tasks.record(record(shown("a", NodeStatus.FAILED, index=1, epoch=1)))
    recording = RecordingDatabase(db)
    await TaskStore(recording).close_task(
        close(shown("a", NodeStatus.FAILED, index=1, epoch=1), status=TaskStatus.FAILED)
    )
    [update] = recording.updates
    assert not [path for path in update["$set"] if path.startswith("graph.")]


async def test_close_does_not_change_a_document_opened_by_a_newer_run(db: Any, tasks: TaskStore) -> None:
    old = await opened(tasks, "a")
    new = await opened(tasks, "a", run="run-2")
    before = await stored(db)
    assert await tasks.close_task(close(run_seq=old))
    assert await stored(db) == before
    assert await tasks.close_task(close(run="run-2", run_seq=new))
    assert (await stored(db))["status"] == "finished"


async def test_close_can_be_repeated(db: Any, tasks: TaskStore) -> None:
    await opened(tasks, "a")
    for _ in range(2):
        assert await tasks.close_task(close(shown("a", NodeStatus.SKIPPED), status=TaskStatus.FAILED))
    assert await stored_statuses(db) == ["skipped"]


async def test_close_keeps_the_epoch_of_an_attempt_that_the_workflow_does_not_know(
    db: Any, tasks: TaskStore
) -> None:
    """The engine was killed in the workflow task in which it ran the attempt inline, and the task was cancelled."""
    await opened(tasks, "a")
    await begun(tasks, attempt("a", epoch=3))
    await tasks.close_task(close(shown("a", NodeStatus.CANCELLED, epoch=2), status=TaskStatus.CANCELLED))
    node = await stored_node(db)
    assert (node["status"], node["attempt_epoch"]) == ("cancelled", 3)


async def test_close_without_a_document_returns_false(db: Any, tasks: TaskStore) -> None:
    assert await tasks.close_task(close()) is False
    assert await db.tasks.find_one({}) is None


async def test_cancelled_task_keeps_its_flags_and_reason(db: Any, tasks: TaskStore) -> None:
    await opened(tasks, "a")
    cancelled = shown("a", NodeStatus.CANCELLED, epoch=1)
    await tasks.close_task(close(cancelled, status=TaskStatus.CANCELLED, reason="enough"))
    document = await stored(db)
    assert (document["status"], document["reason"]) == ("cancelled", "enough")
    flags = document["coordinator"]
    assert (flags["cancelled"], flags["cancel_reason"], seconds(flags["cancelled_at"])) == (
        True,
        "enough",
        AT,
    )


# --- the sweep --------------------------------------------------------------------------------------------------


async def test_orphan_is_closed_as_failed_with_flags_and_its_open_nodes_are_ended(
    db: Any, tasks: TaskStore
) -> None:
    await opened(tasks, "a", "b", "c")
    await begun(tasks, attempt("a", epoch=1))
    await begun(tasks, attempt("b", index=1, epoch=1))
    await tasks.attempts.finish(attempt("b", index=1, epoch=1), RUN, AT)
    assert await OpenTasks(tasks.database).close_orphan(TASK, RUN, "terminated", AT)
    document = await stored(db)
    assert (document["status"], document["reason"]) == ("failed", "terminated")
    assert seconds(document["finished_at"]) == AT
    assert (document["coordinator"]["cancelled"], document["coordinator"]["cancel_reason"]) == (
        True,
        "terminated",
    )
    assert await stored_statuses(db) == ["cancelled", "finished", "skipped"]
    assert document["graph"]["nodes"][2]["skip_reason"] == "task_failed"
    assert document["status_history"][-1]["from"] == "running"
    assert document["status_history"][-1]["to"] == "failed"
    assert document["status_history"][-1]["at"].endswith("+00:00")


async def test_orphan_that_another_run_opens_meanwhile_is_not_closed(db: Any, tasks: TaskStore) -> None:
    await opened(tasks, "a")
    await opened(tasks, "a", run="run-2")
    before = await stored(db)
    assert await OpenTasks(tasks.database).close_orphan(TASK, RUN, "lost", AT) is False
    assert await stored(db) == before


async def test_orphan_that_ends_meanwhile_is_not_closed(db: Any, tasks: TaskStore) -> None:
    await opened(tasks, "a")
    await tasks.close_task(close())
    assert await OpenTasks(tasks.database).close_orphan(TASK, RUN, "lost", AT) is False
    assert (await stored(db))["status"] == "finished"


async def test_never_opened_orphan_can_be_closed_only_until_a_run_opens_it(
    tasks: TaskStore,
) -> None:
    await tasks.insert_task(new_task("a"))
    await opened(tasks, "a")
    assert await OpenTasks(tasks.database).close_orphan(TASK, None, "lost", AT) is False
    await tasks.insert_task(new_task("a", task_id="other"))
    assert await OpenTasks(tasks.database).close_orphan("other", None, "lost", AT) is True


async def test_orphan_without_a_document_is_not_closed(tasks: TaskStore) -> None:
    assert await OpenTasks(tasks.database).close_orphan(TASK, None, "lost", AT) is False


async def test_orphan_that_changes_while_it_is_closed_is_left_alone(db: Any, tasks: TaskStore) -> None:
    await opened(tasks, "a")
    recording = RecordingDatabase(db)

    async def open_again() -> None:
        await tasks.open_task(opening("a", run="run-2"))

    recording.before["tasks"].append(open_again)
    assert await OpenTasks(recording).close_orphan(TASK, RUN, "lost", AT) is False
    assert (await stored(db))["status"] == "running"


async def test_node_that_finishes_while_its_orphan_is_closed_remains_finished(
    db: Any, tasks: TaskStore
) -> None:
    await opened(tasks, "a")
    await begun(tasks, attempt())
    recording = RecordingDatabase(db)
    recording.before["tasks"].append(partial(tasks.attempts.finish, attempt(), RUN, AT))
    await OpenTasks(recording).close_orphan(TASK, RUN, "lost", AT)
    assert await stored_statuses(db) == ["finished"]
