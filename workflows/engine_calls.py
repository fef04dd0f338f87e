"""Call the activities that open, update and close the task document.

Other modules use the same retry policy, and the same way to run an activity of the engine as a local one.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, FailureError

from flowkit import temporal_names
from flowkit.models import ConditionResults, Opened, OpenTask
from flowkit.workflows.payloads import without_defaults

if TYPE_CHECKING:
    from flowkit.graph.task_input import NewTask
    from flowkit.models import CloseTask, EvaluateConditions, RecordTask

UNLIMITED_RETRIES = RetryPolicy(
    initial_interval=timedelta(seconds=0.2), maximum_interval=timedelta(seconds=10)
)
"""For an activity of the engine, without which the task cannot continue: it waits until MongoDB is available."""

_WRITE_HEARTBEAT_TIMEOUT = timedelta(seconds=10)
"""Time after which Temporal retries an activity whose engine crashed. `record` and `close_task` send heartbeats."""

_WRITE_SEC = 60.0
_WRITE_SEC_PER_NODE = 0.1
"""Time limits of a write. Most take milliseconds, but one for thousands of nodes may write a marker for each."""

_LOCAL_TIMEOUT = timedelta(seconds=2)
_OPEN_STORED_SEC = 300.0
"""Time limit for opening a task with a stored graph, which the engine reads and validates meanwhile."""

_OPEN_SUMMARY = "open the task in MongoDB"


async def open_document(new: NewTask) -> Opened:
    """Open the task document, and return what the workflow needs from it. Waits while MongoDB is unavailable.

    Raise ApplicationError when the engine rejects the task.
    """
    info = workflow.info()
    opening = OpenTask(
        task_id=info.workflow_id,
        first_run_id=info.first_execution_run_id,
        run_id=info.run_id,
        at=workflow.now().timestamp(),
        graph=new.graph,
        params=new.params,
        stored=new.stored,
    )
    if new.stored is not None:
        return await _open_stored(opening)
    try:
        local: Opened = await execute_locally(temporal_names.OPEN_TASK, opening, Opened, _OPEN_SUMMARY)
        return local
    except FailureError as error:
        rejection = _reported_error(error)
        if isinstance(rejection, ApplicationError) and rejection.non_retryable:
            raise rejection from None
    return await _open_with_retries(opening)


async def _open_stored(opening: OpenTask) -> Opened:
    """Open a task whose graph is stored. This takes longer than a local activity may take."""
    large = replace(opening, graph={}, params={})
    return await _open_with_retries(large, time_limit=timedelta(seconds=_OPEN_STORED_SEC))


async def _open_with_retries(opening: OpenTask, *, time_limit: timedelta | None = None) -> Opened:
    """Run `open_task` as a regular activity. Raise the engine's own error, so that clients see its text."""
    try:
        opened: Opened = await _execute_with_retries(
            temporal_names.OPEN_TASK, opening, _OPEN_SUMMARY, Opened, time_limit=time_limit
        )
    except ActivityError as error:
        raise _reported_error(error) from None
    return opened


def _reported_error(error: FailureError) -> BaseException:
    """Return the error that the activity raised, or `error` itself if the activity raised none."""
    cause = error.cause if isinstance(error, ActivityError) else error
    return cause if isinstance(cause, ApplicationError) else error


async def execute_locally(name: str, record: object, result_type: type[Any] | None, summary: str) -> Any:
    """Run an activity of the engine once as a local activity, which saves a round trip through the server.

    It has no retries and little time, because the workflow receives no events while a local activity runs. After a
    FailureError, the caller runs the regular activity.
    """
    return await workflow.execute_local_activity(
        name,
        record,
        result_type=result_type,
        schedule_to_close_timeout=_LOCAL_TIMEOUT,
        retry_policy=RetryPolicy(maximum_attempts=1),
        summary=summary,
    )


async def _execute_with_retries(
    name: str,
    record: object,
    summary: str,
    result_type: type[Any] | None = None,
    *,
    time_limit: timedelta | None = None,
) -> Any:
    """Run a regular activity on the engine's task queue. Retry it until MongoDB responds.

    `time_limit` is the time limit of an activity that sends heartbeats. If heartbeats stop, Temporal retries it sooner.
    """
    return await workflow.execute_activity(
        name,
        record,
        result_type=result_type,
        start_to_close_timeout=time_limit or _WRITE_HEARTBEAT_TIMEOUT,
        heartbeat_timeout=_WRITE_HEARTBEAT_TIMEOUT if time_limit else None,
        retry_policy=UNLIMITED_RETRIES,
        summary=summary,
    )


def write_timeout(nodes: int) -> timedelta:
    """Return the time limit of one write that updates `nodes` nodes."""
    return timedelta(seconds=_WRITE_SEC + _WRITE_SEC_PER_NODE * nodes)


async def record_document(record: RecordTask) -> None:
    """Write `record`, the state that only the workflow knows, to the task document."""
    await _execute_with_retries(
        temporal_names.RECORD,
        without_defaults(record),
        write_summary(record),
        time_limit=write_timeout(len(record.nodes)),
    )


def write_summary(record: RecordTask) -> str:
    """Return the summary that the Web UI shows for this write."""
    nodes = len(record.nodes)
    suffix = "" if nodes == 0 else ", 1 node" if nodes == 1 else f", {nodes} nodes"
    what = "cancel flags" if record.cancel_reason else f"task {record.status.value}"
    return f"write to MongoDB: {what}{suffix}"


async def evaluate_conditions(due: EvaluateConditions) -> ConditionResults:
    """Return the results of conditions. Waits while MongoDB is unavailable. Raise ActivityError if it rejects the read."""
    number = len(due.texts)
    results: ConditionResults = await _execute_with_retries(
        temporal_names.EVALUATE_CONDITIONS,
        without_defaults(due),
        "evaluate 1 condition" if number == 1 else f"evaluate {number} conditions",
        ConditionResults,
        time_limit=timedelta(seconds=_WRITE_SEC + due.seconds),
    )
    return results


async def close_document(close: CloseTask, nodes: int) -> bool:
    """Close the document of a task with `nodes` nodes. Return False if the document does not exist."""
    found: bool = await _execute_with_retries(
        temporal_names.CLOSE_TASK,
        without_defaults(close),
        "close the task in MongoDB",
        bool,
        time_limit=write_timeout(nodes),
    )
    return found
