"""The look-up of a workflow: whether it is open, closed or absent, and whose it is."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from flowkit.models.ownership import INPUT_MEMO, MEMO, Owner, read_owner

if TYPE_CHECKING:
    from datetime import timedelta

    from temporalio.client import Client, WorkflowExecutionDescription

_OPEN: Final = {None, WorkflowExecutionStatus.RUNNING}


class WorkflowState(Enum):
    """What Temporal says about a workflow."""

    OPEN = "open"
    CLOSED = "closed"
    ABSENT = "absent"
    """The namespace exists, and has no workflow with this id. It may have been deleted, or not have started
    yet, so look a second time before ending anything for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The result of a look-up."""

    state: WorkflowState
    description: WorkflowExecutionDescription | None = None
    """None if the workflow is absent."""


ABSENT: Final = Found(state=WorkflowState.ABSENT)


async def look_up(
    client: Client, task_id: str, *, run_id: str | None = None, rpc_timeout: timedelta | None = None
) -> Found:
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
    return Found(state=WorkflowState.OPEN if is_open else WorkflowState.CLOSED, description=description)


def is_absent(error: RPCError) -> bool:
    """Return whether an error says that a workflow or an activity does not exist.

    Temporal uses the same status for a missing namespace, as it may briefly report after a stall. That says nothing
    about the workflow.
    """
    return error.status is RPCStatusCode.NOT_FOUND and not any(
        detail.type_url.endswith("NamespaceNotFoundFailure") for detail in error.grpc_status.details
    )


async def read_marker(description: WorkflowExecutionDescription) -> Owner | None:
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
