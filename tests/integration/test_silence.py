"""The heartbeat rules on real servers: a worker process is suspended while its lease is still valid."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowFailureError, WorkflowUpdateFailedError

from flowkit.models import SilenceReport, SilentAttempt, TaskStatus
from flowkit.models.temporal_names import REPORT_SILENCE
from tests.integration.handlers import Quick
from tests.integration.harness import Harness, eventually, node
from tests.integration.test_continue_as_new import histories, replay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fork_server import ForkedProcess

pytestmark = pytest.mark.server

LOST = "heartbeat_timeout: the attempt sent no heartbeat for 8 s (heartbeat_hard_sec)"


@pytest.fixture
def watched(harness: Harness) -> Harness:
    """A harness whose engine checks heartbeats, with a lease that is much longer than the soft limit."""
    harness.settings |= {"lease_ttl_sec": 20, "heartbeat_soft_sec": 5, "heartbeat_hard_sec": 0}
    return harness


@contextmanager
def suspended(process: ForkedProcess) -> Iterator[None]:
    """Suspend a process within the block."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


async def until_liveness(harness: Harness, task_id: str, value: str | None) -> dict[str, Any]:
    """Wait until the document shows this liveness, and return the document."""

    async def look() -> dict[str, Any] | None:
        found = await harness.document(task_id)
        return found if found.get("liveness") == value else None

    return await eventually(look)


@pytest.mark.slow(25)
async def test_silent_attempt_defers_the_task_until_its_heartbeats_return(watched: Harness) -> None:
    await watched.engine()
    process = watched.worker_process("Paced")
    task_id = await watched.create(node("a", "paced", inline={"pause": 25}), node("b", "paced", "a"))
    await watched.until_node(task_id, "a", "running")
    with suspended(process):
        document = await until_liveness(watched, task_id, "silent")
        assert (document["status"], document["coordinator"]["liveness"]["state"]) == ("deferred", "suspected")
        queried = await (await watched.handle(task_id)).query("status")
        assert (queried["status"], queried["silent_nodes"]) == ("deferred", ["a"])
        details = await (await watched.handle(task_id)).query("__temporal_workflow_metadata")
        assert "| sends no heartbeats |" in str(details)
        shown = await watched.node(task_id, "a")
        assert (shown["liveness"], shown["status"], shown["attempt_epoch"]) == ("silent", "running", 1)
    document = await until_liveness(watched, task_id, None)
    assert document["coordinator"]["liveness"] == {"state": "ok"}
    assert "liveness" not in await watched.node(task_id, "a")
    assert document["status"] == "running"
    assert (await watched.result(task_id)).status is TaskStatus.FINISHED
    document = await watched.document(task_id)
    changes = [entry["to"] for entry in document["status_history"]]
    assert changes == ["queued", "running", "deferred", "running", "finished"]
    assert (await watched.node(task_id, "a"))["attempt_epoch"] == 1
    await replay(await histories(watched, task_id))


@pytest.mark.slow(25)
async def test_attempt_that_stays_silent_fails_its_node_and_the_task(watched: Harness) -> None:
    watched.settings["heartbeat_hard_sec"] = 8
    await watched.engine()
    process = watched.worker_process("Paced")
    task_id = await watched.create(node("a", "paced", inline={"pause": 60}), node("b", "paced", "a"))
    await watched.until_node(task_id, "a", "running")
    with suspended(process):
        with pytest.raises(WorkflowFailureError):
            await watched.result(task_id)
        document = await watched.document(task_id)
    assert document["reason"] == f"node 'a' failed: {LOST}"
    assert await watched.statuses(task_id) == {"a": "failed", "b": "skipped"}
    assert (await watched.node(task_id, "a"))["last_error"] == LOST
    assert document["coordinator"]["liveness"] == {"state": "dead"}
    assert "liveness" not in document
    await replay(await histories(watched, task_id))


async def test_waiting_attempts_and_healthy_ones_are_not_silent(watched: Harness) -> None:
    watched.settings |= {"heartbeat_soft_sec": 8, "heartbeat_hard_sec": 9}
    await watched.engine()
    await watched.worker()
    task_id = await watched.create(
        node("healthy", "paced", inline={"pause": 12}), node("unserved", "nobody", allow_failure=True)
    )
    await watched.until_node(task_id, "healthy", "finished")
    await watched.worker({"nobody": Quick()})
    assert (await watched.result(task_id)).status is TaskStatus.FINISHED
    changes = [entry["to"] for entry in (await watched.document(task_id))["status_history"]]
    assert changes == ["queued", "running", "finished"]


async def test_outdated_report_is_rejected_without_a_trace(watched: Harness) -> None:
    await watched.engine()
    await watched.worker()
    task_id = await watched.create(node("a", "paced", inline={"pause": 3}))
    await watched.until_node(task_id, "a", "running")
    handle = await watched.handle(task_id)
    run_id = (await handle.describe()).run_id
    assert run_id is not None
    silent = [SilentAttempt(node_id="a", epoch=1)]
    reports = {
        "the report is about run": SilenceReport(run_id="other", silent=silent),
        "attempt 2 of node 'a'": SilenceReport(run_id=run_id, silent=[SilentAttempt(node_id="a", epoch=2)]),
        "attempt 1 of node 'x'": SilenceReport(run_id=run_id, silent=[SilentAttempt(node_id="x", epoch=1)]),
        "the report changes nothing": SilenceReport(run_id=run_id),
    }
    for text, report in reports.items():
        with pytest.raises(WorkflowUpdateFailedError) as caught:
            await handle.execute_update(REPORT_SILENCE, report)
        assert text in str(caught.value.cause)
    await watched.result(task_id)
    (found,) = await histories(watched, task_id)
    assert not [event for event in found.events if "update" in event.event_type.__str__().lower()]
