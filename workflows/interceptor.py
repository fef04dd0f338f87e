"""Interceptor that fails a task with several inputs. Without it, Temporal would retry the workflow task forever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from temporalio import workflow
from temporalio.worker import Interceptor, WorkflowInboundInterceptor

with workflow.unsafe.imports_passed_through():
    from flowkit import temporal_names
    from flowkit.errors import GraphError
    from flowkit.workflows.opening import rejection

if TYPE_CHECKING:
    from temporalio.worker import ExecuteWorkflowInput, WorkflowInterceptorClassInput


class SingleInputInterceptor(Interceptor):
    """Reject tasks that have several inputs, because `Task.run` accepts only one."""

    def workflow_interceptor_class(
        self, input: WorkflowInterceptorClassInput
    ) -> type[WorkflowInboundInterceptor]:
        """Return the interceptor class for workflow executions."""
        return _SingleInputCheck


class _SingleInputCheck(WorkflowInboundInterceptor):
    async def execute_workflow(self, input: ExecuteWorkflowInput) -> Any:
        if workflow.info().workflow_type == temporal_names.TASK and len(input.args) > 1:
            problem = 'a task takes one input, {"params": {...}, "graph": {...}}, and not'
            raise rejection(GraphError([f"{problem} {len(input.args)}"]))
        return await super().execute_workflow(input)
