"""The look-up of a workflow: whether it is open, closed or absent, and whose it is; and its queries."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import ResetStickyTaskQueueRequest
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from flowkit.models.ownership import INPUT_MEMO, MEMO, Owner, read_owner

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from temporalio.client import (
        Client,
        WorkflowExecutionDescription,
        WorkflowHandle,
    )
    from temporalio.client import WorkflowExecution as ListedWorkflow

_OPEN: Final = {None, WorkflowExecutionStatus.RUNNING}


class WorkflowState(Enum):
    """What Temporal says about a workflow."""

    OPEN = "open"
    CLOSED = "closed"
    ABSENT = "absent"
    """The namespace exists, and has no workflow with this id. It may have been deleted, or not have started
    yet, so look a second time before ending anything for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundWorkflow:
    """The result of a look-up."""

    state: WorkflowState
    description: WorkflowExecutionDescription | None = None
    """None if the workflow is absent."""

    @property
    def first_run_id(self) -> str | None:
        """The first run of the workflow, which no continue-as-new and no reset changes; None if it is absent."""
        if self.description is None:
            return None
        info = self.description.raw_description.workflow_execution_info
        return info.first_run_id or self.description.run_id


_NO_ANSWER: Final = (
    RPCStatusCode.CANCELLED,
    RPCStatusCode.DEADLINE_EXCEEDED,
    RPCStatusCode.FAILED_PRECONDITION,
)
"""Errors of a query that no engine has answered. With the last of them, Temporal knows no engine that polls."""

ABSENT: Final = FoundWorkflow(state=WorkflowState.ABSENT)


_IDS_AT_ONCE: Final = 100
QUERY_SEC: Final = 5.0
"""How long an engine may take to answer a query."""


async def query(client: Client, task_id: str, name: str, *args: Any, tries: int = 1) -> Any:
    """Return the result of a query of a workflow. Raise TimeoutError if no engine returns it within QUERY_SEC.

    Each further try waits as long again. After an engine was killed, Temporal sends the queries of its workflows to it
    for a while; a further try is for any engine of the queue.

    The time limit of a call of Temporal's SDK would not do, since the SDK repeats calls that have failed.
    """
    handle = client.get_workflow_handle(task_id)
    for number in range(tries):
        with suppress(TimeoutError):
            async with asyncio.timeout(QUERY_SEC):
                if number:
                    await _leave_sticky_queue(client, task_id)
                return await _ask(handle, name, args)
    raise TimeoutError(f"no engine answers the query {name} of task {task_id!r}")


async def _ask(handle: WorkflowHandle[Any, Any], name: str, args: Sequence[Any]) -> Any:
    """Return the result of a query. Raise TimeoutError if Temporal says that no engine has answered it."""
    try:
        return await handle.query(name, args=args)
    except RPCError as error:
        if error.status in _NO_ANSWER:
            raise TimeoutError(str(error)) from None
        raise


async def _leave_sticky_queue(client: Client, task_id: str) -> None:
    """Let any engine of the queue have the next query of a workflow, and not only the one that ran it last."""
    request = ResetStickyTaskQueueRequest(
        namespace=client.namespace, execution=WorkflowExecution(workflow_id=task_id)
    )
    with suppress(RPCError):  # It has ended meanwhile, or Temporal does not respond, as the query shows.
        await client.workflow_service.reset_sticky_task_queue(request)


async def look_up(
    client: Client, task_id: str, *, run_id: str | None = None, rpc_timeout: timedelta | None = None
) -> FoundWorkflow:
    """Return the latest run of a workflow, or the run `run_id`.

    Raise RPCError if Temporal does not know, for example because it does not respond or has no such namespace.
    """
    handle = client.get_workflow_handle(task_id, run_id=run_id)
    try:
        description = await (handle.describe(rpc_timeout=rpc_timeout) if rpc_timeout else handle.describe())
    except RPCError as error:
        if not is_absent(error):
            raise
        return ABSENT
    is_open = description.status in _OPEN or (
        run_id is None and description.status is WorkflowExecutionStatus.CONTINUED_AS_NEW
    )
    return FoundWorkflow(
        state=WorkflowState.OPEN if is_open else WorkflowState.CLOSED, description=description
    )


def is_absent(error: RPCError) -> bool:
    """Return whether an error says that a workflow or an activity does not exist.

    Temporal uses the same status for a missing namespace, as it may briefly report after a stall. That says nothing
    about the workflow.
    """
    return error.status is RPCStatusCode.NOT_FOUND and not any(
        detail.type_url.endswith("NamespaceNotFoundFailure") for detail in error.grpc_status.details
    )


async def list_latest(client: Client, workflow_ids: Sequence[str]) -> dict[str, ListedWorkflow]:
    """Return the latest run of each of these workflows that Temporal lists. One that has just started may be absent."""
    found: dict[str, ListedWorkflow] = {}
    for query in id_queries(workflow_ids):
        async for each in client.list_workflows(query):
            if each.id not in found or found[each.id].start_time < each.start_time:
                found[each.id] = each
    return found


def id_queries(workflow_ids: Sequence[str]) -> list[str]:
    """Return queries that list the workflows with these ids. An id that Temporal cannot quote is left out."""
    quoted = [word for each in workflow_ids if (word := _quote(each)) is not None]
    return [
        f"WorkflowId IN ({', '.join(quoted[start : start + _IDS_AT_ONCE])})"
        for start in range(0, len(quoted), _IDS_AT_ONCE)
    ]


def _quote(text: str) -> str | None:
    quote = next((each for each in ("'", '"') if each not in text), None)
    return None if quote is None or "\\" in text else f"{quote}{text}{quote}"


async def read_marker(description: ListedWorkflow) -> Owner | None:
    """Return the owner of a workflow; None if it has no readable marker, because a Temporal client has started it."""
    with suppress(Exception):  # another converter wrote it
        return read_owner(await description.memo_value(MEMO, None))
    return None


async def read_input_digest(description: WorkflowExecutionDescription) -> dict[str, str]:
    """Return the hashes of the params and the graph with which a task started; `{}` if its workflow has none."""
    with suppress(Exception):  # another converter wrote it
        found = await description.memo_value(INPUT_MEMO, None)
        return {name: found[name] for name in ("params", "graph") if isinstance(found[name], str)}
    return {}
