"""Interceptor of the Task workflow: it rejects several inputs, and supplies the current details when they
are queried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from temporalio import workflow
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.worker import Interceptor, WorkflowInboundInterceptor

with workflow.unsafe.imports_passed_through():
    from flowkit.errors import GraphError
    from flowkit.models import temporal_names
    from flowkit.workflows.opening import rejection

if TYPE_CHECKING:
    from temporalio.worker import ExecuteWorkflowInput, HandleQueryInput, WorkflowInterceptorClassInput


class TaskInterceptor(Interceptor):
    """Reject tasks that have several inputs, and add the current details to the metadata that the Web UI queries."""

    def workflow_interceptor_class(
        self, input: WorkflowInterceptorClassInput
    ) -> type[WorkflowInboundInterceptor]:
        """Return the interceptor class for workflow executions."""
        return _TaskCalls


class _TaskCalls(WorkflowInboundInterceptor):
    async def execute_workflow(self, input: ExecuteWorkflowInput) -> Any:
        """Run the workflow. Reject several inputs; without this, Temporal would retry the workflow task forever."""
        if _is_task() and len(input.args) > 1:
            problem = 'a task takes one input, {"params": {...}, "graph": {...}}, and not'
            raise rejection(GraphError([f"{problem} {len(input.args)}"]))
        return await super().execute_workflow(input)

    async def handle_query(self, input: HandleQueryInput) -> Any:
        """Return the result of a query. To render the details at every change would take a third of a workflow task."""
        result = await super().handle_query(input)
        if isinstance(result, WorkflowMetadata) and _is_task():
            task: Any = workflow.instance()
            result.current_details = task.current_details
        return result


def _is_task() -> bool:
    return workflow.info().workflow_type == temporal_names.TASK
