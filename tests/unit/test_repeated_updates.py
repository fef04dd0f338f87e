"""The update of an action that Temporal does not answer is sent again with the same id."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.common import TypedSearchAttributes
from temporalio.service import RPCError, RPCStatusCode

from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskClient, steering
from flowkit.errors import ActionRejected, ActionUnanswered
from flowkit.models import temporal_names
from flowkit.testing import memory_database


class Temporal:
    """A client of one open task, whose updates fail with the given errors first."""

    def __init__(self, *errors: BaseException) -> None:
        self._errors = [*errors]
        self.ids: list[str] = []

    def get_workflow_handle(self, *_: object, **__: object) -> Temporal:
        """Return the handle of the workflow."""
        return self

    get_workflow_handle_for = get_workflow_handle

    async def describe(self) -> Any:
        """Return an open task."""
        return SimpleNamespace(
            workflow_type=temporal_names.TASK,
            status=WorkflowExecutionStatus.RUNNING,
            memo_value=no_marker,
            task_queue="q",
            typed_search_attributes=TypedSearchAttributes.empty,
        )

    async def execute_update(self, *_: object, id: str, result_type: type) -> dict[str, Any]:
        """Return a result, or raise the next error."""
        self.ids.append(id)
        if self._errors:
            raise self._errors.pop(0)
        return {"revision": 1}


async def no_marker(*_: object) -> None:
    """Return the marker of a task that a Temporal client has started."""


def unanswered(status: RPCStatusCode) -> RPCError:
    """Return an error of gRPC."""
    return RPCError("unexpected workflow task failure", status, b"")


def timed_out(cause: BaseException) -> WorkflowUpdateRPCTimeoutOrCancelledError:
    """Return the error of Temporal's SDK with its cause."""
    error = WorkflowUpdateRPCTimeoutOrCancelledError()
    error.__cause__ = cause
    return error


class Silent(Temporal):
    """A client of one open task whose engine is stopped.

    As Temporal's SDK does, it has an error of its own for a cancel.
    """

    async def execute_update(self, *_: object, id: str, result_type: type) -> dict[str, Any]:
        """Wait for ever."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise WorkflowUpdateRPCTimeoutOrCancelledError from error
        return {}


async def act(temporal: Any, update_id: str | None = None, wait_sec: float | None = None) -> dict[str, Any]:
    """Pause the task."""
    tasks = TaskClient(temporal, TaskStore(memory_database()), queue="q")
    return await tasks.steering.act("t", "pause", {}, update_id, wait_sec=wait_sec)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steering, "_UPDATE_PAUSES_SEC", (0.0, 0.0, 0.0))


@pytest.mark.parametrize("update_id", [None, "mine"])
async def test_an_update_without_an_answer_is_sent_again_with_its_id(update_id: str | None) -> None:
    temporal = Temporal(
        unanswered(RPCStatusCode.FAILED_PRECONDITION),
        unanswered(RPCStatusCode.UNAVAILABLE),
        timed_out(unanswered(RPCStatusCode.DEADLINE_EXCEEDED)),
    )
    assert await act(temporal, update_id) == {"revision": 1}
    assert len(temporal.ids) == 4
    assert len({*temporal.ids}) == 1
    assert update_id in (None, temporal.ids[0])


async def test_an_update_is_not_sent_for_ever() -> None:
    temporal = Temporal(*(unanswered(RPCStatusCode.UNAVAILABLE) for _ in range(9)))
    with pytest.raises(RPCError) as caught:
        await act(temporal)
    assert caught.value.status is RPCStatusCode.UNAVAILABLE
    assert len(temporal.ids) == 4


async def test_an_update_is_not_sent_again_after_an_answer() -> None:
    denied = Temporal(unanswered(RPCStatusCode.PERMISSION_DENIED))
    with pytest.raises(RPCError):
        await act(denied)
    ended = Temporal(unanswered(RPCStatusCode.NOT_FOUND))
    with pytest.raises(ActionRejected, match="has ended"):
        await act(ended)
    assert (len(denied.ids), len(ended.ids)) == (1, 1)


async def test_the_cancellation_of_a_caller_is_no_lost_answer() -> None:
    temporal = Temporal(timed_out(asyncio.CancelledError()))
    with pytest.raises(asyncio.CancelledError):
        await act(temporal)
    assert len(temporal.ids) == 1


async def test_an_action_that_no_engine_applies_in_time_says_that_it_may_be_applied_later() -> None:
    with pytest.raises(
        ActionUnanswered, match="no engine has applied pause to task 't' within 0.05 s.*later"
    ):
        await asyncio.wait_for(act(Silent(), wait_sec=0.05), 30)
