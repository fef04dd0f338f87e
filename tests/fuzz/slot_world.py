"""What surrounds the slots of the concurrency limits in the fuzz: Temporal, the workers, the clock and the engines."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from temporalio.api.common.v1 import ActivityType
from temporalio.api.workflow.v1 import PendingActivityInfo, PendingWorkflowTaskInfo
from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionResponse
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from flowkit.core.time import LeaseObserver
from flowkit.engine import slot_grants, slot_leaks
from flowkit.models import SlotReply, SlotRequest, slot_wait_id, temporal_names
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from tests.fuzz.slot_model import Attempt

    from flowkit import CoordinatorConfig

STARTED_AT = 1_763_788_800.0


@dataclass
class Task:
    """What Temporal and the workflow know of one task."""

    name: str
    priority: int
    run: int = 1
    closed: bool = False
    asking: set[Attempt] = field(default_factory=set)
    """Attempts that were refused a slot and do not wait yet."""
    waiting: dict[str, Attempt] = field(default_factory=dict)
    """The attempt of each role for whose slot the workflow waits."""
    in_flight: set[Attempt] = field(default_factory=set)
    open_waits: set[Attempt] = field(default_factory=set)
    """Attempts whose activity `await_slot` Temporal lists as open. The workflow may have cancelled its wait."""
    calls: dict[str, str] = field(default_factory=dict)
    """Ids and names of other activities that are open."""
    unread: set[str] = field(default_factory=set)
    """Ids of activities whose results the workflow has not read, so that a workflow task is pending."""
    releases: list[tuple[Attempt, bool]] = field(default_factory=list)
    """Attempts whose slots the workflow has freed, but no engine yet. The flag says whether they may still wait."""

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return f"{self.name}#{self.run}"

    @property
    def is_busy(self) -> bool:
        """Whether attempts run, wait or ask."""
        return bool(self.in_flight or self.waiting or self.asking)

    def request(self, attempt: Attempt) -> SlotRequest:
        """Return the request of an attempt that waits."""
        return SlotRequest(
            task_id=self.name,
            run_id=self.run_id,
            priority=self.priority,
            node_id=attempt.node,
            epoch=attempt.epoch,
            role=attempt.role,
        )

    def uses(self, attempt: Attempt) -> bool:
        """Return whether the slot of an attempt is in use, or the workflow is about to use or free it."""
        return not self.closed and (
            attempt in self.in_flight or attempt in self.open_waits or bool(self.releases)
        )

    def described(self) -> Any:
        """Return what Temporal's description of the workflow contains."""
        pending = [_pending(f"{each.node}.{each.epoch}", each.role) for each in self.in_flight]
        pending += [
            _pending(slot_wait_id(each.node, each.epoch), temporal_names.AWAIT_SLOT)
            for each in self.open_waits
        ]
        pending += [_pending(activity_id, name) for activity_id, name in self.calls.items()]
        pending += [_pending("release", temporal_names.RELEASE_SLOTS)] if self.releases else []
        open_status, closed_status = WorkflowExecutionStatus.RUNNING, WorkflowExecutionStatus.TERMINATED
        return SimpleNamespace(
            status=closed_status if self.closed else open_status,
            run_id=self.run_id,
            raw_description=DescribeWorkflowExecutionResponse(
                pending_activities=[] if self.closed else pending,
                pending_workflow_task=PendingWorkflowTaskInfo() if self.unread else None,
            ),
        )


def _pending(activity_id: str, name: str) -> PendingActivityInfo:
    return PendingActivityInfo(activity_id=activity_id, activity_type=ActivityType(name=name))


class Engine(NamedTuple):
    """One engine."""

    grants: slot_grants.SlotGrants
    loop: slot_leaks.SlotLoop


class World:
    """Temporal's client, the workers and the clock."""

    def __init__(self, tasks: list[Task], served: set[str]) -> None:
        self.tasks = {task.name: task for task in tasks}
        self.served = served
        self._db = memory_database()
        self.lag: Callable[[], int] = int
        """How many steps of other coroutines a description is old when it arrives."""
        self.now = 0.0
        """Seconds since the start."""
        self.replies: dict[tuple[str, Attempt], Callable[[SlotReply], None]] = {}
        """What to call with the results of activities `await_slot` that workflows wait for, by run."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the engines use this clock and these workers."""
        clock = SimpleNamespace(time=lambda: STARTED_AT + self.now, monotonic=lambda: self.now)
        with (
            patch.multiple(slot_grants, time=clock, ServedRoles=lambda *_: self),
            patch.multiple(slot_leaks, time=clock),
            patch.object(LeaseObserver, "now", lambda _: self.now),
        ):
            yield

    async def has_workers(self, role: str) -> bool:
        """Return whether the role has a worker."""
        return role in self.served

    def get_workflow_handle(self, task_id: str, *, run_id: str | None = None) -> Any:
        """Return a handle whose `describe` returns the description of the workflow."""

        async def describe() -> Any:
            described = self.tasks[task_id].described()
            await pause(self.lag())
            return described

        return SimpleNamespace(describe=describe)

    def get_async_activity_handle(self, *, workflow_id: str, run_id: str, activity_id: str) -> Any:
        """Return a handle whose `complete` gives a waiting attempt its slot."""
        task = self.tasks[workflow_id]

        async def complete(reply: SlotReply) -> None:
            found = [each for each in task.open_waits if slot_wait_id(each.node, each.epoch) == activity_id]
            if task.closed or run_id != task.run_id or not found:
                raise RPCError("not found", RPCStatusCode.NOT_FOUND, b"")
            task.open_waits.remove(found[0])
            if on_reply := self.replies.pop((run_id, found[0]), None):
                on_reply(reply)
            if task.waiting.get(found[0].role) == found[0]:
                del task.waiting[found[0].role]
                task.in_flight.add(found[0])

        return SimpleNamespace(complete=complete)

    def engine(self, config: CoordinatorConfig) -> Engine:
        """Return a new engine."""
        client: Any = self
        granting = slot_grants.SlotGrants(client, self._db, _namespace, config)
        return Engine(granting, slot_leaks.SlotLoop(granting))


class _Turn:
    """Lets the other coroutines of the loop run once."""

    def __await__(self) -> Generator[None, None, None]:
        yield


async def pause(steps: int) -> None:
    """Let other coroutines run."""
    for _ in range(steps):
        await _Turn()


async def _namespace() -> str:
    return "ns"
