"""Starting and cancelling tasks: a thin front of Temporal's own client."""

from __future__ import annotations

import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticSerializationError, to_jsonable_python
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from flowkit import limits
from flowkit.activities.failures import cut
from flowkit.adapters import documents
from flowkit.errors import FlowKitError, GraphError, StoreUnavailable
from flowkit.workflows.endings import DEFAULT_CANCEL_REASON, pipeline_name
from flowkit.workflows.inputs import parse_input
from flowkit.workflows.task import Task
from flowkit.workflows.validation import parse_graph, raise_if, unknown_function

if TYPE_CHECKING:
    from collections.abc import Collection

    from temporalio.client import Client, WorkflowHandle

    from flowkit.adapters.store import TaskStore
    from flowkit.models import TaskResult

_logger = logging.getLogger("flowkit.client")

_INSERT_TRIES = 3


class TaskClient:
    """Tasks of one deployment, as a client sees them."""

    def __init__(
        self, client: Client, tasks: TaskStore, *, queue: str, max_nodes: int = limits.MAX_NODES
    ) -> None:
        self._client = client
        self._tasks = tasks
        self._queue = queue
        self._max_nodes = max_nodes

    async def create_task(
        self,
        *,
        params: dict[str, Any],
        graph: dict[str, Any],
        task_id: str | None = None,
        functions: Collection[str] | None = None,
    ) -> str:
        """Start a task and answer its id; a running task of the same id is left as it is.

        GraphError names what is wrong with the graph. The caller's objects are not changed.
        """
        task_id = task_id or str(uuid.uuid4())
        given = {"params": jsonable("params", params), "graph": jsonable("graph", graph)}
        self._check(task_id, given, functions)
        await self._start(task_id, given)
        await self._insert(task_id, given)
        return task_id

    def _check(self, task_id: str, given: dict[str, Any], functions: Collection[str] | None) -> None:
        new = parse_input(task_id, given)
        graph = parse_graph(new.graph, params=new.params, max_nodes=self._max_nodes)
        for warning in graph.warnings:
            _logger.warning("task %s: %s", task_id, warning)
        if functions is not None:
            problems = [unknown_function(node, functions) for node in new.graph["nodes"]]
            raise_if([problem for problem in problems if problem])

    async def _start(self, task_id: str, given: dict[str, Any]) -> None:
        graph_name = given["graph"].get("name")
        name = pipeline_name(graph_name if isinstance(graph_name, str) else None, given["params"])
        try:
            await self._client.start_workflow(
                "Task",
                given,
                id=task_id,
                task_queue=self._queue,
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY,
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                static_summary=name[:100] if name else None,
            )
        except WorkflowAlreadyStartedError:
            _logger.info("task %s has finished before; it is not run again", task_id)

    async def _insert(self, task_id: str, given: dict[str, Any]) -> None:
        """Show the task in MongoDB at once; its workflow would insert it anyway."""
        document = documents.new_task(task_id, given["params"], given["graph"], time.time())
        error: FlowKitError | None = None
        for _ in range(_INSERT_TRIES):
            try:
                return await self._tasks.insert_task(document)
            except StoreUnavailable as unavailable:
                error = unavailable
        _logger.warning("task %s runs, but its document is not there yet: %s", task_id, cut(str(error)))

    async def cancel_task(self, task_id: str, *, reason: str = DEFAULT_CANCEL_REASON) -> bool:
        """Ask a task to stop; False when there is no such task. A task that has ended stays as it is."""
        try:
            await self._client.get_workflow_handle(task_id).cancel(reason=reason)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            return False
        return True

    def handle(self, task_id: str) -> WorkflowHandle[Task, TaskResult]:
        """Temporal's handle of a task."""
        return self._client.get_workflow_handle_for(Task.run, task_id)


def jsonable(name: str, value: Any) -> Any:
    """A copy of `value` in JSON types: tuples as lists, datetimes as ISO text. GraphError when there is none."""
    try:
        return to_jsonable_python(value)
    except (PydanticSerializationError, ValueError) as error:
        raise GraphError([f"{name} cannot be written as JSON: {error}"]) from None
