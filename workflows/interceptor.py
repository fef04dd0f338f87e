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
    from flowkit.workflows.display.details import add_page_link
    from flowkit.workflows.opening import rejection

if TYPE_CHECKING:
    from temporalio.worker import ExecuteWorkflowInput, HandleQueryInput, WorkflowInterceptorClassInput


class TaskInterceptor(Interceptor):
    """Reject tasks that have several inputs, and add the current details to the metadata that the Web UI queries.

    The details link to the page at `page_url`, if there is one.
    """

    def __init__(self, page_url: str | None = None) -> None:
        self._page_url = page_url

    def workflow_interceptor_class(
        self, input: WorkflowInterceptorClassInput
    ) -> type[WorkflowInboundInterceptor]:
        """Return the interceptor class for workflow executions."""
        return type("_LinkingTaskCalls", (_TaskCalls,), {"page_url": self._page_url})


class _TaskCalls(WorkflowInboundInterceptor):
    page_url: str | None = None

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
            details = task.current_details
            result.current_details = add_page_link(details, self.page_url, workflow.info().workflow_id)
        return result


def _is_task() -> bool:
    return workflow.info().workflow_type == temporal_names.TASK
