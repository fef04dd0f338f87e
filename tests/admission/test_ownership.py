"""A dispatcher ends, adopts and cancels only with the workflow that carries the marker of its request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from flowkit.admission import dispatcher as dispatching
from flowkit.admission.dispatcher import Dispatcher
from flowkit.admission.models import Door, Kind, Request, State
from flowkit.admission.queue import AdmissionQueue
from flowkit.attempt.workflows import ABSENT, FoundWorkflow, WorkflowState
from flowkit.errors import TaskIdTaken
from flowkit.models.ownership import Owner, OwnerKind
from tests.admission.memory import MemoryStore, Shared
from tests.unit.test_ownership import missing_namespace

if TYPE_CHECKING:
    from collections.abc import Sequence

BODY: dict[str, Any] = {"graph": {}, "params": {}}
CLOSED = FoundWorkflow(
    state=WorkflowState.CLOSED,
    description=SimpleNamespace(status=WorkflowExecutionStatus.COMPLETED),  # type: ignore[arg-type]
)


class Tasks:
    """The client of tasks, with what each look finds."""

    def __init__(
        self, looks: Sequence[FoundWorkflow | RPCError] = (), error: Exception | None = None
    ) -> None:
        self._looks = [*looks]
        self._error = error
        self.owners: list[Owner] = []

    async def deployment(self) -> str:
        """Return the id of the database."""
        return "d"

    async def start_task(self, *_: object, owner: Owner, **__: object) -> bool:
        """Note the owner. Raise the error, if there is one."""
        self.owners.append(owner)
        if self._error is not None:
            raise self._error
        return True

    async def look_up(self, _: str, owner: Owner) -> FoundWorkflow:
        """Note the owner, and return what the next look finds."""
        self.owners.append(owner)
        found = self._looks.pop(0)
        if isinstance(found, RPCError):
            raise found
        return found


async def admitted(tasks: Any) -> tuple[Dispatcher, Shared]:
    """Return a dispatcher that has started a task, or has tried to."""
    shared = Shared()
    store: Any = MemoryStore(shared)
    queue = AdmissionQueue(store, clock=lambda: 0.0)
    await queue.submit(Request(execution_id="t", user_id="dora", door=Door.PYTHON, kind=Kind.TASK, body=BODY))
    [item] = await queue.dispatch()
    made = Dispatcher(queue, tasks)
    await made._start(item)
    return made, shared


@pytest.mark.parametrize("error", [missing_namespace(), RPCError("away", RPCStatusCode.UNAVAILABLE, b"")])
async def test_a_request_does_not_end_when_temporal_does_not_know_its_workflow(
    error: RPCError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatching, "MISSING_SEC", 0.0)
    dispatcher, shared = await admitted(Tasks([error, error]))
    for _ in range(2):
        await dispatcher._reconcile()
    assert shared.items["t"]["state"] == State.ACTIVE


async def test_a_request_is_lost_when_its_workflow_is_not_found_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(dispatching, "time", SimpleNamespace(monotonic=lambda: now[0]))
    running = FoundWorkflow(state=WorkflowState.OPEN, description=SimpleNamespace(status=None))  # type: ignore[arg-type]
    dispatcher, shared = await admitted(Tasks([ABSENT, running, ABSENT, ABSENT, ABSENT]))
    for seconds in (0.0, 60.0, 0.0, 1.0):
        now[0] += seconds
        await dispatcher._reconcile()
        assert shared.items["t"]["state"] == State.ACTIVE
    now[0] += dispatching.MISSING_SEC
    await dispatcher._reconcile()
    assert (shared.items["t"]["state"], shared.items["t"]["reason"]) == (State.FAILED, "lost")


async def test_the_marker_names_the_try_of_the_request() -> None:
    tasks = Tasks([CLOSED])
    dispatcher, shared = await admitted(tasks)
    await dispatcher._reconcile()
    own = Owner(kind=OwnerKind.ADMISSION, deployment="d", id=shared.items["t"]["place"])
    assert tasks.owners == [own, own]
    assert shared.items["t"]["state"] == State.COMPLETED


async def test_a_request_whose_id_is_taken_fails_with_this_reason() -> None:
    _, shared = await admitted(Tasks(error=TaskIdTaken("task id 't' belongs to a workflow")))
    assert (shared.items["t"]["state"], shared.items["t"]["reason"]) == (State.FAILED, "task_id_taken")
