"""A cancel flag that is unset again after the bridge has stopped the worker because of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from temporalio.service import RPCError, RPCStatusCode
from tests.contract.bridges import context_of
from tests.contract.builders import AT, opened
from tests.contract.test_dispatch_renewals import accepted
from tests.integration.harness import EVENT_TIMEOUT_SEC

from flowkit.adapters.dispatches import Outcome, OutcomeKind
from flowkit.bridge.delivery import Delivery

if TYPE_CHECKING:
    from flowkit.adapters.tasks.store import TaskStore


class Temporal:
    """Has no cancel request for an activity, and records how it fails."""

    def __init__(self) -> None:
        self.failures: list[Any] = []

    def get_async_activity_handle(self, **_: Any) -> Temporal:
        """Return the handle of the activity."""
        return self

    async def report_cancellation(self, **_: Any) -> None:
        """Reject the report."""
        raise RPCError("not requested", RPCStatusCode.INVALID_ARGUMENT, b"")

    async def fail(self, error: Any, **_: Any) -> None:
        """Record the failure."""
        self.failures.append(error)


async def test_run_that_stopped_for_a_withdrawn_flag_yields(db: Any, tasks: TaskStore) -> None:
    await opened(tasks, "a")
    temporal = Temporal()
    context = context_of(db, temporal, AT)
    store = context.stores.dispatches
    record = await accepted(store, "a")
    await store.request_cancel(record.key, "cancelled", AT)
    ended = await store.end(record.key, Outcome(kind=OutcomeKind.CANCELLED, at=AT, worker_id="w-1"))
    assert ended is not None
    async with asyncio.timeout(EVENT_TIMEOUT_SEC):
        await Delivery(context).deliver(ended)
    (failure,) = temporal.failures
    assert failure.details[0]["kind"] == "yielded"
    assert failure.type == "cancel_pending"
    assert (await store.find_all([record.key]))[record.key].state == "reported"
