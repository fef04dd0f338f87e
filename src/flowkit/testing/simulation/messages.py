"""The form of what a workflow and Temporal's server exchange, with the SDK's own converters."""

from __future__ import annotations

from dataclasses import MISSING, fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from temporalio import activity, workflow
from temporalio.api.failure.v1.message_pb2 import Failure
from temporalio.bridge.proto.workflow_activation import WorkflowActivation, WorkflowActivationJob
from temporalio.common import (
    MetricMeter,
    Priority,
    SearchAttributeKey,
    SearchAttributePair,
    TypedSearchAttributes,
)
from temporalio.converter import DefaultFailureConverter
from temporalio.exceptions import CancelledError
from temporalio.worker import UnsandboxedWorkflowRunner, WorkflowInstanceDetails

from flowkit.models import temporal_names
from flowkit.payload_converter import SharedPayloadConverter
from flowkit.workflows.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from temporalio.worker import WorkflowInstance

NAMESPACE = "default"
TASK_TIMEOUT = timedelta(seconds=10)


class _Provided(dict[str, "Callable[..., Any]"]):
    """What the SDK's worker provides to workflows. What no workflow here uses does nothing."""

    def __missing__(self, name: str) -> Callable[..., Any]:
        return lambda *given: None


_PROVIDED = _Provided(__temporal_get_metric_meter=lambda: MetricMeter.noop)

_payloads, _failures = SharedPayloadConverter(), DefaultFailureConverter()


def to_payload(value: object) -> Any:
    """Return a value as the workflow receives it."""
    return _payloads.to_payload(value)


def from_payload(payload: Any, hint: Any = None) -> Any:
    """Return a value that the workflow has sent."""
    return _payloads.from_payload(payload, hint)


def from_failure(failure: Any) -> BaseException:
    """Return an error that the workflow has sent."""
    return _failures.from_failure(failure, _payloads)


def to_failure(error: BaseException) -> Any:
    """Return an error as the workflow receives it."""
    failure = Failure()
    _failures.to_failure(error, _payloads, failure)
    return failure


def input_of(function: Callable[..., Any], arguments: Iterable[Any]) -> list[Any]:
    """Return the arguments of an activity in the types that it declares."""
    hints = activity._Definition.must_from_callable(function).arg_types or []
    return [from_payload(each, hint) for each, hint in zip(arguments, hints, strict=False)]


def fill(kind: Any, **known: Any) -> Any:
    """Return a dataclass of the SDK with what is known of its fields.

    Releases of the SDK add fields and remove others: a new one without a default is None.
    """
    given: dict[str, Any] = {}
    for each in fields(kind):
        if each.name in known:
            given[each.name] = known[each.name]
        elif each.default is MISSING and each.default_factory is MISSING:
            given[each.name] = None
    return kind(**given)


def new_instance(
    task_id: str, run_id: str, queue: str, now: datetime, continued: str, scheduled_at: datetime | None
) -> WorkflowInstance:
    """Return a run of the Task workflow.

    `continued` is the id of the run before, or empty; `scheduled_at` is the nominal time of a task of a schedule.
    """
    return UnsandboxedWorkflowRunner().create_instance(
        fill(
            WorkflowInstanceDetails,
            payload_converter_factory=SharedPayloadConverter,
            failure_converter_class=DefaultFailureConverter,
            interceptor_classes=[],
            defn=workflow._Definition.must_from_class(Task),
            info=_info(task_id, run_id, queue, now, continued, scheduled_at),
            randomness_seed=0,
            extern_functions=_PROVIDED,
            disable_eager_activity_execution=True,
            worker_level_failure_exception_types=[],
            patch_activation_callback=None,
            last_completion_result=WorkflowActivationJob().initialize_workflow.last_completion_result,
            last_failure=None,
        )
    )


def _info(
    task_id: str, run_id: str, queue: str, now: datetime, continued: str, scheduled_at: datetime | None
) -> Any:
    key = SearchAttributeKey.for_datetime(temporal_names.SCHEDULED_START_TIME)
    scheduled = [] if scheduled_at is None else [SearchAttributePair(key, scheduled_at)]
    return fill(
        workflow.Info,
        attempt=1,
        continued_run_id=continued or None,
        cron_schedule=None,
        execution_timeout=None,
        first_execution_run_id=run_id,
        headers={},
        namespace=NAMESPACE,
        original_execution_run_id=run_id,
        parent=None,
        root=None,
        priority=Priority.default,
        raw_memo={},
        retry_policy=None,
        run_id=run_id,
        run_timeout=None,
        search_attributes={},
        start_time=now,
        workflow_start_time=now,
        task_queue=queue,
        task_timeout=TASK_TIMEOUT,
        typed_search_attributes=TypedSearchAttributes(scheduled),
        workflow_id=task_id,
        workflow_type=temporal_names.TASK,
    )


def activation(run_id: str, now: float, number: int, jobs: Iterable[Any]) -> WorkflowActivation:
    """Return what hands these jobs to the workflow. `number` stands for the length of the history."""
    made = WorkflowActivation(run_id=run_id, history_length=number, jobs=list(jobs))
    made.timestamp.FromDatetime(datetime.fromtimestamp(now, UTC))
    return made


def start(task_id: str, arguments: Iterable[Any], now: float) -> Any:
    """Return the job that starts a run."""
    job = WorkflowActivationJob()
    begun = job.initialize_workflow
    begun.workflow_type, begun.workflow_id, begun.attempt = temporal_names.TASK, task_id, 1
    begun.arguments.extend(arguments)
    begun.start_time.FromDatetime(datetime.fromtimestamp(now, UTC))
    begun.workflow_task_timeout.FromTimedelta(TASK_TIMEOUT)
    return job


def fire_timer(seq: int) -> Any:
    """Return the job that tells the workflow that a timer has passed."""
    job = WorkflowActivationJob()
    job.fire_timer.seq = seq
    return job


def cancel(reason: str) -> Any:
    """Return the job that requests the end of the workflow."""
    job = WorkflowActivationJob()
    job.cancel_workflow.reason = reason
    return job


def signal(name: str, value: object) -> Any:
    """Return the job that delivers a signal."""
    job = WorkflowActivationJob()
    job.signal_workflow.signal_name = name
    job.signal_workflow.input.append(to_payload(value))
    if (
        _EVENT_ID in job.signal_workflow.DESCRIPTOR.fields_by_name
    ):  # the SDK warns of a signal without an event
        setattr(job.signal_workflow, _EVENT_ID, 1)
    return job


_EVENT_ID = "originating_event_id"
"""A field that only newer releases of the SDK have."""


def update(number: int, name: str, given: object) -> Any:
    """Return the job that sends an action."""
    job = WorkflowActivationJob()
    sent = job.do_update
    sent.id = sent.protocol_instance_id = f"action-{number}"
    sent.name, sent.run_validator = name, True
    sent.meta.identity, sent.meta.update_id = "test", sent.id
    sent.input.append(to_payload(given))
    return job


def query(name: str) -> Any:
    """Return the job that sends a query."""
    job = WorkflowActivationJob()
    job.query_workflow.query_id, job.query_workflow.query_type = "1", name
    return job


def evict() -> Any:
    """Return the job that ends what a run of the workflow still does."""
    job = WorkflowActivationJob()
    job.remove_from_cache.SetInParent()
    return job


def completed(command: Any, result: object, *, is_local: bool) -> Any:
    """Return the job that hands over the result of an activity."""
    job = _resolution(command, is_local)
    job.resolve_activity.result.completed.result.CopyFrom(to_payload(result))
    return job


def failed(command: Any, error: BaseException, *, is_local: bool) -> Any:
    """Return the job that hands over the error of an activity. Only that of a local one is not wrapped."""
    job = _resolution(command, is_local)
    found = job.resolve_activity.result.failed.failure
    found.CopyFrom(to_failure(error) if is_local else _wrapped(command, error))
    return job


def cancelled(command: Any, *, is_local: bool) -> Any:
    """Return the job that tells the workflow that an activity was cancelled."""
    job = _resolution(command, is_local)
    job.resolve_activity.result.cancelled.failure.CopyFrom(_wrapped(command, CancelledError("Cancelled")))
    return job


def _resolution(command: Any, is_local: bool) -> Any:
    job = WorkflowActivationJob()
    job.resolve_activity.seq, job.resolve_activity.is_local = command.seq, is_local
    return job


def _wrapped(command: Any, error: BaseException) -> Any:
    failure = Failure(message="Activity task failed", cause=to_failure(error))
    failure.activity_failure_info.activity_type.name = command.activity_type
    failure.activity_failure_info.activity_id = command.activity_id
    return failure
