"""Runs the Task workflow so that its events and updates have one order, whichever engine takes over a task.

The SDK calls the workflow in activations: jobs that resolve activities, fire timers, deliver signals or start updates.
It divides a history into activations in another way in a replay than in an engine that takes over a task:

* A query that reaches a new engine late brings it events that no workflow task has delivered yet. The SDK runs the workflow
  with them at once, and with the rest of them in the next workflow task. A replay has all of them in one activation.
* An update can be in one activation with events that a replay has in an earlier one, and the SDK runs updates first
  (https://github.com/temporalio/sdk-rust/issues/1146).
* An update can arrive while a local activity runs, which Temporal's heartbeats of a workflow task allow. The engine runs it
  with the end of that activity, or before. A replay has no such heartbeats, and runs it when the activity starts.
* A local activity can end while the workflow answers a query that came with its workflow task. The SDK then completes the
  workflow task with the marker of the activity, and brings its result to the workflow with the next workflow task. A replay
  has the result where the marker is.

All lead to commands in another order, so that the history could never be replayed. Here, events wait for their workflow
task, the updates of an activation come last, and updates wait while a local activity runs. Such an activity is short. The
result of a local activity waits until queries are answered. If it is on its way already, or the activity is about to time
out, which does not wait, the queries stay without an answer, and the server sends them again.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakValueDictionary

from temporalio import activity
from temporalio.worker import ActivityInboundInterceptor, Interceptor, WorkflowRunner

from flowkit.models import temporal_names

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from google.protobuf.duration_pb2 import Duration
    from temporalio.worker import ExecuteActivityInput, WorkflowInstance, WorkflowInstanceDetails

_TERMINAL = (
    "complete_workflow_execution",
    "continue_as_new_workflow_execution",
    "fail_workflow_execution",
    "cancel_workflow_execution",
)
_ANSWER_SEC = 0.2
"""Time for the answer to a query from the workflow to the SDK. Results of local activities take the same way."""
_TIMEOUTS = ("schedule_to_close_timeout", "schedule_to_start_timeout", "start_to_close_timeout")
_LEGACY_QUERY = "legacy"
"""The id of a query that comes without a workflow task."""


class OrderedRunner(WorkflowRunner):
    """Runs workflows with another runner, and tasks with activations in order."""

    def __init__(self, runner: WorkflowRunner) -> None:
        self.inner = runner

    def prepare_workflow(self, defn: Any) -> None:
        """Prepare a workflow for execution."""
        self.inner.prepare_workflow(defn)

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        """Return an instance of a workflow."""
        instance = self.inner.create_instance(det)
        if det.info.workflow_type == temporal_names.TASK:
            vars(instance)["activate"] = Activations(instance.activate).run
        return instance

    def set_worker_level_failure_exception_types(self, types: Sequence[type[BaseException]]) -> None:
        """Pass the types of the worker on."""
        self.inner.set_worker_level_failure_exception_types(types)


class LocalResults(Interceptor):
    """Holds results of local activities back while queries are answered. An engine has it together with OrderedRunner."""

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        """Return an interceptor for the activities of a worker."""
        return _HoldsResults(next)


class _HoldsResults(ActivityInboundInterceptor):
    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        info = activity.info()
        gate = _GATES.get(str(info.workflow_run_id)) if info.is_local else None
        try:
            return await super().execute_activity(input)
        finally:
            for left in iter(lambda: 0.0 if gate is None else gate.left(info.activity_id), 0.0):
                await asyncio.sleep(left)


class _Gate:
    """Lets the results of the local activities of a run through, in the loop that runs them, or answers of its workflow.

    The workflow has a thread of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._through: set[str] = set()
        """The ids of the activities whose results are on their way to the workflow."""
        self._closed_until = 0.0

    def left(self, activity_id: str) -> float:
        """Return the seconds that the result of an activity has to wait. If it is 0, the result is on its way."""
        with self._lock:
            left = max(self._closed_until - time.monotonic(), 0.0)
            if not left:
                self._through.add(activity_id)
            return min(left, _ANSWER_SEC)

    def close(self, running: Collection[str]) -> bool:
        """Let no results through. Return False, and close nothing, if that of an activity that runs is on its way."""
        with self._lock:
            if not self._through.isdisjoint(running):
                return False
            self._closed_until = math.inf
            return True

    def open(self) -> None:
        """Let results through as soon as what has left the workflow has arrived."""
        with self._lock:
            self._closed_until = time.monotonic() + _ANSWER_SEC

    def forget(self, activity_id: str) -> None:
        """Forget a result that has arrived."""
        with self._lock:
            self._through.discard(activity_id)


_GATES: Final[WeakValueDictionary[str, _Gate]] = WeakValueDictionary()
"""By the id of the run, for the runs that an engine of the process has in memory; the latest, if several have it."""


class _LocalActivity(NamedTuple):
    """A local activity that runs."""

    activity_id: str
    ends_by: float
    """The time, by `time.monotonic`, before which the SDK does not let it time out."""


class Activations:
    """The activations of one run of a workflow in one process."""

    def __init__(self, run: Callable[[Any], Any]) -> None:
        """`run` runs an activation, and returns a completion with the commands to which it leads."""
        self._run = run
        self._task: tuple[int, int] | None = None
        """The size of the history and the time of the latest workflow task that has started."""
        self._events = 0
        """The number of events that the workflow has been given, or that wait."""
        self._held: list[Any] = []
        """Jobs that wait for their workflow task."""
        self._updates: list[Any] = []
        """Updates that wait until no local activity runs."""
        self._local: dict[int, _LocalActivity] = {}
        """The local activities that run, by sequence number."""
        self._gate = _Gate()

    def run(self, activation: Any) -> Any:
        """Return the completion of an activation."""
        if any(job.HasField("remove_from_cache") for job in activation.jobs):
            return self._run(activation)
        _GATES[activation.run_id] = self._gate
        if all(job.HasField("query_workflow") for job in activation.jobs):
            return self._answer(activation)
        if self._is_ahead(activation):
            self._held += activation.jobs
            return self._run(_with_jobs(activation, []))
        if self._held:
            held, self._held = self._held, []
            activation = _with_jobs(activation, [*held, *activation.jobs])
        return self._run_in_order(activation)

    def _answer(self, activation: Any) -> Any:
        """Run queries. Leave out their answers if a local activity could end before these arrive."""
        if not self._local or any(job.query_workflow.query_id == _LEGACY_QUERY for job in activation.jobs):
            return self._run(activation)
        if self._gate.close([each.activity_id for each in self._local.values()]):
            try:
                answers = self._run(activation)
            finally:
                self._gate.open()
            if time.monotonic() + 2 * _ANSWER_SEC < min(each.ends_by for each in self._local.values()):
                return answers
        return self._run(_with_jobs(activation, []))

    def _is_ahead(self, activation: Any) -> bool:
        """Return whether an activation has events for which no workflow task has started.

        It has more events than the one before, but the time and the size of the history are those of the same workflow
        task.
        """
        task, before = (activation.history_size_bytes, activation.timestamp.ToNanoseconds()), self._events
        is_same_task, self._task, self._events = task == self._task, task, activation.history_length
        return is_same_task and activation.history_length > before

    def _run_in_order(self, activation: Any) -> Any:
        """Run the updates after the other jobs, and when no local activity runs. Return all commands as one completion.

        If the other jobs end the run, its updates stay without a response, and Temporal rejects them or sends them to
        the next run.
        """
        others = [job for job in activation.jobs if not job.HasField("do_update")]
        self._updates += [job for job in activation.jobs if job.HasField("do_update")]
        first = self._run_jobs(activation, others) if others else None
        if first is not None and (first.HasField("failed") or any(map(_ends_run, first.successful.commands))):
            return first
        if self._local or not self._updates:
            return first if first is not None else self._run_jobs(activation, [])
        updates, self._updates = self._updates, []
        both = self._run_jobs(activation, updates)
        if both.HasField("failed") or first is None:
            return both
        commands = [*first.successful.commands, *both.successful.commands]
        flags = {*first.successful.used_internal_flags, *both.successful.used_internal_flags}
        del both.successful.commands[:], both.successful.used_internal_flags[:]
        both.successful.commands.extend(commands)
        both.successful.used_internal_flags.extend(sorted(flags))
        return both

    def _run_jobs(self, activation: Any, jobs: Sequence[Any]) -> Any:
        """Return the completion of an activation with these jobs, and note the local activities that end or start."""
        ended = (job.resolve_activity for job in jobs if job.HasField("resolve_activity"))
        for seq in [each.seq for each in ended if each.is_local and each.seq in self._local]:
            self._gate.forget(self._local.pop(seq).activity_id)
        completion = self._run(_with_jobs(activation, jobs))
        if completion.HasField("successful"):
            commands = completion.successful.commands
            started = (
                each.schedule_local_activity for each in commands if each.HasField("schedule_local_activity")
            )
            self._local.update((each.seq, _running(each)) for each in started)
        return completion


def _running(command: Any) -> _LocalActivity:
    """Return the local activity that a command starts."""
    limits: list[Duration] = [getattr(command, name) for name in _TIMEOUTS if command.HasField(name)]
    seconds = min((each.ToTimedelta().total_seconds() for each in limits), default=math.inf)
    return _LocalActivity(command.activity_id, time.monotonic() + seconds)


def _with_jobs(activation: Any, jobs: Sequence[Any]) -> Any:
    some = type(activation)()
    some.CopyFrom(activation)
    del some.jobs[:]
    some.jobs.extend(jobs)
    return some


def _ends_run(command: Any) -> bool:
    return command.WhichOneof("variant") in _TERMINAL
