"""Runs the Task workflow so that its events and updates have one order, whichever engine takes over a task.

The SDK calls the workflow in activations: jobs that resolve activities, fire timers, deliver signals or start updates.
It divides a history into activations in another way in a replay than in an engine that takes over a task:

* A query that reaches a new engine late brings it events that no workflow task has delivered yet. The SDK
  runs the workflow with them at once, and with the rest of them in the next workflow task. A replay has all
  of them in one activation.
* An update can be in one activation with events that a replay has in an earlier one, and the SDK runs updates first
  (https://github.com/temporalio/sdk-rust/issues/1146).
* An update can arrive while a local activity runs, which Temporal's heartbeats of a workflow task allow.
  The engine runs it with the end of that activity, or before. A replay has no such heartbeats, and runs it
  when the activity starts.
* A query that came with a workflow task is answered while a local activity runs. The SDK then completes the
  workflow task with the answer, and the activity ends in the next one. A replay knows no workflow task
  between the two, so that the time, the length of the history and the order of the commands differ.
* A query brings an engine the events of a workflow task that has started in another engine, and that times
  out there. The SDK runs the workflow with them, as with those of a workflow task of its own. The next one
  has the events that came later. A replay has all of them in one activation, because it knows nothing of a
  workflow task that has timed out.
* A workflow task has events that lead to no command, as did the one before, and an update causes the next one. If an
  event arrives before that one starts, it keeps its place in the history even if the update is rejected. A replay takes
  the first for a heartbeat of the second, and has the events of both in one activation
  (https://github.com/temporalio/sdk-rust/issues/1606). But it divides them where the acceptance of the update is the
  first command, which an engine that runs the history anew does not know.

All lead to other commands, so that the history could never be replayed. Here, events wait for their workflow task, the
updates of an activation come last, and updates and queries wait while a local activity runs. Such an activity is short.
The answers leave together with the commands that follow its end. The server sends a query again that has no answer.

In the last two cases, nothing in an activation says how a replay would divide its events. The workflow task that
follows such a query fails if the one before may have timed out elsewhere (`Activations._may_have_timed_out`): the
history has grown by fewer events than it would with the commands that this engine has sent. A workflow task with events
and updates fails if the one before may be taken for its heartbeat (`_Silence`). The SDK then forgets the workflow,
the server sends the workflow task again, and the engine runs the workflow anew from its history, as a replay does. A
command that changes nothing comes before the acceptance of an update in a workflow task with events, so that a replay
does not divide them.

A workflow task can take longer than two seconds: the graph is large and the machine is busy, or the process was stopped
for a while. The SDK takes that for a deadlock: it fails the workflow task, raises an exception in its thread, and calls
the workflow on another thread to end it. Both can hit the event loop of the workflow between two steps. It then loses a
wakeup, the SDK can never forget the workflow, and the engine can never stop. FlowKit's workflows wait for nothing, so
that each activation ends by itself. `allow_long_workflow_tasks` lets the SDK wait for that. Other workflows of the same
worker may have real deadlocks, and the SDK treats them as it always does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion
from temporalio.worker import WorkflowRunner

from flowkit.core.instruments import LONG_HISTORIES, UPDATES
from flowkit.models import temporal_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor, Future
    from datetime import timedelta

    from temporalio.worker import Worker, WorkflowInstance, WorkflowInstanceDetails
    from temporalio.workflow import Info

_logger = logging.getLogger("flowkit.engine.activations")

_OWN = frozenset({temporal_names.TASK, temporal_names.BACKFILL})
"""The types of FlowKit's workflows."""
_TERMINAL = (
    "complete_workflow_execution",
    "continue_as_new_workflow_execution",
    "fail_workflow_execution",
    "cancel_workflow_execution",
)
_LEGACY_QUERY = "legacy_query"
"""The id that the SDK gives to a query that comes without a workflow task."""
_MOST_EVENTS, _MOST_BYTES = 51_200, 50 << 20
"""The size of a history at which Temporal ends a run."""

_SOON_SEC = 1.0
"""A query that brings events is asked at once after them. Before any other query, the workflow task is completed at the
server, so that it comes later than this as a rule. On an engine that is very busy, the former can come later, too."""

_TASK_EVENTS = 3
"""The end of a workflow task in the history, and the two events with which the next one starts."""
_ONE_EVENT = (
    "schedule_local_activity",
    "upsert_workflow_search_attributes",
    "modify_workflow_properties",
)
"""Commands that are one event each. A local activity is one when it has ended."""
_CANCELS = {"request_cancel_activity": "schedule_activity", "cancel_timer": "start_timer"}
"""Commands, and those of which no event is left if both are in one workflow task."""

_NO_FIELD = "flowkit_none"
"""A field that no memo has. To delete it becomes an event, and changes nothing."""

_Kind: TypeAlias = tuple[str, int]
"""The kind of a command, and its sequence number; 0 for one without."""

REPEATED = (
    "A replay might divide the latest events into other workflow tasks than this engine has. The workflow task is "
    "repeated from the history. No action is needed."
)
"""The message of a workflow task that fails so that the engine runs the workflow anew."""
_TOO_LONG = (
    "workflow %s took %.0f s for one step, because this machine is too busy or the process was stopped meanwhile. "
    "After %.0f s, Temporal repeats the step in any engine. If this is rare, no action is needed."
)


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
        LONG_HISTORIES.add(amount=0)  # So that Prometheus sees the first one as an increase.
        if det.info.workflow_type == temporal_names.TASK:
            vars(instance)["activate"] = Activations(instance.activate, det.info.task_timeout).run
        return instance

    def set_worker_level_failure_exception_types(self, types: Sequence[type[BaseException]]) -> None:
        """Pass the types of the worker on."""
        self.inner.set_worker_level_failure_exception_types(types)


def allow_long_workflow_tasks(worker: Worker) -> Worker:
    """Return a worker that lets each activation of FlowKit's workflows run to its end, however long it takes.

    Temporal's SDK has no public option for this but `debug_mode`, which blocks the loop of the worker.
    """
    runs_workflows: Any = worker._workflow_worker
    if runs_workflows is not None:
        runs_workflows._workflow_task_executor = _Threads(runs_workflows._workflow_task_executor)
    return worker


class _Threads:
    """The threads on which a worker runs its workflows, as the SDK uses them."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads

    def submit(self, activate: Any, activation: Any) -> Future[Any] | asyncio.Task[Any]:
        """Run an activation. One of a workflow of FlowKit is awaited to its end, also by `asyncio.wait_for`."""
        running, info = self._threads.submit(activate, activation), activate.__self__.get_info()
        return asyncio.create_task(_wait_for_end(running, info)) if info.workflow_type in _OWN else running

    def shutdown(self) -> None:
        """Wait for the activations that run, and end the threads."""
        self._threads.shutdown()


async def _wait_for_end(running: Future[Any], info: Info) -> Any:
    """Return what an activation returns, even if this is cancelled meanwhile."""
    begun, ends = time.monotonic(), asyncio.wrap_future(running)
    while not ends.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([ends])
    if (took := time.monotonic() - begun) > (limit := info.task_timeout.total_seconds()):
        _logger.warning(_TOO_LONG, info.workflow_id, took, limit)
    return ends.result()


def is_near_limits(events: int, size: int) -> bool:
    """Return whether a history has more than 80 % of the events or bytes at which Temporal ends a run."""
    return events > 0.8 * _MOST_EVENTS or size > 0.8 * _MOST_BYTES


class Activations:
    """The activations of one run of a workflow in one process."""

    def __init__(self, run: Callable[[Any], Any], task_timeout: timedelta) -> None:
        """Start with no activation.

        `run` runs an activation, and returns a completion with the commands to which it leads. `task_timeout` is the
        time after which the server gives up a workflow task that has started.
        """
        self._run = run
        self._timeout_ns = int(task_timeout.total_seconds() * 1e9)
        self._task: tuple[int, int] | None = None
        """The size of the history and the time of the latest workflow task that has started."""
        self._events = 0
        """The number of events that the workflow has been given, or that wait."""
        self._held: list[Any] = []
        """Jobs that wait for their workflow task."""
        self._updates: dict[str, Any] = {}
        """Updates that wait until no local activity runs, by the id that the server gives to each."""
        self._queries: list[Any] = []
        """Queries of the present workflow task that wait until no local activity runs."""
        self._local: set[int] = set()
        """The sequence numbers of the local activities that run."""
        self._new: _NewEvents | None = None
        """The latest activation with events that are new to this engine, and what it led to."""
        self._is_foreign = False
        """Whether a query may have brought the new events, so that their workflow task may belong to another engine."""
        self._silence = _Silence()

    def run(self, activation: Any) -> Any:
        """Return the completion of an activation."""
        if any(job.HasField("remove_from_cache") for job in activation.jobs):
            return self._run(activation)
        if all(job.HasField("query_workflow") for job in activation.jobs):
            return self._ask(activation)
        if not activation.is_replaying and is_near_limits(
            activation.history_length, activation.history_size_bytes
        ):
            LONG_HISTORIES.add()
        if self._may_have_timed_out(activation) or self._silence.may_end_with(activation, self._held):
            return _failure(activation)
        if activation.history_length != self._events:
            self._queries = []
        if self._is_ahead(activation):
            self._held += activation.jobs
            return self._run(_with_jobs(activation, []))
        if self._held:
            held, self._held = self._held, []
            activation = _with_jobs(activation, [*held, *activation.jobs])
        completion = self._with_answers(activation, self._run_in_order(activation))
        self._note_new_events(activation, completion)
        self._silence.note(activation, completion)
        return completion

    def _ask(self, activation: Any) -> Any:
        """Run queries, or keep them if they have come with a workflow task in which a local activity runs."""
        is_legacy = any(job.query_workflow.query_id == _LEGACY_QUERY for job in activation.jobs)
        if is_legacy:
            self._silence.note_end()
        if is_legacy and self._new is not None and time.monotonic() - self._new.ended < _SOON_SEC:
            self._is_foreign = True
        if not self._local or is_legacy:
            return self._run(activation)
        self._queries += activation.jobs
        return self._run(_with_jobs(activation, []))

    def _with_answers(self, activation: Any, completion: Any) -> Any:
        """Return the completion, with the answers to the queries that have waited if no local activity runs
        any more.
        """
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

    def _note_new_events(self, activation: Any, completion: Any) -> None:
        """Keep what says later whether the workflow task of an activation was one of this engine.

        A replay has the events of completed workflow tasks only, and updates come only with a task of this engine.
        """
        commands = [_kind_of(each) for each in completion.successful.commands]
        if self._new is not None and self._new.length == activation.history_length:
            commands += self._new.commands
        self._is_foreign, self._new = False, None
        is_own = any(job.HasField("do_update") for job in activation.jobs)
        if not (activation.is_replaying or is_own):
            self._new = _NewEvents(
                activation.history_length, activation.timestamp.ToNanoseconds(), time.monotonic(), commands
            )

    def _may_have_timed_out(self, activation: Any) -> bool:
        """Return whether the latest new events may belong to a workflow task that has timed out in another engine.

        A query came at once after them, the timeout has passed, and the history lacks the commands to which they led.
        """
        if self._new is None or not self._is_foreign or activation.history_length <= self._new.length:
            return False
        passed = activation.timestamp.ToNanoseconds() - self._new.started
        if passed < self._timeout_ns or _ends_one_of(activation, self._new.commands):
            return False
        own = _TASK_EVENTS + _events_of(self._new.commands) + sum(map(_events_before, activation.jobs))
        return bool(self._local) or activation.history_length - self._new.length < own

    def _run_in_order(self, activation: Any) -> Any:
        """Run the updates after the other jobs, and when no local activity runs. Return all commands as one completion.

        If the other jobs end the run, its updates stay without a response, and Temporal rejects them or sends them to
        the next run. A server that another process has replaced does not know which updates it has sent. If a client
        repeats one that waits, it comes again, and the SDK takes one answer to both.
        """
        others = [job for job in activation.jobs if not job.HasField("do_update")]
        updates = (job for job in activation.jobs if job.HasField("do_update"))
        self._updates |= {job.do_update.protocol_instance_id: job for job in updates}
        first = self._run_jobs(activation, others) if others else None
        if first is not None and (first.HasField("failed") or any(map(_ends_run, first.successful.commands))):
            return first
        if self._local or not self._updates:
            return first if first is not None else self._run_jobs(activation, [])
        waiting, self._updates = [*self._updates.values()], {}
        both = self._run_jobs(activation, waiting)
        if not both.HasField("failed"):
            _count_updates(waiting, both.successful.commands)
            if self._silence.begins_with_acceptance(activation, first, both):
                both = _with_first_command(both)
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


class _Silence:
    """Finds a workflow task whose events a replay has together with those of the workflow task before it.

    The one before has events, and neither it nor the one before that led to a command: else a replay divides them.
    """

    def __init__(self) -> None:
        self._length = 0
        """The length of the history in the latest workflow task."""
        self._commands: list[_Kind] = []
        """The commands of that workflow task which become events."""
        self._has_events = False
        """Whether that workflow task had events."""
        self._is_last = False
        """Whether that workflow task was the last of the history when it ran."""
        self._follows_silence = True
        """Whether the workflow task before that one led to no command, or did not exist."""
        self._is_open = False
        """Whether an earlier workflow task may be one with the next: none has led to a command since."""

    def may_end_with(self, activation: Any, held: Sequence[Any]) -> bool:
        """Return whether a replay may have the events of an activation, and those `held`, together with earlier ones.

        Only an update causes a workflow task without an event before it.
        """
        is_next = activation.history_length > self._length and not activation.is_replaying
        has_update = any(job.HasField("do_update") for job in activation.jobs)
        return is_next and has_update and self._stays_open and _have_events([*held, *activation.jobs])

    def begins_with_acceptance(self, activation: Any, first: Any, updates: Any) -> bool:
        """Return whether a workflow task with events would have the acceptance of an update as its first command.

        `first` and `updates` are the completions of the events, or None, and of the updates.
        """
        is_same_task = activation.history_length == self._length
        if not (_have_events(activation.jobs) or (is_same_task and self._has_events)):
            return False
        before = self._commands if is_same_task else []
        if _lasting([*before, *_recorded(activation.jobs, first)]):
            return False
        command = next(filter(_is_recorded, updates.successful.commands), None)
        return command is not None and bool(command.HasField("update_response"))

    @property
    def _stays_open(self) -> bool:
        may_begin = self._follows_silence and self._has_events and self._is_last
        return (self._is_open or may_begin) and not _lasting(self._commands)

    def note(self, activation: Any, completion: Any) -> None:
        """Note the events of an activation, and the commands to which they led."""
        if activation.history_length > self._length:
            self._is_open, self._follows_silence = self._stays_open, not _lasting(self._commands)
            self._length, self._commands, self._has_events = activation.history_length, [], False
        self._has_events |= _have_events(activation.jobs)
        self._is_last = not activation.is_replaying
        self._commands += _recorded(activation.jobs, completion)

    def note_end(self) -> None:
        """Note that the history ends with the latest workflow task, which a query has made the SDK replay."""
        self._is_last = True


@dataclass(frozen=True, slots=True)
class _NewEvents:
    """An activation that was no replay: the latest one, or several of one workflow task."""

    length: int
    """The length of the history."""
    started: int
    """When its workflow task started: the server's time in nanoseconds."""
    ended: float
    """When the workflow had run: this engine's monotonic time in seconds."""
    commands: list[_Kind]
    """The commands to which it led, without their inputs, which can be large."""


def _count_updates(jobs: Sequence[Any], commands: Sequence[Any]) -> None:
    """Count the updates of these jobs by the commands to which they led, but not those of a replay."""
    rejected = {
        each.update_response.protocol_instance_id
        for each in commands
        if each.HasField("update_response") and each.update_response.HasField("rejected")
    }
    for update in (job.do_update for job in jobs):
        if update.run_validator:
            is_rejected = update.protocol_instance_id in rejected
            UPDATES.add(update.name, "rejected" if is_rejected else "accepted")


def _kind_of(command: Any) -> _Kind:
    kind = str(command.WhichOneof("variant"))
    return kind, getattr(getattr(command, kind), "seq", 0)


def _ends_one_of(activation: Any, commands: Sequence[_Kind]) -> bool:
    """Return whether an activity or a timer ends that one of these commands has started."""
    ends = [
        ("start_timer", job.fire_timer.seq)
        if job.HasField("fire_timer")
        else ("schedule_activity", job.resolve_activity.seq)
        for job in activation.jobs
        if job.HasField("fire_timer")
        or (job.HasField("resolve_activity") and not job.resolve_activity.is_local)
    ]
    return not {*commands}.isdisjoint(ends)


def _events_of(commands: Sequence[_Kind]) -> int:
    """Return how many events the commands of a completed workflow task have at least in the history."""
    started = {each for each in commands if each[0] in _CANCELS.values()}
    ended = {(_CANCELS[kind], seq) for kind, seq in commands if kind in _CANCELS}
    return len(started - ended) + sum(kind in _ONE_EVENT for kind, _ in commands)


def _lasting(commands: Sequence[_Kind]) -> set[_Kind]:
    """Return the commands of a workflow task of which an event is left: not those that another one of them undoes."""
    undone = {(_CANCELS[kind], seq) for kind, seq in commands if kind in _CANCELS}
    return {(_CANCELS.get(kind, kind), seq) for kind, seq in commands} - (undone & {*commands})


def _is_recorded(command: Any) -> bool:
    """Return whether a command becomes an event. The answer to a query, and the rejection of an update, do not."""
    is_rejection = command.HasField("update_response") and command.update_response.HasField("rejected")
    return not is_rejection and not command.HasField("respond_to_query")


def _recorded(jobs: Sequence[Any], completion: Any | None) -> list[_Kind]:
    """Return the commands of an activation that become events, and the local activities that end with it.

    A local activity that begins counts, too, although it is an event only in the workflow task in which it ends.
    """
    ended = [job.resolve_activity.seq for job in jobs if job.resolve_activity.is_local]
    commands = completion.successful.commands if completion is not None else ()
    return [*(("marker", seq) for seq in ended), *(_kind_of(each) for each in commands if _is_recorded(each))]


def _have_events(jobs: Sequence[Any]) -> bool:
    return any(_events_before(job) or job.HasField("initialize_workflow") for job in jobs)


def _with_first_command(completion: Any) -> Any:
    """Return the completion with a command before its others that becomes an event and changes nothing."""
    commands = [*completion.successful.commands]
    del completion.successful.commands[:]
    memo = completion.successful.commands.add().modify_workflow_properties.upserted_memo
    memo.fields[_NO_FIELD].metadata["encoding"] = b"binary/null"
    completion.successful.commands.extend(commands)
    return completion


def _events_before(job: Any) -> int:
    """Return how many events of the history have led to a job at least."""
    kind = job.WhichOneof("variant")
    if kind == "resolve_activity":
        is_local, result = job.resolve_activity.is_local, job.resolve_activity.result
        return 0 if is_local else 2 if result.HasField("completed") else 1
    return int(kind in {"fire_timer", "signal_workflow", "cancel_workflow"})


def _failure(activation: Any) -> Any:
    """Return a completion that fails the workflow task, after which the SDK runs the workflow from its history."""
    completion = WorkflowActivationCompletion(run_id=activation.run_id)
    completion.failed.failure.message = REPEATED
    return completion


def _with_jobs(activation: Any, jobs: Sequence[Any]) -> Any:
    some = type(activation)()
    some.CopyFrom(activation)
    del some.jobs[:]
    some.jobs.extend(jobs)
    return some


def _ends_run(command: Any) -> bool:
    return command.WhichOneof("variant") in _TERMINAL
