"""Does for the workflow of one task what Temporal's server and its workers do."""

from __future__ import annotations

import asyncio
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from temporalio.activity import ActivityCancellationDetails
from temporalio.exceptions import ApplicationError

from flowkit import reason_codes
from flowkit.attempt.failures import failed_attempt, timed_out
from flowkit.models import AttemptInput, NodeStatus, temporal_names
from flowkit.testing.executors import RUN
from flowkit.testing.simulation import messages
from flowkit.text import names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from temporalio.testing import ActivityEnvironment

    from flowkit.models import FirstBatch, ShardStarted
    from flowkit.testing.executors import Executors
    from flowkit.testing.simulation.clock import Alarm, VirtualClock

_TRY_CANCEL = 0
"""Temporal's value for: the workflow does not wait until the activity has stopped."""


_IDLE_SEC = 10.0
"""Seconds in which attempts that wait for each other have long found out what others have done."""


_LAST_SEC = 0.5
"""Seconds in which the end of an attempt that has blocked the event loop is noticed."""


class TaskStuck(Exception):
    """Raised if a simulated task waits for something that does not happen by itself."""


class WorkflowBroken(Exception):
    """Raised if the code of the workflow fails, which no graph and no handler should be able to cause."""


@dataclass(eq=False)
class _Running:
    """An activity that runs."""

    command: Any
    is_local: bool
    environment: ActivityEnvironment
    limit: Alarm | None = None
    overdue: float | None = None
    """The time limit that has passed."""


@dataclass
class _WorkflowRun:
    """One run of the workflow: a task that continues as new has several."""

    run_id: str
    instance: Any
    timers: dict[int, Alarm] = field(default_factory=dict)
    running: dict[tuple[bool, int], _Running] = field(default_factory=dict)


class TaskServer:
    """Runs the workflow of one task, its timers by the clock and its activities in this process."""

    def __init__(
        self,
        task_id: str,
        executors: Executors,
        clock: VirtualClock,
        *,
        hangs_after_sec: float,
        waits_for_work: bool,
        scheduled_at: datetime | None = None,
    ) -> None:
        """Prepare the workflow.

        Time does not wait longer than `hangs_after_sec` (see Patience) for attempts that neither end nor wait for it.
        If nothing else is left, the task is stuck, unless it `waits_for_work` without a limit.
        """
        self.task_id = task_id
        self._scheduled_at = scheduled_at
        self.clock = clock
        self._executors = executors
        self._hangs_after_sec = hangs_after_sec
        self._waits_for_work = waits_for_work
        self.observe: Callable[[], None] = lambda: None
        """Called whenever the workflow has run."""
        self._jobs: list[Any] = []
        self._updates: dict[str, tuple[Any, asyncio.Future[Any]]] = {}
        """The actions without a result, by id: those not sent yet, or sent."""
        self._update_ids = itertools.count(1)
        self._unsent: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()
        """What runs activities, also those that the workflow no longer waits for."""
        self._number = 0
        self.ended = False
        self._view: dict[str, Any] = {"status": "queued", "nodes": []}
        self._error: BaseException | None = None
        self._pool = ThreadPoolExecutor(1, "flowkit-workflow")
        self._calls: Mapping[str, Callable[[Any], None]] = {
            "start_timer": self._start_timer,
            "cancel_timer": self._cancel_timer,
            "schedule_activity": lambda command: self._start_activity(command, is_local=False),
            "schedule_local_activity": lambda command: self._start_activity(command, is_local=True),
            "request_cancel_activity": lambda command: self._cancel_activity(command, is_local=False),
            "request_cancel_local_activity": lambda command: self._cancel_activity(command, is_local=True),
            "update_response": self._note_response,
            "continue_as_new_workflow_execution": self._continue_as_new,
            "complete_workflow_execution": self._end,
            "fail_workflow_execution": self._end,
            "cancel_workflow_execution": self._end,
        }
        executors.signals.receive = self.signal
        executors.signals.request_cancel = self.cancel

    async def run(self, task: dict[str, Any], others: Sequence[asyncio.Future[Any]] = ()) -> None:
        """Run the task with this input to its end. Raise the error of the engine or of `others` if there is one."""
        self._run = self._new_run("")
        self._jobs.append(messages.start(self.task_id, [messages.to_payload(task)], self.clock.now))
        try:
            while True:
                self._activate_all()
                if self.ended:
                    return
                settled = await self.clock.settle(self._hangs_after_sec)
                for error in (self._error, *map(_error_of, others)):
                    if error is not None:
                        raise error
                await self._pass_time(settled=settled)
        finally:
            await self._stop()

    async def _pass_time(self, *, settled: bool) -> None:
        """Let time pass when everybody waits, unless there is something for the workflow.

        Without any moment to wait for, attempts that wait for each other may still find out that others have ended.
        """
        if self._jobs or self._unsent or self.clock.advance():
            return
        if settled and not self._run.running:
            raise TaskStuck(describe_waits(self.view()))
        longest = _IDLE_SEC if settled else math.inf if self._waits_for_work else _LAST_SEC
        if not await self.clock.news(longest):
            hanging = describe_work(self.clock.working, self._hangs_after_sec)
            raise TaskStuck(describe_waits(self.view()) if settled else hanging)

    async def _stop(self) -> None:
        """End what still runs, and let those who wait for a result of an action have an error."""
        left = [*self._tasks]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for _, result in self._updates.values():
            if not result.done():
                result.set_exception(ApplicationError("the task has ended", type=reason_codes.REJECTED))
                result.exception()
        try:
            with suppress(WorkflowBroken):
                self._send([messages.evict()])
        finally:
            self._pool.shutdown()

    def signal(self, record: FirstBatch | ShardStarted) -> None:
        """Deliver the signal of an attempt."""
        name = temporal_names.FIRST_BATCH if hasattr(record, "run_id") else temporal_names.SHARD_STARTED
        self._add(messages.signal(name, record))

    def cancel(self, reason: str) -> None:
        """Request that the task stop."""
        self._add(messages.cancel(reason))

    async def act(self, name: str, given: Mapping[str, Any]) -> Any:
        """Send an action, and return its result. Raise its error."""
        if self.ended:
            raise ApplicationError("the task has ended", type=reason_codes.REJECTED)
        job = messages.update(next(self._update_ids), name, {**given})
        result = asyncio.get_running_loop().create_future()
        self._updates[job.do_update.id] = job, result
        self._unsent.append(job.do_update.id)
        self.clock.note_change()
        with self.clock.waiting():
            return await result

    def view(self) -> dict[str, Any]:
        """Return the result of the query `status`."""
        if self._number and not self.ended:
            (answer,) = self._send([messages.query(temporal_names.STATUS_QUERY)])
            self._view = messages.from_payload(answer.respond_to_query.succeeded.response)
        return self._view

    def _add(self, job: Any) -> None:
        self._jobs.append(job)
        self.clock.note_change()

    def _new_run(self, continued: str) -> _WorkflowRun:
        run_id = f"{RUN}-{self._number}" if continued else RUN
        queue, now = self._executors.settings.queue, self.clock.now_dt()
        instance = messages.new_instance(self.task_id, run_id, queue, now, continued, self._scheduled_at)
        return _WorkflowRun(run_id, instance)

    # --- the workflow -------------------------------------------------------------------------------------------

    def _activate_all(self) -> None:
        """Hand over what has happened, until nothing more happens at once. Updates come last, as with the engine."""
        while (self._jobs or self._may_update) and not self.ended:
            jobs, self._jobs = self._jobs, []
            if not jobs:
                jobs = [self._updates[each][0] for each in self._unsent]
                self._unsent = []
            for command in self._send(jobs):
                kind = str(command.WhichOneof("variant"))
                if (call := self._calls.get(kind)) is not None:
                    call(getattr(command, kind))
            self.observe()

    @property
    def _may_update(self) -> bool:
        return bool(self._unsent) and not any(is_local for is_local, _ in self._run.running)

    def _send(self, jobs: list[Any]) -> list[Any]:
        """Let the workflow run, and return what it commands. Raise WorkflowBroken if its code fails.

        It runs on a thread, because it has an event loop of its own. Nothing else runs meanwhile.
        """
        self._number += 1
        made = messages.activation(self._run.run_id, self.clock.now, self._number, jobs)
        completion = self._pool.submit(self._run.instance.activate, made).result()
        if completion.HasField("failed"):
            raise WorkflowBroken(f"the workflow failed: {completion.failed.failure.message}")
        return list(completion.successful.commands)

    def _end(self, command: Any) -> None:
        self.view()
        self.ended = True

    def _continue_as_new(self, command: Any) -> None:
        before = self._run.run_id
        self._run = self._new_run(before)
        self._jobs.append(messages.start(self.task_id, command.arguments, self.clock.now))
        self._unsent = list(self._updates)

    def _note_response(self, response: Any) -> None:
        if response.HasField("accepted"):
            return
        _, result = self._updates.pop(response.protocol_instance_id)
        if result.done():
            return
        if response.HasField("completed"):
            result.set_result(messages.from_payload(response.completed))
        else:
            result.set_exception(messages.from_failure(response.rejected))

    # --- timers and activities ----------------------------------------------------------------------------------

    def _start_timer(self, command: Any) -> None:
        moment = self.clock.now + command.start_to_fire_timeout.ToTimedelta().total_seconds()
        self._run.timers[command.seq] = self.clock.at(moment, lambda: self._fire(command.seq))

    def _fire(self, seq: int) -> None:
        del self._run.timers[seq]
        self._add(messages.fire_timer(seq))

    def _cancel_timer(self, command: Any) -> None:
        if (alarm := self._run.timers.pop(command.seq, None)) is not None:
            alarm.cancelled = True

    def _start_activity(self, command: Any, *, is_local: bool) -> None:
        running = _Running(
            command, is_local, self._executors.environment(self.task_id, self._run.run_id, is_local=is_local)
        )
        self._run.running[is_local, command.seq] = running
        task = asyncio.create_task(self._run_activity(self._run, running))
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        self.clock.note_change()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._error = self._error or _error_of(task)
        self.clock.note_change()

    async def _run_activity(self, run: _WorkflowRun, running: _Running) -> None:
        with self.clock.party(running.command.activity_id or running.command.activity_type):
            job = await self._outcome(running)
            if run.running.pop((running.is_local, running.command.seq), None) is not None:
                self._add(job)

    async def _outcome(self, running: _Running) -> Any:
        """Run an activity to its end, and return the job that hands it over."""
        command, is_local = running.command, running.is_local
        work = asyncio.create_task(self._perform(running))
        try:
            await asyncio.wait([work])
        finally:
            work.cancel()
            await asyncio.wait([work])
            if running.limit is not None:
                running.limit.cancelled = True
        if work.cancelled():
            if running.overdue is None:
                return messages.cancelled(command, is_local=is_local)
            return messages.failed(command, failed_attempt(timed_out(running.overdue)), is_local=is_local)
        error = work.exception()
        if error is None:
            return messages.completed(command, work.result(), is_local=is_local)
        if not (isinstance(error, ApplicationError) and error.non_retryable):
            self._error = error  # Temporal would repeat it forever.
        return messages.failed(command, error, is_local=is_local)

    async def _perform(self, running: _Running) -> Any:
        command = running.command
        function = self._executors.find(command.activity_type, "" if running.is_local else command.task_queue)
        given = messages.input_of(function, command.arguments)
        self._limit(running, given[0])
        with self._executors.trace.call(given[0]):
            return await running.environment.run(function, *given)

    def _limit(self, running: _Running, given: object) -> None:
        """Let the clock end an attempt after its `timeout_sec`."""
        if not isinstance(given, AttemptInput) or given.timeout_sec is None:
            return
        limit = given.timeout_sec

        def end() -> None:
            running.overdue = limit
            running.environment.cancel(ActivityCancellationDetails(timed_out=True))

        running.limit = self.clock.at(self.clock.now + limit, end)

    def _cancel_activity(self, command: Any, *, is_local: bool) -> None:
        running = self._run.running.get((is_local, command.seq))
        if running is None:
            return
        running.environment.cancel()
        if running.command.cancellation_type == _TRY_CANCEL:
            del self._run.running[is_local, command.seq]
            self._add(messages.cancelled(running.command, is_local=is_local))


def _error_of(task: asyncio.Future[Any]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def describe_waits(view: Mapping[str, Any]) -> str:
    """Return why a task waits forever, and what a test can do about it. `view` is its status."""
    waits = [
        f"node {node['node_id']!r} waits for {node.get('waits_for') or 'others'}"
        for node in view["nodes"]
        if node.get("waits_for") or node["status"] == NodeStatus.RUNNING
    ]
    return (
        f"the task waits for something that does not happen by itself: {'; '.join(waits) or 'nothing is left to run'}. "
        "Decide approvals with decide={...}, satisfy prerequisites with satisfied=[...], or act in a script"
    )


def describe_work(working: Sequence[str], seconds: float) -> str:
    """Return that these have neither ended nor waited for the clock for so many real seconds, and what helps."""
    return (
        f"nothing has happened for {seconds:g} s: {names(working)} neither ended nor waited on the clock, and no time "
        "limit ends the wait. Give the node a timeout_sec, or pass a larger hangs_after_sec if it takes that long"
    )
