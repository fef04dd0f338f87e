"""Runs a backfill: starts tasks while slots are free, awaits each on its own, and writes how it has ended.

All state is in MongoDB and Temporal, so that another engine continues where a killed one has stopped.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, TypeVar

from temporalio.common import WorkflowIDReusePolicy
from temporalio.service import RPCError, RPCStatusCode

from flowkit.adapters.tasks.stored_graphs import unpack_task
from flowkit.attempt.workflows import WorkflowState, read_marker
from flowkit.backfills.ends import TaskEnds
from flowkit.backfills.rules import BackfillStep, SeenTask, next_step
from flowkit.errors import (
    ActionRejected,
    AdmissionRejected,
    ConfigError,
    FlowKitError,
    GraphError,
    RejectionCause,
    TaskCancelled,
    TaskFailed,
    TaskIdTaken,
    UnknownTask,
)
from flowkit.graph.scheduled import Nominal, evaluate_params
from flowkit.models.backfills import (
    BackfillCounts,
    BackfillOutcome,
    BackfillRunStatus,
    BackfillState,
    Existing,
)
from flowkit.models.ownership import Owner, OwnerKind, unowned_problem
from flowkit.models.tasks import TaskStatus
from flowkit.text import bounded, one_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flowkit.adapters.backfills import BackfillStore
    from flowkit.client import TaskClient
    from flowkit.models.backfills import BackfillRun, StoredBackfill

T = TypeVar("T")

_logger = logging.getLogger("flowkit.engine.worker")

_LOOK_SEC = 2.0
"""How often a backfill looks whether it was cancelled, or has tasks to start again."""
_PAUSES_SEC = (0.2, 1.0, 5.0)
"""Pauses after errors that pass. The last one repeats."""
_STARTS_AT_ONCE = 4
"""Starts of an engine at once, of all backfills. Hundreds of them would delay the tasks that the engine runs."""
_LONGEST_WAIT_SEC = 20.0
"""After this time, a backfill asks Temporal for a task whose document shows no end: the document may be lost."""
_CREATION_LOOKS, _CREATION_LOOK_SEC = 150, 0.2
"""How often, and with which pauses, the workflow of a backfill looks for one that is not stored yet."""
_CLOSING_SEC = 0.1
"""A workflow closes a moment after its document shows the end, and a run opens the document of an ended task again a
moment after its start."""
_START_PAUSES_SEC = (0.0, 0.1, 0.5, 2.0)
"""Pauses before the tries to start a task. Something else may start it, or end, between a look and a start."""
_REASON_CHARS = 1_000
_CANCEL_REASON = "the backfill was cancelled"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Try:
    """One try of a nominal time."""

    backfill: StoredBackfill
    run: BackfillRun
    owner: Owner
    """The marker of the task that this try starts."""

    @property
    def nominal(self) -> Nominal:
        return Nominal(schedule=self.backfill.schedule, at=self.run.at)


class Driver:
    """Runs the backfills of one database. Use it on the loop that owns the database handle."""

    def __init__(self, tasks: TaskClient, store: BackfillStore) -> None:
        self._tasks = tasks
        self._store = store
        self._ends = TaskEnds(tasks.find_ended)
        self._starting = asyncio.Semaphore(_STARTS_AT_ONCE)

    async def run(self, backfill_id: str) -> BackfillCounts:
        """Run a backfill until all its nominal times have ended, and return what has become of them."""
        awaited: dict[asyncio.Task[None], BackfillRun] = {}
        try:
            while True:
                backfill = await self._find_created(backfill_id)
                if backfill is None:
                    return BackfillCounts()
                await self._fill(backfill, awaited)
                if not awaited and await self._store.close(backfill):
                    return await self._store.counts(backfill_id)
                if awaited:
                    done, _ = await asyncio.wait(
                        awaited, timeout=_LOOK_SEC, return_when=asyncio.FIRST_COMPLETED
                    )
                    for each in done:
                        del awaited[each]
                        each.result()
        finally:
            for each in awaited:
                each.cancel()
            await asyncio.gather(*awaited, return_exceptions=True)

    async def _find_created(self, backfill_id: str) -> StoredBackfill | None:
        """Return a backfill with all its rows; None if there is none.

        Its workflow starts before it is stored. Its creator may be about to store it, or may have been killed since.
        """
        for look in range(_CREATION_LOOKS):
            backfill = await self._store.find(backfill_id)
            if backfill is not None and backfill.state is not BackfillState.CREATING:
                return backfill
            if backfill is not None and look:
                await self._store.complete(backfill)
            else:
                await asyncio.sleep(_CREATION_LOOK_SEC)
        return None

    async def _fill(self, backfill: StoredBackfill, awaited: dict[asyncio.Task[None], BackfillRun]) -> None:
        """Await each task that runs, and start others while slots are free.

        Rows show which slots are free: an engine that was frozen may take some after another one has replaced it.
        """
        if backfill.state is not BackfillState.RUNNING:
            await self._store.cancel_pending(backfill.backfill_id)
        while True:
            known = {(each.at, each.tries) for each in awaited.values()}
            running = await self._store.runs(backfill.backfill_id, BackfillRunStatus.RUNNING)
            for run in running:
                if (run.at, run.tries) not in known:
                    awaited[asyncio.create_task(self._run_one(backfill, run))] = run
            if len(running) >= backfill.max_active or await self._store.claim(backfill) is None:
                return

    async def _run_one(self, backfill: StoredBackfill, run: BackfillRun) -> None:
        """Run one nominal time to its end, and write it. Errors that pass delay it only."""
        outcome = await _until_it_works(lambda: self._outcome(backfill, run))
        await _until_it_works(lambda: self._store.end_run(backfill.backfill_id, run, outcome))

    async def _outcome(self, backfill: StoredBackfill, run: BackfillRun) -> BackfillOutcome:
        owner = Owner(
            kind=OwnerKind.BACKFILL,
            deployment=await self._tasks.deployment(),
            id=backfill.owner_id(run),
        )
        attempt = _Try(backfill=backfill, run=run, owner=owner)
        begin = self._begin_task if backfill.admission is None else self._submit_task
        try:
            return await begin(attempt) or await self._await_end(attempt)
        except FlowKitError as error:
            if _passes(error):
                raise
            return _failed(error, error.code)
        except RPCError as error:
            if error.status is not RPCStatusCode.INVALID_ARGUMENT:
                raise
            return _failed(error, GraphError.code)

    async def _begin_task(self, attempt: _Try) -> BackfillOutcome | None:
        """Start the task, unless it has started. Return the end of a nominal time whose task is left as it is."""
        refused: BackfillStep | None = None
        for pause_sec in _START_PAUSES_SEC:
            await asyncio.sleep(pause_sec)
            async with self._starting:
                begun = await self._begin_once(attempt, refused)
            if isinstance(begun, BackfillOutcome):
                return begun
            if begun is BackfillStep.AWAIT:
                return None
            refused = begun
        if refused is BackfillStep.START_AGAIN:
            raise ActionRejected(f"task {attempt.run.task_id!r} cannot start again yet", RejectionCause.BUSY)
        raise TaskIdTaken(unowned_problem(attempt.run.task_id))

    async def _begin_once(
        self, attempt: _Try, refused: BackfillStep | None
    ) -> BackfillOutcome | BackfillStep:
        """Start the task. Return AWAIT if it has started, the end of a nominal time, or a step that was refused.

        `refused` is the step that was refused before. A workflow of something else that has ended keeps no task from
        starting.
        """
        seen, reuse = await self._look(attempt)
        step = next_step(seen, attempt.backfill.existing, attempt.run.tries)
        if isinstance(step, BackfillOutcome) or step is BackfillStep.AWAIT:
            return step
        if (stopped := await self._stop_before(attempt)) is not None:
            return stopped
        reuse = WorkflowIDReusePolicy.ALLOW_DUPLICATE if refused is BackfillStep.START else reuse
        if not await self._start(attempt, step, reuse):
            return step
        if await self._stop_before(attempt) is not None:  # The cancel came during the start.
            await self._cancel(attempt)
        return BackfillStep.AWAIT

    async def _look(self, attempt: _Try) -> tuple[SeenTask, WorkflowIDReusePolicy]:
        """Return what is known of the task, and whether a start may follow a workflow that has closed."""
        task_id = attempt.run.task_id
        found = await self._tasks.look_up(task_id)
        marker = None if found.description is None else await read_marker(found.description)
        status = await self._tasks.status_of(task_id)
        absent = found.state is WorkflowState.ABSENT
        if absent and status is None and await self._waits_for_admission(task_id):
            status = TaskStatus.QUEUED
        reuse = WorkflowIDReusePolicy.REJECT_DUPLICATE if absent else WorkflowIDReusePolicy.ALLOW_DUPLICATE
        seen = SeenTask(
            is_open=found.state is WorkflowState.OPEN, is_own=marker == attempt.owner, status=status
        )
        return seen, reuse

    async def _waits_for_admission(self, task_id: str) -> bool:
        pending = await self._tasks.find_pending(task_id)
        return pending is not None and not pending.decided

    async def _stop_before(self, attempt: _Try) -> BackfillOutcome | None:
        """Return the end of a nominal time whose task has not started, if the backfill was cancelled; else None."""
        present = await self._store.find(attempt.backfill.backfill_id)
        if present is None or present.state is not BackfillState.RUNNING:
            return BackfillOutcome(status=BackfillRunStatus.CANCELLED, reason=_CANCEL_REASON)
        return None

    async def _is_to_stop(self, attempt: _Try) -> bool:
        """Return whether a cancel may have missed the task: one of all tasks, or of waiting requests."""
        present = await self._store.find(attempt.backfill.backfill_id)
        if present is None or present.state is BackfillState.RUNNING:
            return False
        return present.cancels_running or await self._waits_for_admission(attempt.run.task_id)

    async def _cancel(self, attempt: _Try) -> None:
        if attempt.backfill.admission is not None:
            await self._tasks.cancel_task(attempt.run.task_id, reason=_CANCEL_REASON)
        else:
            await self._tasks.cancel_workflow(attempt.run.task_id, reason=_CANCEL_REASON, owner=attempt.owner)

    async def _start(self, attempt: _Try, step: BackfillStep, reuse: WorkflowIDReusePolicy) -> bool:
        """Start the task. Return False if something else has started it first."""
        task, nominal = await self._task(attempt), attempt.nominal
        try:
            if step is BackfillStep.START_AGAIN:
                return await self._tasks.steering.run_again(
                    attempt.run.task_id,
                    params=task["params"],
                    graph=task["graph"],
                    owner=attempt.owner,
                    nominal=nominal,
                    reason=f"backfill {attempt.backfill.backfill_id}",
                )
            await self._tasks.start_task(
                attempt.run.task_id,
                params=task["params"],
                graph=task["graph"],
                owner=attempt.owner,
                reuse=reuse,
                nominal=nominal,
            )
        except TaskIdTaken:
            # It stays so until something else has ended, whatever that is.
            if step is BackfillStep.START_AGAIN:
                raise TaskIdTaken(unowned_problem(attempt.run.task_id)) from None
            return False
        return True

    async def _task(self, attempt: _Try) -> dict[str, Any]:
        """Return the graph of the task, and its params with the values of their expressions."""
        content = await self._store.task(attempt.backfill.backfill_id)
        if content is None:
            raise ConfigError(f"backfill {attempt.backfill.backfill_id!r} no longer exists")
        task = await asyncio.to_thread(unpack_task, content)
        params = await asyncio.to_thread(evaluate_params, task["params"], attempt.nominal.text)
        return {"graph": task["graph"], "params": params}

    async def _await_end(self, attempt: _Try) -> BackfillOutcome:
        """Await the end of the task."""
        if await self._is_to_stop(attempt):
            await self._cancel(attempt)
        await self._await_close(attempt.run.task_id)
        try:
            await self._tasks.result(attempt.run.task_id)
        except TaskFailed as error:
            return _failed(error.reason, error.cause)
        except TaskCancelled as error:
            return BackfillOutcome(status=BackfillRunStatus.CANCELLED, reason=error.reason)
        except UnknownTask:
            return _failed("neither Temporal nor MongoDB has its task any more", UnknownTask.code)
        return BackfillOutcome(status=BackfillRunStatus.SUCCEEDED)

    async def _await_close(self, task_id: str) -> None:
        """Wait until the workflow of a task has closed, or a request for admission has ended without one."""
        pause_sec = _CLOSING_SEC
        while True:
            state = (await self._tasks.look_up(task_id)).state
            if state is WorkflowState.CLOSED:
                return
            if state is WorkflowState.ABSENT:
                pending = await self._tasks.find_pending(task_id)
                if pending is None or pending.error is not None:
                    return
            has_ended = await self._ends.wait(task_id, _LONGEST_WAIT_SEC)
            pause_sec = min(2 * pause_sec, _LOOK_SEC) if has_ended else _CLOSING_SEC
            await asyncio.sleep(pause_sec)

    async def _submit_task(self, attempt: _Try) -> BackfillOutcome | None:
        """Submit the task to the admission queue, as `_begin_task` starts it."""
        async with self._starting:
            return await self._submit(attempt)

    async def _submit(self, attempt: _Try) -> BackfillOutcome | None:
        backfill, task_id = attempt.backfill, attempt.run.task_id
        assert backfill.admission is not None
        is_own = await self._store.is_submitted(backfill.backfill_id, attempt.run)
        if is_own and await self._tasks.find_pending(task_id) is not None:
            return None
        seen, _ = await self._look(attempt)
        step = next_step(seen, Existing.NONE, 0)
        if isinstance(step, BackfillOutcome):
            return step
        if (stopped := await self._stop_before(attempt)) is not None:
            return stopped
        task = await self._task(attempt)
        await self._store.note_submission(backfill.backfill_id, attempt.run)
        await self._tasks.submit_task(
            backfill.admission,
            params=task["params"],
            graph=task["graph"],
            task_id=task_id,
            nominal=attempt.nominal,
        )
        return None


def _failed(reason: object, code: str) -> BackfillOutcome:
    text = bounded(one_line(reason), _REASON_CHARS)
    return BackfillOutcome(status=BackfillRunStatus.FAILED, reason=text, code=code)


def _passes(error: FlowKitError) -> bool:
    """Return whether a call may succeed later that has failed with this error."""
    is_busy = isinstance(error, ActionRejected) and error.cause is RejectionCause.BUSY
    return error.retryable or is_busy or isinstance(error, AdmissionRejected)


async def _until_it_works(call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of a call. Repeat it after errors of servers, and while the admission queue is full."""
    pauses = chain(_PAUSES_SEC, repeat(_PAUSES_SEC[-1]))
    while True:
        pause_sec = next(pauses)
        try:
            return await call()
        except RPCError as error:
            _logger.warning("a backfill tries again in %s s: %s", pause_sec, one_line(error))
        except FlowKitError as error:
            if not _passes(error):
                raise
            _logger.info("a backfill tries again in %s s: %s", pause_sec, one_line(error))
        await asyncio.sleep(pause_sec)
