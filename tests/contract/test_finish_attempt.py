"""The last write of an attempt finishes its own node only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import (
    AT,
    RUN,
    attempt,
    begun,
    close,
    opened,
    record,
    seconds,
    shown,
    stored_node,
)

from flowkit.errors import Fenced
from flowkit.models import NodeStatus, TaskStatus

if TYPE_CHECKING:
    from flowkit.adapters.tasks.store import TaskStore


@pytest.fixture(autouse=True)
async def _open(tasks: TaskStore) -> None:
    await opened(tasks, "a", "b")
    await begun(tasks, attempt(epoch=2))


async def test_last_write_records_the_finished_node(db: Any, tasks: TaskStore) -> None:
    await tasks.attempts.finish(attempt(epoch=2), RUN, AT + 9)
    node = await stored_node(db)
    assert (node["status"], node["last_error"]) == ("finished", None)
    assert (seconds(node["finished_at"]), node["last_event_recv_ms"]) == (AT + 9, int((AT + 9) * 1000))


async def test_last_write_can_be_repeated(db: Any, tasks: TaskStore) -> None:
    await tasks.attempts.finish(attempt(epoch=2), RUN, AT)
    await tasks.attempts.finish(attempt(epoch=2), RUN, AT + 5)
    assert seconds((await stored_node(db))["finished_at"]) == AT


@pytest.mark.parametrize(("epoch", "run"), [(1, RUN), (3, RUN), (2, "other-run")])
async def test_attempt_that_does_not_hold_the_node_is_fenced(
    db: Any, tasks: TaskStore, epoch: int, run: str
) -> None:
    with pytest.raises(Fenced):
        await tasks.attempts.finish(attempt(epoch=epoch), run, AT)
    with pytest.raises(Fenced):
        await tasks.attempts.check_fence(attempt(epoch=epoch), run)
    assert (await stored_node(db))["status"] == "running"


async def test_attempt_without_a_document_is_fenced(db: Any, tasks: TaskStore) -> None:
    await db.tasks.delete_many({})
    with pytest.raises(Fenced):
        await tasks.attempts.finish(attempt(epoch=2), RUN, AT)


async def test_last_write_does_not_change_a_node_that_is_being_cancelled(db: Any, tasks: TaskStore) -> None:
    await tasks.record(record(shown("a", NodeStatus.CANCELLING, epoch=2), cancel="stop"))
    await tasks.attempts.finish(attempt(epoch=2), RUN, AT)
    assert (await stored_node(db))["status"] == "cancelling"


async def test_node_that_finishes_although_its_task_stops_shows_how_it_finished(
    db: Any, tasks: TaskStore
) -> None:
    await tasks.record(record(shown("a", NodeStatus.CANCELLING, epoch=2, last_error="boom"), cancel="stop"))
    await tasks.attempts.show_failed_batches(attempt(epoch=2), RUN, 2)
    await tasks.attempts.finish(attempt(epoch=2), RUN, AT)
    others = [shown("b", NodeStatus.SKIPPED, index=1)]
    await tasks.close_task(close(*others, status=TaskStatus.CANCELLED))
    node = await stored_node(db)
    assert (node["status"], node["failed_batches"], node["last_error"]) == ("finished", 2, None)


@pytest.mark.parametrize("status", [NodeStatus.FAILED, NodeStatus.CANCELLED])
async def test_last_writes_do_not_change_a_closed_node(db: Any, tasks: TaskStore, status: NodeStatus) -> None:
    await tasks.record(record(shown("a", status, epoch=2)))
    before = await stored_node(db)
    await tasks.attempts.show_failed_batches(attempt(epoch=2), RUN, 2)
    await tasks.attempts.finish(attempt(epoch=2), RUN, AT)
    assert await stored_node(db) == before


async def test_running_finishing_or_cancelled_attempt_holds_its_node(tasks: TaskStore) -> None:
    await tasks.attempts.check_fence(attempt(epoch=2), RUN)
    await tasks.record(record(shown("a", NodeStatus.CANCELLING, epoch=2)))
    await tasks.attempts.check_fence(attempt(epoch=2), RUN)
