"""A bridge stops supervising an attempt whose activity Temporal does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode
from tests.contract.bridges import Parts, context_of
from tests.contract.test_dispatch_renewals import accepted
from tests.unit.event_loop import until

from flowkit.adapters.dispatches import DispatchStore
from flowkit.bridge.supervisor import AttemptSupervisor

if TYPE_CHECKING:
    from flowkit.adapters.dispatches import Dispatch

OVERDUE_SEC = 5.0
"""After this time, a bridge has sent its first heartbeat for an attempt."""


class Temporal:
    """Knows the workflow of an attempt, and not its activity."""

    def __init__(self, status: WorkflowExecutionStatus) -> None:
        self.status = status

    def get_async_activity_handle(self, **_: Any) -> Temporal:
        """Return the handle of an activity."""
        return self

    def get_workflow_handle(self, _: str, **__: Any) -> Temporal:
        """Return the handle of a workflow."""
        return self

    async def heartbeat(self, *_: Any, **__: Any) -> None:
        """Do not find the activity."""
        raise RPCError("not found", RPCStatusCode.NOT_FOUND, b"")

    async def describe(self, **_: Any) -> Temporal:
        """Return the description of the workflow."""
        return self


async def after_heartbeat(
    db: Any, status: WorkflowExecutionStatus, *, cancel: bool
) -> tuple[Dispatch, Parts]:
    """Let a bridge send a heartbeat. Return the stored record of the attempt, and what the bridge did."""
    store, parts = DispatchStore(db), Parts()
    any_part: Any = parts
    record = await accepted(store, "a")
    assert record.lease is not None
    context = context_of(db, Temporal(status), record.created_at)
    others = dict.fromkeys(("delivery", "signals", "inputs", "commands"), any_part)
    supervisor = AttemptSupervisor(context, **others)
    supervisor.watch(record)
    if cancel:
        asked = await store.request_cancel(record.key, "cancelled", record.created_at + OVERDUE_SEC)
        assert asked is not None
        supervisor.update_record(asked)
    context.at += OVERDUE_SEC - 1
    await supervisor.send_heartbeats()
    await until(lambda: not supervisor.sending)
    await supervisor.tick()
    assert not supervisor.attempts
    return (await store.find_all([record.key]))[record.key], parts


@pytest.mark.parametrize(
    ("status", "cancel"),
    [(WorkflowExecutionStatus.RUNNING, True), (WorkflowExecutionStatus.TERMINATED, False)],
    ids=["cancel requested", "workflow closed"],
)
async def test_attempt_that_is_not_run_again_ends(
    db: Any, status: WorkflowExecutionStatus, cancel: bool
) -> None:
    record, parts = await after_heartbeat(db, status, cancel=cancel)
    assert (record.active, record.outcome and record.outcome.kind) == (False, "cancelled")
    assert (parts.delivered, parts.stopped) == ([record.key], [record.key])


async def test_attempt_that_temporal_may_run_again_keeps_its_record_for_the_next_bridge(db: Any) -> None:
    record, parts = await after_heartbeat(db, WorkflowExecutionStatus.RUNNING, cancel=False)
    assert (record.active, record.owner, record.outcome) == (True, "", None)
    assert (parts.delivered, parts.stopped) == ([], [])
