"""Runs a RoleHandler for one attempt of a node (spec: worker side). RoleHandler documents the order of the calls."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from temporalio import activity

from flowkit import reason_codes
from flowkit.activities.batches.backpressure import backpressure
from flowkit.activities.batches.inputs import DistinctUids, Input, InputSettings, Wait
from flowkit.activities.calls import context_for
from flowkit.activities.context import ArtifactsWriter, RunContext
from flowkit.activities.handlers import BatchResult, FinalizeResult
from flowkit.activities.process_pool import ProcessDied
from flowkit.adapters.metrics import UNSTORABLE
from flowkit.adapters.outages import clock_stopped, retry_while_unavailable
from flowkit.adapters.tasks.attempts import TriedBefore
from flowkit.attempt.failures import failure, from_error, lost, unexpected, without_values
from flowkit.attempt.first_batch import FirstBatchSignal
from flowkit.attempt.storage import AttemptStorage, complete_end, resolve
from flowkit.attempt.supervision import AttemptFailed, WorkerContext, refuse_local, run_attempt
from flowkit.core.utils import stable_hash
from flowkit.errors import EpochTaken, FlowKitError
from flowkit.models import AttemptFailure, AttemptInput, AttemptResult, temporal_names
from flowkit.text import error_text

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
    from contextlib import AbstractContextManager

    from temporalio.exceptions import ApplicationError

    from flowkit.activities.attempt_log import AttemptLog, EventLog
    from flowkit.activities.batches.backpressure import Backpressure
    from flowkit.activities.calls import Threads
    from flowkit.activities.handlers import Batch, RoleHandler
    from flowkit.activities.process_pool import ProcessPool
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.attempt.role_lease import RoleLease

_logger = logging.getLogger("flowkit.worker")


@dataclass(frozen=True, kw_only=True)
class RoleContext:
    """What all roles of one worker process share, in addition to the WorkerContext of its attempts."""

    artifacts: ArtifactStore
    handlers: Mapping[str, RoleHandler]
    threads: Threads
    inputs: InputSettings = field(default_factory=InputSettings)
    processes: ProcessPool | None = None
    clock: Any = None
    events: EventLog | None = None
    leases: Mapping[str, RoleLease] = field(default_factory=dict)
    """The lease of each role whose task queue the process polls."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """The version of the handler of each role."""
    slots: Mapping[str, asyncio.Semaphore] = field(default_factory=dict)
    """The slots of each role, which the attempts of its two task queues share: one is for pinned versions."""


class RoleActivities:
    """The activities of a worker's roles."""

    def __init__(self, *, worker: WorkerContext, roles: RoleContext) -> None:
        self._worker = worker
        self._roles = roles

    def activity_for(self, role: str) -> Callable[..., Awaitable[AttemptResult]]:
        """Return the activity that runs attempts of `role`."""

        @activity.defn(name=role)
        async def run_role(attempt: AttemptInput) -> AttemptResult:
            if not attempt.signal_first_batch:
                return await self._run(attempt)
            async with FirstBatchSignal(attempt) as signal:
                return await self._run(attempt, on_batch=signal.batch_stored)

        return run_role

    def inline_activity(self, roles: Collection[str]) -> Callable[..., Awaitable[AttemptResult]]:
        """Return the local activity that runs attempts of `roles` inside an engine."""

        @activity.defn(name=temporal_names.INLINE_ATTEMPT)
        async def run_inline(attempt: AttemptInput) -> AttemptResult:
            if attempt.role not in roles:
                raise _refuse_role(attempt.role)
            return await self._run(attempt, may_repeat=True)

        return run_inline

    async def _run(self, attempt: AttemptInput, **options: Any) -> AttemptResult:
        run_id = activity.info().workflow_run_id or ""
        attempt = replace(attempt, version=self._roles.versions.get(attempt.role, ""))
        executor = RoleExecutor(
            attempt=attempt, run_id=run_id, worker=self._worker, roles=self._roles, **options
        )
        return await run_attempt(self._worker, attempt, executor, executor.waits_for)


@activity.defn(name=temporal_names.INLINE_ATTEMPT)
async def refuse_inline(attempt: AttemptInput) -> AttemptResult:
    """Refuse an inline attempt, in an engine that hosts no roles."""
    raise _refuse_role(attempt.role)


def _refuse_role(role: str) -> ApplicationError:
    return refuse_local(f"this engine does not host role {role!r}")


class RoleExecutor:
    """Runs a handler for one attempt, on the handler's own loop."""

    def __init__(
        self,
        *,
        attempt: AttemptInput,
        run_id: str,
        worker: WorkerContext,
        roles: RoleContext,
        on_batch: Callable[[], None] = lambda: None,
        may_repeat: bool = False,
    ) -> None:
        """Prepare the attempt. `on_batch` is called when the attempt, or an earlier one, has stored its first batch.

        With `may_repeat`, Temporal may run the attempt again from the start, as it does for a local activity.
        """
        self._attempt = attempt
        self._roles = roles
        self._handler = roles.handlers[attempt.role]
        self._threads = roles.threads
        self._tasks = worker.tasks
        self._artifacts = roles.artifacts
        self._worker_id = worker.worker_id
        self._storage = AttemptStorage(worker.tasks, roles.artifacts, attempt, run_id, worker.worker_id)
        self._ctx = RunContext(
            attempt=attempt,
            worker_id=worker.worker_id,
            artifacts=ArtifactsWriter(roles.artifacts, attempt, worker.worker_id, self._batch_stored),
            tasks=worker.tasks,
            run_id=run_id,
            clock=roles.clock,
        )
        self._values: dict[str, Any] = {}
        """The values of the expressions in the input, which errors hide."""
        self._batches = 0
        self._uids = None if self._handler.allow_duplicate_uids else DistinctUids(self._handler)
        self._on_batch = on_batch
        self._signaled = False
        self._ahead: Backpressure | None = None
        self._may_repeat = may_repeat
        self._wait = Wait()
        self._log: AttemptLog | None = None
        self._slot: asyncio.Task[Any] | None = None
        """Waits for a slot of the worker."""

    def waits_for(self) -> str | None:
        """Return what holds the attempt back, for people; None if nothing does. Any thread may call this."""
        if self._slot is not None:
            return f"a free slot of worker {self._worker_id}, which also runs attempts of other tasks"
        return self._ahead.waits_for if self._ahead is not None else None

    def cancel(self, reason: str, grace_sec: float) -> None:
        """Set the handler's cancel flag. An attempt that is waiting for its next batch ends at once."""
        self._ctx.cancel(reason, grace_sec)
        self._wait.end()
        if self._slot is not None:
            self._slot.cancel()

    async def run(self) -> AttemptResult:
        """Run the whole attempt, from its first write to its last. Return at once if an earlier try has finished it."""
        slots = None if self._may_repeat else self._roles.slots.get(self._attempt.role)
        if slots is None:
            return await self._run()
        if slots.locked():
            await self._await_slot(slots)
        else:
            await slots.acquire()
        try:
            return await self._run()
        finally:
            slots.release()

    async def _await_slot(self, slots: asyncio.Semaphore) -> None:
        """Wait for a slot, which an attempt from the other task queue of the role has. This is no time of the attempt."""
        self._slot = asyncio.create_task(slots.acquire())
        try:
            with clock_stopped():
                await self._slot
        except asyncio.CancelledError:
            if self._slot.done() and not self._slot.cancelled():
                slots.release()
            raise
        finally:
            self._slot = None

    async def _run(self) -> AttemptResult:
        role_lease = self._roles.leases.get(self._attempt.role)
        if role_lease is not None and time.time() >= role_lease.held_until:
            await role_lease.check()
        try:
            lease = await self._storage.begin()
        except TriedBefore as earlier:
            return await self._finish_earlier_try(earlier)
        self._attempt, self._values = await resolve(self._tasks, self._attempt)
        self._ctx.begun(self._storage.params, self._attempt)
        with self._log_attempt(lease) as self._log:
            await self._signal_earlier_batches()
            final = await self._run_handler()
            await self._storage.end(final.metrics, final.artifacts_ref, final.vars)
        return AttemptResult(worker_id=self._worker_id, batches=self._batches, version=self._attempt.version)

    def _log_attempt(self, lease: dict[str, Any]) -> AbstractContextManager[AttemptLog | None]:
        events = self._roles.events
        return events.attempt(self._attempt, lease, self._ctx.cancelled) if events else nullcontext()

    async def _finish_earlier_try(self, earlier: TriedBefore) -> AttemptResult:
        """Return the result of an earlier try. Raise a loss if it did not finish.

        An ordinary attempt runs once. If its epoch is taken, an engine that was suspended has taken it for an inline one.
        """
        if not self._may_repeat:
            raise EpochTaken(self._attempt.epoch)
        batches = await complete_end(self._artifacts, self._attempt) if earlier.finished else None
        if batches is None:
            raise AttemptFailed(lost(reason_codes.LEASE_LOST, str(earlier)))
        return AttemptResult(worker_id=self._worker_id, batches=batches, version=self._attempt.version)

    async def _signal_earlier_batches(self) -> None:
        """Report the batches of an earlier attempt, which failed before its signal. This one may store no more."""
        attempt, artifacts = self._attempt, self._artifacts
        if attempt.signal_first_batch and attempt.epoch > 1:
            stored = await retry_while_unavailable(
                lambda: artifacts.has_batches(attempt.task_id, attempt.node_id, attempt.first_epoch)
            )
            if stored:
                self._signal()

    def _signal(self) -> None:
        """Report the first stored batch, once."""
        if not self._signaled:
            self._signaled = True
            self._on_batch()

    def _batch_stored(self, uid: str) -> None:
        """Report and count a batch that the attempt has stored, as a result or with `ctx.artifacts.upsert_partial`."""
        self._signal()
        if self._ahead is not None:
            self._ahead.stored(uid)

    async def _run_handler(self) -> FinalizeResult:
        """Run the handler, and return its result. Raise its error as AttemptFailed."""
        try:
            return await self._call_hooks()
        except AttemptFailed as error:
            raise AttemptFailed(without_values(error.failure, self._values)) from error.__cause__
        except FlowKitError:
            raise
        except asyncio.CancelledError:
            self._refuse_stray_cancel()
            raise
        except Exception as error:
            raise AttemptFailed(without_values(self._classify(error), self._values)) from error
        finally:
            await self._ctx.release()

    def _refuse_stray_cancel(self) -> None:
        """Raise AttemptFailed if the handler raised CancelledError without a cancel. The failure can be retried."""
        task = asyncio.current_task()
        if not self._ctx.cancelled() and task is not None and not task.cancelling():
            text = "the handler raised CancelledError although FlowKit did not cancel it"
            raise AttemptFailed(failure(reason_codes.CANCELLED_BY_WORKER, text, permanent=False)) from None

    async def _call_hooks(self) -> FinalizeResult:
        attempt, handler, threads, ctx = self._attempt, self._handler, self._threads, self._ctx
        await threads.call(handler.init, self._describe_run(), **context_for(handler.init, ctx))
        loaded = await threads.call(
            handler.load_input, ctx.input_ref, ctx.input_inline, **context_for(handler.load_input, ctx)
        )
        with self._backpressure() as self._ahead:
            source = Input(
                attempt=attempt,
                handler=handler,
                ctx=ctx,
                threads=threads,
                artifacts=self._artifacts,
                tasks=self._tasks,
                settings=self._roles.inputs,
                ahead=self._ahead,
                wait=self._wait,
            )
            async with aclosing(source.batches(loaded)) as batches:
                while await self._process_next(batches):
                    pass
        return _check_final(await threads.call(handler.finalize, ctx))

    def _backpressure(self) -> AbstractContextManager[Backpressure | None]:
        attempt = self._attempt
        is_limited = attempt.max_ahead and attempt.followers
        return backpressure(attempt, self._artifacts, self._tasks) if is_limited else nullcontext()

    async def _process_next(self, batches: AsyncGenerator[Batch, None]) -> bool:
        """Process the next batch. Return False if there is none.

        Do not keep the batch afterwards, because the input's byte budget no longer counts it.
        """
        await self._ctx.raise_if_cancelled()
        batch = await anext(batches, None)
        await self._ctx.raise_if_cancelled()
        if batch is None:
            return False
        await self._process(batch)
        return True

    def _describe_run(self) -> dict[str, Any]:
        return {
            "task_id": self._attempt.task_id,
            "node_id": self._attempt.node_id,
            "attempt_epoch": self._attempt.epoch,
            "worker_id": self._worker_id,
            "role": self._attempt.role,
        }

    async def _process(self, batch: Batch) -> None:
        uid = batch.batch_uid or _hash_payload(batch)
        if self._uids is not None:
            self._uids.add(uid, batch)
        try:
            result = check_result(await self._call_handler(batch))
        except UNSTORABLE as error:
            raise await self._store_failed_batch(uid, from_error(error)) from None
        except (FlowKitError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise await self._store_failed_batch(uid, self._classify(error)) from error
        if not result.success:
            code = result.reason_code or reason_codes.ERROR
            reported = failure(code, result.error or "", permanent=result.permanent)
            raise await self._store_failed_batch(uid, reported)
        await self._store(uid, result)
        self._batches += 1
        self._batch_stored(uid)
        if self._log is not None:
            self._log.batch_ok(uid)

    async def _call_handler(self, batch: Batch) -> Any:
        hook, processes = self._handler.process_batch, self._roles.processes
        if processes is None or inspect.iscoroutinefunction(hook):
            return await self._threads.call(hook, batch, self._ctx)
        return await processes.process(self._attempt.role, batch, self._ctx)

    async def _store(self, uid: str, result: BatchResult) -> None:
        try:
            await self._storage.store_batch(uid, result.metrics, result.artifacts_ref)
        except UNSTORABLE as error:
            raise await self._store_failed_batch(uid, from_error(error)) from None

    async def _store_failed_batch(self, uid: str, failure: AttemptFailure) -> AttemptFailed:
        failure = without_values(failure, self._values)
        await self._storage.store_failed_batch(uid, failure.code)
        if self._log is not None:
            self._log.batch_failed(uid, failure)
        return AttemptFailed(failure)

    def _classify(self, error: Exception) -> AttemptFailure:
        if isinstance(error, ProcessDied):
            return failure(reason_codes.WORKER_PROCESS_DIED, str(error), permanent=False)
        _logger.warning(
            "node %s of task %s failed", self._attempt.node_id, self._attempt.task_id, exc_info=error
        )
        try:
            code, permanent = self._handler.classify_error(error)
            return failure(code, error_text(error), permanent=permanent)
        except Exception:
            _logger.exception("classify_error of role %s raised an exception", self._attempt.role)
            return unexpected(error)


def _hash_payload(batch: Batch) -> str:
    """Return the uid for a batch that has none: a hash of its payload. Raise TypeError if JSON cannot hold it."""
    try:
        return stable_hash({"payload": batch.payload})
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"a batch without batch_uid needs a payload that is valid JSON: {error}") from None


def check_result(given: Any) -> BatchResult:
    """Return `given`, the result of `process_batch`. Raise TypeError if it is not a BatchResult."""
    if isinstance(given, BatchResult):
        return given
    raise TypeError(
        f"process_batch must return BatchResult(success=..., metrics={{...}}), not {type(given).__name__}"
    )


def _check_final(given: Any) -> FinalizeResult:
    """Return `given`, the result of `finalize`, or an empty result for None. Raise TypeError for anything else."""
    if given is None:
        return FinalizeResult()
    if isinstance(given, FinalizeResult):
        return given
    raise TypeError(
        f"finalize must return FinalizeResult(metrics={{...}}) or None, not {type(given).__name__}"
    )
