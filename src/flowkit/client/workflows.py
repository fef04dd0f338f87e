"""The workflows of tasks, and whose they are."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes

from flowkit.attempt.workflows import ABSENT, FoundWorkflow, WorkflowState, list_latest, look_up, read_marker
from flowkit.client.catalog import TaskCatalog
from flowkit.connection import Namespace
from flowkit.errors import FlowKitError, StoreUnavailable, TaskIdTaken
from flowkit.models import TaskResult, temporal_names
from flowkit.models.ownership import INPUT_MEMO, Owner, belongs_here, may_lack_marker, task_owner
from flowkit.text import clean, one_line, truncate
from flowkit.validation.arguments import require, task_id_problem
from flowkit.workflows.task import Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    from temporalio.client import Client, WorkflowExecution, WorkflowExecutionDescription, WorkflowHandle

    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.graph.scheduled import Nominal


_WARNING_CHARS = 300
_LONGEST_WAIT_SEC = 10 * 365 * 24 * 3600.0
_SCHEDULED_AT = SearchAttributeKey.for_datetime(temporal_names.SCHEDULED_START_TIME)
_SCHEDULED_BY = SearchAttributeKey.for_keyword(temporal_names.SCHEDULED_BY_ID)


class TaskWorkflows:
    """The workflows of the tasks of one deployment. Those of others have the same ids in the same namespace."""

    def __init__(self, client: Client, tasks: TaskStore, queue: str, *, any_queue: bool = False) -> None:
        """With `any_queue`, tasks of other queues that do not say whose they are count, too."""
        self.temporal = client
        """The client of Temporal."""
        self.store = tasks
        self.queue = queue
        self.namespace = Namespace(client)
        self.catalog = TaskCatalog(tasks.database)
        self._any_queue = any_queue

    @property
    def database(self) -> Any:
        """The database of the tasks."""
        return self.store.database

    async def deployment(self) -> str:
        """Return the id of the database, which distinguishes deployments in one namespace. Raise StoreUnavailable."""
        return await self.store.database_id()

    async def new_marker(self, task_id: str) -> Owner | None:
        """Return the marker of a new task; None while MongoDB does not respond, or refuses the id of the database."""
        with suppress(FlowKitError):
            return task_owner(task_id, await self.deployment())
        return None

    async def check_owner(self, task_id: str, found: FoundWorkflow, owner: Owner | None) -> None:
        """Raise TaskIdTaken if a workflow belongs to another deployment or, with `owner`, to another owner."""
        if found.description is not None and not await self._is_own(task_id, found.description, owner):
            raise TaskIdTaken(
                f"task id {task_id!r} belongs to a workflow that "
                + ("another deployment in this namespace" if owner is None else "something else")
                + " has started; choose another id"
            )

    async def look_up(
        self, task_id: str, owner: Owner | None = None, *, rpc_timeout: timedelta | None = None
    ) -> FoundWorkflow:
        """Return the latest run of a task. A workflow of another deployment counts as absent.

        With `owner`, a workflow of any other owner counts as absent. Raise RPCError if Temporal does not know, or
        not within `rpc_timeout`, and StoreUnavailable if it is not known whose workflow it is, because MongoDB does not
        respond.
        """
        require(task_id_problem(task_id))
        found = await look_up(self.temporal, task_id, rpc_timeout=rpc_timeout)
        own = found.description is None or await self._is_own(task_id, found.description, owner)
        return found if own else ABSENT

    async def foreign_workflows(self, task_ids: Sequence[str]) -> dict[str, WorkflowState]:
        """Return which of these ids of tasks a workflow has that is no task of this deployment, and its state.

        The latest run of each id counts. A workflow that has just started may be absent.
        """
        found = await list_latest(self.temporal, task_ids)
        return {
            task_id: WorkflowState.CLOSED if each.close_time else WorkflowState.OPEN
            for task_id, each in found.items()
            if not await self._is_own(task_id, each, None)
        }

    async def _is_own(self, task_id: str, description: WorkflowExecution, owner: Owner | None) -> bool:
        """Return whether a workflow is a task of this deployment or, with `owner`, the workflow of that owner."""
        marker = await read_marker(description)
        if owner is not None:
            return marker == owner
        if description.workflow_type != temporal_names.TASK:
            return False
        # The engines of one queue use the same database.
        on_own_queue = self._any_queue or description.task_queue == self.queue
        if marker is None:
            scheduled_by = description.typed_search_attributes.get(_SCHEDULED_BY)
            return on_own_queue and may_lack_marker(task_id, scheduled_by)
        try:
            return belongs_here(task_id, marker, await self.deployment())
        except StoreUnavailable:
            if on_own_queue:
                return True
            raise

    def handle_of(self, description: WorkflowExecutionDescription) -> WorkflowHandle[Task, TaskResult]:
        """Return a handle that reaches only the workflow that was looked up, and not a later one with the same id."""
        first_run_id = description.raw_description.workflow_execution_info.first_run_id
        return self.temporal.get_workflow_handle_for(
            Task.run, description.id, first_execution_run_id=first_run_id or None
        )

    def handle(self, task_id: str) -> WorkflowHandle[Task, TaskResult]:
        """Return Temporal's workflow handle for a task. Raise ConfigError if `task_id` is not a valid task id."""
        require(task_id_problem(task_id))
        return self.temporal.get_workflow_handle_for(Task.run, task_id)


def memo_of(marker: Owner | None, digest: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the memo of the workflow of a task."""
    return {**(marker.as_memo() if marker else {}), **({INPUT_MEMO: digest} if digest else {})}


def schedule_attributes(nominal: Nominal | None) -> TypedSearchAttributes | None:
    """Return the search attributes that Temporal's schedules set."""
    if nominal is None:
        return None
    pairs: list[SearchAttributePair[Any]] = [
        SearchAttributePair(_SCHEDULED_AT, nominal.at),
        SearchAttributePair(_SCHEDULED_BY, nominal.schedule),
    ]
    return TypedSearchAttributes(pairs)


def format_cause(error: BaseException) -> str:
    """Return the error as one short line."""
    text = one_line(clean(str(error)))
    if isinstance(error, StoreUnavailable):
        text = text.partition(" (")[0]
    return truncate(
        text if isinstance(error, FlowKitError) else f"{type(error).__name__}: {text}", _WARNING_CHARS
    )


def bound_timeout(seconds: float | None) -> float | None:
    """Return the timeout, capped at a value that every event loop supports."""
    return None if seconds is None else min(seconds, _LONGEST_WAIT_SEC)
