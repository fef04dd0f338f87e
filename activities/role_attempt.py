"""Runs a RoleHandler for one attempt of a node (spec: worker side). RoleHandler documents the order of the calls."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from contextlib import AsyncExitStack, aclosing, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from temporalio import activity

from flowkit import reason_codes
from flowkit.activities.batches.backpressure import backpressure
from flowkit.activities.batches.inputs import DistinctUids, Input, InputSettings, Wait
from flowkit.activities.calls import context_for
from flowkit.activities.context import ArtifactsWriter, RunContext
from flowkit.activities.handlers import PERMANENT_ERRORS, RoleHandler
from flowkit.activities.process_pool import ProcessDied
from flowkit.activities.results import BatchFailure, BatchResult, FinalizeResult
from flowkit.activities.typed import final_metrics
from flowkit.adapters.artifacts import check_uid
from flowkit.adapters.batch_tries import LostTries
from flowkit.adapters.claims import first_fence
from flowkit.adapters.entries import Entry
from flowkit.adapters.metrics import UNSTORABLE
from flowkit.adapters.outages import clock_stopped, retry_while_unavailable
from flowkit.adapters.shards import FAILED, FINISHED
from flowkit.adapters.tasks.attempts import TriedBefore
from flowkit.attempt.failures import describe_raised, failure, from_error, lost, unexpected, without_secrets
from flowkit.attempt.signals import AttemptSignal, first_batch_of, shard_started
from flowkit.attempt.storage import AttemptStorage, complete_end, resolve
from flowkit.attempt.supervision import AttemptFailed, WorkerContext, expect_losses, refuse_local, run_attempt
from flowkit.core.instruments import ITEMS
from flowkit.core.time import SystemClock
from flowkit.core.user_code import contained, is_missing_variable, original
from flowkit.core.utils import stable_hash
from flowkit.errors import EpochTaken, Fenced, FlowKitError
from flowkit.masks import AttemptMask
from flowkit.models import AttemptFailure, AttemptInput, AttemptResult, FailureKind, temporal_names

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
    from contextlib import AbstractContextManager

    from temporalio.exceptions import ApplicationError

    from flowkit.activities.attempt_log import AttemptEventLog, AttemptLog
    from flowkit.activities.batches.backpressure import Backpressure
    from flowkit.activities.calls import Threads
    from flowkit.activities.handlers import Batch
    from flowkit.activities.process_pool import ProcessPool
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.attempt.role_lease import RoleLease
    from flowkit.core.time import Clock

_logger = logging.getLogger("flowkit.worker")

T = TypeVar("T")

FIRST_PAUSE_SEC = 1.0
"""How long the second try of a batch waits, if the node sets failed batches aside. Each further wait is
twice as long."""
_LONGEST_PAUSE_SEC = 30.0
_SHARE_AFTER = 20
"""Number of batches set aside from which on a share is judged before the end of the node."""

_LOST_TOGETHER = 2
"""After this number of tries that ended with the loss of their process, a batch runs with no other one beside it."""
_MOST_WAIT_ALONE_SEC = 600.0
"""How long such a batch waits for the others of its process. It then runs beside them, which proves nothing."""

SHARD_SEC = 600.0
"""How long an attempt of a shard claims batches before its next attempt continues."""


class BatchGate:
    """Lets the batches of a process run beside each other, or one of them alone. For use on one loop."""

    def __init__(self) -> None:
        self._running = 0
        self._changed = asyncio.Event()
        self.is_closed = False
        """Whether a batch runs alone, or waits for that, so that no other batch starts."""

    async def enter(self, *, alone: bool) -> bool:
        """Wait until a batch may run. Return whether it runs alone. `leave` must follow."""
        while self.is_closed:
            await self._changed.wait()
        if alone:
            alone = await self._close()
        self._running += 1
        return alone

    async def _close(self) -> bool:
        """Let no further batch start, and wait for those that run. Return False if they take too long."""
        self.is_closed, is_alone = True, False
        try:
            async with asyncio.timeout(_MOST_WAIT_ALONE_SEC):
                while self._running:
                    await self._changed.wait()
            is_alone = True
        except TimeoutError:
            pass
        finally:
            self.is_closed = is_alone
            self._notify()
        return is_alone

    def leave(self, *, alone: bool) -> None:
        """Note that a batch has been processed, which `alone` has run."""
        self._running -= 1
        self.is_closed = self.is_closed and not alone
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(frozen=True, kw_only=True)
class RoleContext:
    """What all roles of one worker process share, in addition to the WorkerContext of its attempts."""

    artifacts: ArtifactStore
    handlers: Mapping[str, RoleHandler]
    threads: Threads
    inputs: InputSettings = field(default_factory=InputSettings)
    processes: ProcessPool | None = None
    clock: Clock = field(default_factory=SystemClock)
    events: AttemptEventLog | None = None
    leases: Mapping[str, RoleLease] = field(default_factory=dict)
    """The lease of each role whose task queue the process polls."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """The version of the handler of each role."""
    gate: BatchGate = field(default_factory=BatchGate)
    """Through which all batches pass that the process works on."""
    slots: Mapping[str, asyncio.Semaphore] = field(default_factory=dict)
    """The slots of each role, which the attempts of its two task queues share: one is for pinned versions."""


class RoleActivities:
    """The activities of a worker's roles."""

    def __init__(self, *, worker: WorkerContext, roles: RoleContext) -> None:
        self._worker = worker
        self._roles = roles

    def activity_for(self, role: str) -> Callable[..., Awaitable[AttemptResult]]:
        """Return the activity that runs attempts of `role`."""
        expect_losses(role)

        @activity.defn(name=role)
        async def run_role(attempt: AttemptInput) -> AttemptResult:
            if not (attempt.signal_first_batch or attempt.shard):
                return await self._run(attempt)
            async with AsyncExitStack() as signals:
                options: dict[str, Any] = {}
                run_id = activity.info().workflow_run_id or ""
                if attempt.signal_first_batch:
                    first = await signals.enter_async_context(
                        AttemptSignal(attempt, first_batch_of(attempt, run_id))
                    )
                    options["on_batch"] = first.send
                if attempt.shard:
                    begun = await signals.enter_async_context(AttemptSignal(attempt, shard_started(attempt)))
                    options["on_begin"] = begun.send
                return await self._run(attempt, **options)

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


class BatchFailed(Exception):
    """A batch has failed. `failure` says why."""

    def __init__(self, failure: AttemptFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class RoleExecutor:
    """Runs a handler for one attempt, on the handler's own loop."""

    _input_kind: Callable[..., Input] = Input

    def __init__(
        self,
        *,
        attempt: AttemptInput,
        run_id: str,
        worker: WorkerContext,
        roles: RoleContext,
        on_batch: Callable[[], None] = lambda: None,
        on_begin: Callable[[], None] = lambda: None,
        may_repeat: bool = False,
    ) -> None:
        """Prepare the attempt. `on_batch` is called when the attempt, or an earlier one, has stored its first batch.

        `on_begin` is called when the attempt has begun.

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
            artifacts=ArtifactsWriter(
                roles.artifacts, attempt, worker.worker_id, self._batch_stored, self._fence_of
            ),
            tasks=worker.tasks,
            run_id=run_id,
            clock=roles.clock,
        )
        self._mask = AttemptMask()
        """Hides secrets in errors."""
        self._batches = 0
        self._uids = None if self._handler.allow_duplicate_uids else DistinctUids(self._handler)
        self._on_batch = on_batch
        self._on_begin = on_begin
        self._input: Input | None = None
        self._signaled = False
        self._ahead: Backpressure | None = None
        self._may_repeat = may_repeat
        self._begun_at = time.monotonic()
        self._wait = Wait()
        self._log: AttemptLog | None = None
        self._slot: asyncio.Task[Any] | None = None
        """Waits for a slot of the worker."""
        self._lost: LostTries | None = None
        """The tries of batches that ended with their process; None before the first batch."""
        self._skipped: set[str] = set()
        """The batches of the node that a user has skipped."""
        self._at_gate = False
        """Whether a batch waits until it may run alone, or beside others."""

    def waits_for(self) -> str | None:
        """Return what holds the attempt back, for people; None if nothing does. Any thread may call this."""
        if self._slot is not None:
            return f"a free slot of worker {self._worker_id}, which also runs attempts of other tasks"
        if self._at_gate:
            return f"another batch of worker {self._worker_id}: one that was lost with its process runs alone"
        return self._ahead.waits_for if self._ahead is not None else None

    def cancel(self, reason: str, grace_sec: float) -> None:
        """Set the handler's cancel flag. An attempt that is waiting for its next batch ends at once."""
        self._ctx.cancel(reason, grace_sec)
        self._wait.end()
        if self._slot is not None:
            self._slot.cancel()

    def show_end(self, reason: str, grace_sec: float) -> None:
        """Set the handler's cancel flag. Coroutines are cancelled anyway."""
        self._ctx.show_end(reason, grace_sec)

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
        """Wait for a slot, which an attempt from the other task queue of the role has.

        This is no time of the attempt.
        """
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
        if role_lease is not None and not role_lease.is_held:
            await role_lease.check()
        try:
            lease = await self._storage.begin()
        except TriedBefore as earlier:
            return await self._finish_earlier_try(earlier)
        self._on_begin()
        self._attempt, self._mask = await resolve(self._tasks, self._attempt)
        self._ctx.begun(self._storage.take_params(), self._attempt, self._mask)
        with self._log_attempt(lease) as self._log:
            await self._signal_earlier_batches()
            if self._attempt.shard:
                return await self._run_shard()
            final = await self._run_handler(self._call_hooks)
            failed = await self._count_failed_batches()
            await self._storage.end(final.metrics, final.artifacts_ref, final.vars, failed_batches=failed)
        return self._make_result(failed_batches=failed or 0)

    async def _count_failed_batches(self) -> int | None:
        """Return how many batches the node has set aside; None if it sets none aside."""
        if self._attempt.quarantine is None:
            return None
        _, failed = await self._storage.count_batches()
        return failed

    def _make_result(self, *, more: bool = False, failed_batches: int = 0) -> AttemptResult:
        return AttemptResult(
            worker_id=self._worker_id,
            batches=self._batches,
            version=self._attempt.version,
            more=more,
            failed_batches=failed_batches,
        )

    async def _run_shard(self) -> AttemptResult:
        """Process batches until none is left, or until the shard hands over.

        A shard whose batches another one has taken over was taken for lost, and reports what a loss does.
        """
        try:
            more = await self._run_handler(self._call_hooks_of_shard)
            await self._storage.end_shard(FINISHED, self._batches)
        except Fenced as error:
            settled = await self._storage.count_settled()
            raise AttemptFailed(replace(from_error(error), settled=settled)) from None
        except AttemptFailed as error:
            if error.failure.kind is FailureKind.FAILURE:
                await self._storage.end_shard(FAILED, self._batches)
            raise
        return self._make_result(more=more)

    def _log_attempt(self, lease: dict[str, Any]) -> AbstractContextManager[AttemptLog | None]:
        events = self._roles.events
        return events.attempt(self._attempt, lease, self._was_requested) if events else nullcontext()

    def _was_requested(self) -> bool:
        """Return whether the attempt was asked to stop, and does not only end by force."""
        return self._ctx.cancel_requested

    async def _finish_earlier_try(self, earlier: TriedBefore) -> AttemptResult:
        """Return the result of an earlier try. Raise a loss if it did not finish.

        An ordinary attempt runs once. If its epoch is taken, an engine that was suspended has taken it for
        an inline one.
        """
        if not self._may_repeat:
            raise EpochTaken(self._attempt.epoch)
        batches = await complete_end(self._artifacts, self._attempt) if earlier.finished else None
        if batches is None:
            settled = await self._storage.count_settled()
            raise AttemptFailed(lost(reason_codes.LEASE_LOST, str(earlier), settled=settled))
        self._batches = batches
        return self._make_result(failed_batches=await self._count_failed_batches() or 0)

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

    async def _run_handler(self, hooks: Callable[[], Awaitable[T]]) -> T:
        """Call hooks of the handler, and return their result. Raise its error as AttemptFailed."""
        try:
            return await hooks()
        except AttemptFailed as error:
            raise AttemptFailed(without_secrets(error.failure, self._mask)) from error.__cause__
        except FlowKitError:
            raise
        except asyncio.CancelledError:
            self._refuse_stray_cancel()
            raise
        except Exception as error:
            raise AttemptFailed(without_secrets(self._classify(error), self._mask)) from error
        finally:
            await self._ctx.release()
            if self._lost is not None:
                await self._storage.end_tries()

    def _refuse_stray_cancel(self) -> None:
        """Raise AttemptFailed if the handler raised CancelledError without a cancel. The failure can be retried."""
        task = asyncio.current_task()
        if not self._ctx.cancelled() and task is not None and not task.cancelling():
            text = "the handler raised CancelledError although FlowKit did not cancel it"
            raise AttemptFailed(failure(reason_codes.CANCELLED_BY_WORKER, text, permanent=False)) from None

    async def _call_hooks(self) -> FinalizeResult:
        await self._process_batches()
        await self._check_quarantine(is_last=True)
        return await self._call_finalize()

    async def _call_finalize(self) -> FinalizeResult:
        return _check_final(await self._threads.call(self._handler.finalize, self._ctx), self._handler)

    async def _call_hooks_of_shard(self) -> bool:
        """Process batches, and return whether some may be left."""
        await self._process_batches()
        await self._threads.call(self._handler.finalize_attempt, self._ctx)
        return self._input is not None and self._input.more

    async def _process_batches(self) -> None:
        attempt, handler, threads, ctx = self._attempt, self._handler, self._threads, self._ctx
        await threads.call(handler.init, self._describe_run(), **context_for(handler.init, ctx))
        loaded = await threads.call(
            handler.load_input, ctx.input_ref, ctx.input_inline, **context_for(handler.load_input, ctx)
        )
        with self._backpressure() as self._ahead:
            source = self._input = self._input_kind(
                attempt=attempt,
                handler=handler,
                ctx=ctx,
                threads=threads,
                artifacts=self._artifacts,
                tasks=self._tasks,
                settings=self._roles.inputs,
                ahead=self._ahead,
                wait=self._wait,
                hands_over=self._hands_over,
            )
            async with aclosing(source.batches(loaded)) as batches:
                while await self._process_next(batches):
                    pass

    def _hands_over(self) -> bool:
        """Return whether a shard has run for so long that it hands over to its next attempt.

        The task may then continue in a new run, or stop, without stopping a shard in the middle of a batch.
        """
        return time.monotonic() - self._begun_at >= SHARD_SEC

    def _backpressure(self) -> AbstractContextManager[Backpressure | None]:
        attempt = self._attempt
        is_limited = attempt.max_ahead and attempt.followers
        return backpressure(attempt, self._artifacts, self._tasks) if is_limited else nullcontext()

    async def _process_next(self, batches: AsyncGenerator[Batch, None]) -> bool:
        """Process the next batch. Return False if there is none.

        Do not keep the batch afterwards, because the input's byte budget no longer counts it.
        """
        self._raise_if_cancelled()
        batch = await anext(batches, None)
        self._raise_if_cancelled()
        if batch is None:
            return False
        await self._process(batch)
        return True

    def _raise_if_cancelled(self) -> None:
        if self._ctx.cancelled():
            raise asyncio.CancelledError(self._ctx.cancel_reason)

    def _describe_run(self) -> dict[str, Any]:
        return {
            "task_id": self._attempt.task_id,
            "node_id": self._attempt.node_id,
            "attempt_epoch": self._attempt.epoch,
            "worker_id": self._worker_id,
            "role": self._attempt.role,
        }

    async def _process(self, batch: Batch) -> None:
        uid = uid_of(batch)
        check_uid(uid)
        if self._uids is not None and not self._uids.add(uid):
            first = await self._find_stored(uid) if self._handler._flowkit_types is not None else None
            raise AttemptFailed(self._uids.describe(batch, first, self._ctx))
        lost = await self._find_lost_tries(uid)
        if uid in self._skipped:
            return
        if uid in lost.alone:
            await self._set_aside(uid, _describe_lost(lost.counts[uid]), lost.counts[uid])
            return
        if not await self._try_until_settled(uid, batch, alone=lost.counts[uid] >= _LOST_TOGETHER):
            return
        self._batches += 1
        ITEMS.add(self._attempt.role, amount=_count_items(batch))
        self._batch_stored(uid)
        if self._log is not None:
            self._log.batch_ok(uid)

    async def _find_stored(self, uid: str) -> Any:
        """Return the `meta` that the node has stored for a batch, or None."""
        attempt, artifacts = self._attempt, self._artifacts
        found = await retry_while_unavailable(
            lambda: artifacts.metas(attempt.task_id, attempt.node_id, [Entry(uid, None)], attempt.first_epoch)
        )
        return found[0].get("meta") if found else None

    async def _try_until_settled(self, uid: str, batch: Batch, *, alone: bool) -> bool:
        """Try a batch until its result is stored, or the node sets it aside. Return whether its result is stored."""
        quarantine, tries = self._attempt.quarantine, 0
        while True:
            tries += 1
            try:
                await self._try(uid, batch, alone=alone)
                return True
            except BatchFailed as failed:
                if quarantine is None:
                    raise await self._store_failed_batch(uid, failed.failure) from failed.__cause__
                if failed.failure.permanent or tries >= quarantine.attempts:
                    await self._set_aside(uid, failed.failure, tries)
                    return False
                await self._wait_before_try(uid, failed.failure, tries)

    async def _find_lost_tries(self, uid: str) -> LostTries:
        """Return the tries that ended with their process. Read them again for a batch that the shard has taken over."""
        if self._attempt.quarantine is None:
            return _NONE_LOST
        if self._lost is None:
            self._skipped = await self._storage.skipped_batches()
        if self._lost is None or self._fence_of(uid) > first_fence(self._attempt):
            self._lost = await self._storage.lost_tries()
        return self._lost

    async def _try(self, uid: str, batch: Batch, *, alone: bool) -> None:
        """Process a batch and store its result. Raise BatchFailed if it fails."""
        try:
            result = check_result(await self._pass_gate(uid, batch, alone=alone))
            if not result.success:
                code = result.reason_code or reason_codes.ERROR
                raise BatchFailed(failure(code, result.error or "", permanent=result.permanent))
            await self._storage.store_batch(uid, result.metrics, result.artifacts_ref, self._fence_of(uid))
        except UNSTORABLE as error:
            raise BatchFailed(from_error(error)) from None
        except (FlowKitError, BatchFailed, asyncio.CancelledError):
            raise
        except Exception as error:
            raise BatchFailed(self._classify(error)) from error

    async def _pass_gate(self, uid: str, batch: Batch, *, alone: bool) -> Any:
        """Process a batch when it may run: beside others, or alone. Return the result of the handler."""
        gate = self._roles.gate
        if alone or gate.is_closed:
            self._at_gate = True
            try:
                with self._wait.interruptible(), clock_stopped():
                    alone = await gate.enter(alone=alone)
            finally:
                self._at_gate = False
        else:
            await gate.enter(alone=False)
        try:
            if self._attempt.quarantine is not None:
                await self._storage.begin_try(uid, alone=alone)
            with self._ctx.processing(
                batch if batch.batch_uid else batch.model_copy(update={"batch_uid": uid})
            ):
                return await self._call_handler(batch)
        finally:
            gate.leave(alone=alone)

    async def _wait_before_try(self, uid: str, failure: AttemptFailure, tries: int) -> None:
        """Wait before the next try of a failed batch, longer each time. A cancel ends the wait."""
        shown = without_secrets(failure, self._mask)
        text = "batch %s of node %s failed in try %d of %d: %s: %s"
        most = self._attempt.quarantine.attempts if self._attempt.quarantine is not None else tries
        _logger.info(text, uid, self._attempt.node_id, tries, most, shown.code, shown.message)
        pause_sec = min(_LONGEST_PAUSE_SEC, FIRST_PAUSE_SEC * 2 ** (tries - 1))
        with self._wait.interruptible():
            await self._roles.clock.sleep_ms(pause_sec * 1000)
        await self._ctx.raise_if_cancelled()

    async def _set_aside(self, uid: str, failure: AttemptFailure, tries: int) -> None:
        """Store why a batch failed, and continue without it. Raise AttemptFailed if the node has set too many aside."""
        shown = without_secrets(failure, self._mask)
        quarantined = {"error": shown.message, "tries": tries}
        await self._storage.store_failed_batch(uid, shown.code, self._fence_of(uid), quarantined=quarantined)
        if self._log is not None:
            self._log.batch_failed(uid, shown)
        await self._check_quarantine()

    async def _check_quarantine(self, *, is_last: bool = False) -> None:
        """Raise AttemptFailed if the node has set more batches aside than it may.

        A share is judged when enough batches are known, and at the end.
        """
        quarantine = self._attempt.quarantine
        if quarantine is None:
            return
        stored, failed = await self._storage.count_batches()
        if quarantine.share is None:
            most, limit = quarantine.most or 0, f"{quarantine.most:,}"
        elif is_last or failed >= _SHARE_AFTER:
            most = int(quarantine.share * (stored + failed))
            limit = f"{quarantine.share * 100:g}% of {stored + failed:,}"
        else:
            return
        if failed > most:
            causes = await self._storage.why_set_aside()
            text = f"the node has set {failed:,} batches aside, and on_batch_failure.max is {limit}: {causes}"
            raise AttemptFailed(failure(reason_codes.TOO_MANY_FAILED_BATCHES, text, permanent=True))

    async def _call_handler(self, batch: Batch) -> Any:
        hook, processes = self._handler.process_batch, self._roles.processes
        if processes is None or inspect.iscoroutinefunction(hook):
            return await self._threads.call(hook, batch, self._ctx)
        return await processes.process(self._attempt.role, batch, self._ctx)

    async def _store_failed_batch(self, uid: str, failure: AttemptFailure) -> AttemptFailed:
        failure = without_secrets(failure, self._mask)
        await self._storage.store_failed_batch(uid, failure.code, self._fence_of(uid))
        if self._log is not None:
            self._log.batch_failed(uid, failure)
        return AttemptFailed(failure)

    def _fence_of(self, uid: str) -> int:
        return self._input.fence_of(uid) if self._input is not None and self._attempt.shard else 0

    def _classify(self, error: Exception) -> AttemptFailure:
        if isinstance(error, ProcessDied):
            return failure(reason_codes.WORKER_PROCESS_DIED, str(error), permanent=False)
        attempt, raised = self._attempt, original(error)
        if isinstance(raised, BatchFailure):
            return failure(raised.reason_code, str(raised), permanent=raised.permanent)
        _logger.warning("node %s of task %s failed", attempt.node_id, attempt.task_id, exc_info=raised)
        try:
            with contained:
                code, permanent = self._handler.classify_error(raised)
            advice = _explain_permanent(self._handler, raised) if permanent else ""
            return failure(code, describe_raised(error, advice=advice), permanent=permanent)
        except Exception:
            _logger.exception("classify_error of role %s raised an exception", self._attempt.role)
            return unexpected(error)


def _explain_permanent(handler: RoleHandler, error: BaseException) -> str:
    """Return why an error is not retried that the default `classify_error` calls permanent; empty for any other."""
    if type(handler).classify_error is not RoleHandler.classify_error:
        return ""
    kind = next(kind.__name__ for kind in PERMANENT_ERRORS if isinstance(error, kind))
    why = f"not retried, because classify_error takes every {kind} for bad input"
    missing = is_missing_variable(error)
    return f"set this environment variable for the worker; {why}" if missing else why


_NONE_LOST = LostTries()


def _describe_lost(count: int) -> AttemptFailure:
    text = f"the process that ran it was lost {count} times, the last time while it ran no other batch"
    return failure(reason_codes.WORKER_PROCESS_DIED, text, permanent=True)


def _count_items(batch: Batch) -> int:
    """Return how many items a batch has: those of its list of items, or itself."""
    items = batch.payload.get("items")
    return len(items) if isinstance(items, list) else 1


def uid_of(batch: Batch) -> str:
    """Return the uid of a batch. For one that has none, it is a hash of the payload.

    Raise TypeError if JSON cannot hold this payload.
    """
    if batch.batch_uid:
        return batch.batch_uid
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


def _check_final(given: Any, handler: RoleHandler) -> FinalizeResult:
    """Return `given`, the result of `finalize`, or an empty result for None. Raise TypeError for anything else.

    That of a typed handler may also be a model, a dataclass or a dict.
    """
    if given is None:
        return FinalizeResult()
    if isinstance(given, FinalizeResult):
        return given
    is_typed = handler._flowkit_types is not None
    metrics = final_metrics(given) if is_typed else None
    if metrics is not None:
        return FinalizeResult(metrics=metrics).model_copy(update={"metrics": metrics})
    records = "a model, a dataclass, a dict, " if is_typed else ""
    raise TypeError(
        f"finalize must return {records}FinalizeResult(metrics={{...}}) or None, not {type(given).__name__}"
    )
