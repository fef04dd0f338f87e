"""Runs the Task workflow so that its events and updates have one order, whichever engine takes over a task.

The SDK calls the workflow in activations: jobs that resolve activities, fire timers, deliver signals or start updates.
It divides a history into activations in another way in a replay than in an engine that takes over a task:

* A query that reaches a new engine late brings it events that no workflow task has delivered yet. The SDK runs the workflow
  with them at once, and with the rest of them in the next workflow task. A replay has all of them in one activation.
* An update can be in one activation with events that a replay has in an earlier one, and the SDK runs updates first
  (https://github.com/temporalio/sdk-rust/issues/1146).
* An update can arrive while a local activity runs, which Temporal's heartbeats of a workflow task allow. The engine runs it
  with the end of that activity, or before. A replay has no such heartbeats, and runs it when the activity starts.
* A query that came with a workflow task is answered while a local activity runs. The SDK then completes the workflow task
  with the answer, and the activity ends in the next one. A replay knows no workflow task between the two, so that the time,
  the length of the history and the order of the commands differ.

All lead to other commands, so that the history could never be replayed. Here, events wait for their workflow task, the
updates of an activation come last, and updates and queries wait while a local activity runs. Such an activity is short.
The answers leave together with the commands that follow its end. The server sends a query again that has no answer.

One case remains: a query brings a new engine the events of a workflow task that has started in another engine, and that
times out there. Nothing in an activation tells them from events of a workflow task of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from temporalio.worker import WorkflowRunner

from flowkit.models import temporal_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from temporalio.worker import WorkflowInstance, WorkflowInstanceDetails

_TERMINAL = (
    "complete_workflow_execution",
    "continue_as_new_workflow_execution",
    "fail_workflow_execution",
    "cancel_workflow_execution",
)
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
        self._queries: list[Any] = []
        """Queries of the present workflow task that wait until no local activity runs."""
        self._local: set[int] = set()
        """The sequence numbers of the local activities that run."""

    def run(self, activation: Any) -> Any:
        """Return the completion of an activation."""
        if any(job.HasField("remove_from_cache") for job in activation.jobs):
            return self._run(activation)
        if all(job.HasField("query_workflow") for job in activation.jobs):
            return self._ask(activation)
        if activation.history_length != self._events:
            self._queries = []
        if self._is_ahead(activation):
            self._held += activation.jobs
            return self._run(_with_jobs(activation, []))
        if self._held:
            held, self._held = self._held, []
            activation = _with_jobs(activation, [*held, *activation.jobs])
        return self._with_answers(activation, self._run_in_order(activation))

    def _ask(self, activation: Any) -> Any:
        """Run queries, or keep them if they have come with a workflow task in which a local activity runs."""
        if not self._local or any(job.query_workflow.query_id == _LEGACY_QUERY for job in activation.jobs):
            return self._run(activation)
        self._queries += activation.jobs
        return self._run(_with_jobs(activation, []))

    def _with_answers(self, activation: Any, completion: Any) -> Any:
        """Return the completion, with the answers to the queries that have waited if no local activity runs any more."""
        if not self._queries or self._local or completion.HasField("failed"):
            return completion
        queries, self._queries = self._queries, []
        answers = self._run(_with_jobs(activation, queries))
        if answers.HasField("failed"):
            return answers
        completion.successful.commands.extend(answers.successful.commands)
        return completion

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
        self._local.difference_update(each.seq for each in ended if each.is_local)
        completion = self._run(_with_jobs(activation, jobs))
        if completion.HasField("successful"):
            commands = completion.successful.commands
            started = (
                each.schedule_local_activity for each in commands if each.HasField("schedule_local_activity")
            )
            self._local.update(each.seq for each in started)
        return completion


def _with_jobs(activation: Any, jobs: Sequence[Any]) -> Any:
    some = type(activation)()
    some.CopyFrom(activation)
    del some.jobs[:]
    some.jobs.extend(jobs)
    return some


def _ends_run(command: Any) -> bool:
    return command.WhichOneof("variant") in _TERMINAL
