"""Records and documents for the contract tests, with the same default for every field that a test does not name."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flowkit.activities.tasks import TaskActivities
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks import fields
from flowkit.core.loop_portal import LoopPortal
from flowkit.models import (
    AttemptInput,
    CloseTask,
    NodeRecord,
    NodeStatus,
    OpenTask,
    RecordTask,
    Settings,
    StatusChange,
    TaskStatus,
)

if TYPE_CHECKING:
    from flowkit.adapters.tasks.store import TaskStore

TASK, FIRST_RUN, RUN, WORKER = "task-1", "first-run", "run-1", "w-1"

AT = float(int(time.time())) - 60.0
"""The time of all records: whole seconds, so that nothing is rounded, and recent, so that no TTL index removes it."""


def graph(*node_ids: str) -> dict[str, Any]:
    """Return a graph of crawlers without edges."""
    return {"nodes": [{"node_id": node_id, "type": "crawler"} for node_id in node_ids]}


def new_task(*node_ids: str, task_id: str = TASK, params: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a task document as a client writes it."""
    return fields.new_task(task_id, params or {}, graph(*node_ids), AT)


def opening(*node_ids: str, first_run: str = FIRST_RUN, run: str = RUN, task_id: str = TASK) -> OpenTask:
    """Return the record with which a run opens its task."""
    return OpenTask(
        task_id=task_id, first_run_id=first_run, run_id=run, at=AT, graph=graph(*node_ids), params={"n": 1}
    )


async def opened(tasks: TaskStore, *node_ids: str, run: str = RUN) -> int:
    """Open the task for `run` and return its `run_seq`."""
    run_seq, _ = await tasks.open_task(opening(*node_ids, run=run))
    return run_seq


def attempt(
    node_id: str = "a",
    *,
    epoch: int = 1,
    index: int = 0,
    sources: dict[str, int] | None = None,
) -> AttemptInput:
    """Return an attempt of a node."""
    return AttemptInput(
        task_id=TASK,
        node_id=node_id,
        index=index,
        role="crawler",
        epoch=epoch,
        sources=sources or {},
    )


async def begun(tasks: TaskStore, node: AttemptInput, *, run: str = RUN, deadline_ms: int = 1) -> None:
    """Make the first write of an attempt."""
    await tasks.attempts.begin(node, run, {"worker_id": WORKER, "deadline_ts_ms": deadline_ms}, AT)


def shown(node_id: str, status: NodeStatus, *, index: int = 0, epoch: int = 0, **more: Any) -> NodeRecord:
    """Return the state of a node as the workflow records it."""
    return NodeRecord(index=index, node_id=node_id, status=status, epoch=epoch, **more)


CHANGES = [
    StatusChange(from_=None, to="queued", at=AT),
    StatusChange(from_="queued", to="running", at=AT + 1),
]


def record(
    *nodes: NodeRecord, run_seq: int = 1, status: TaskStatus = TaskStatus.RUNNING, cancel: str | None = None
) -> RecordTask:
    """Return a record of transitions in a running task."""
    return RecordTask(
        task_id=TASK,
        run_id=RUN,
        run_seq=run_seq,
        at=AT,
        nodes=list(nodes),
        status=status,
        status_history=CHANGES,
        cancel_reason=cancel,
    )


def close(
    *unfinished: NodeRecord,
    status: TaskStatus = TaskStatus.FINISHED,
    run: str = RUN,
    run_seq: int = 1,
    **more: Any,
) -> CloseTask:
    """Return the record that closes a task."""
    return CloseTask(
        task_id=TASK,
        run_id=run,
        run_seq=run_seq,
        at=AT,
        status=status,
        status_history=CHANGES,
        nodes=list(unfinished),
        **more,
    )


async def stored(db: Any, task_id: str = TASK) -> dict[str, Any]:
    """Return the task document."""
    found: dict[str, Any] | None = await db.tasks.find_one({"id": task_id})
    assert found is not None
    return found


async def stored_node(db: Any, index: int = 0) -> dict[str, Any]:
    """Return one node of the task document."""
    node: dict[str, Any] = (await stored(db))["graph"]["nodes"][index]
    return node


async def stored_statuses(db: Any) -> list[str]:
    """Return the status of every node, in graph order."""
    return [node["status"] for node in (await stored(db))["graph"]["nodes"]]


async def documents_of(collection: Any) -> list[dict[str, Any]]:
    """Return all documents in a collection."""
    return [document async for document in collection.find({})]


async def batches(artifacts: ArtifactStore, node_id: str, *uids: str, epoch: int = 1) -> None:
    """Store batches of a node, each a second older than the next."""
    for age, uid in enumerate(uids):
        await artifacts.store_batch(attempt(node_id, epoch=epoch), uid, {"uid": uid}, WORKER, AT + age)


def seconds(date: datetime) -> float:
    """Return a date from a driver (UTC, with or without a time zone) in seconds since the epoch."""
    return date.replace(tzinfo=UTC).timestamp()


def engine_activities(tasks: TaskStore, **more: Any) -> TaskActivities:
    """Return the engine's activities over one database."""
    return TaskActivities(
        tasks=tasks,
        artifacts=ArtifactStore(tasks.database),
        portal=LoopPortal(),
        settings=Settings(),
        functions={},
        max_nodes=10,
        **more,
    )
