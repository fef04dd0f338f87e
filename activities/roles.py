"""Runs a RoleHandler as one attempt of a node (spec: worker side; call order and error codes as documented)."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

from temporalio import activity

from flowkit.activities.attempts import Attempt, AttemptFailed, Host
from flowkit.activities.context import ArtifactsWriter, RunContext
from flowkit.activities.failures import cut
from flowkit.activities.handlers import Batch
from flowkit.adapters.artifacts import BatchTooLarge
from flowkit.adapters.patience import durably
from flowkit.adapters.pull import Puller, stable_hash
from flowkit.errors import BadInput, FlowKitError
from flowkit.models import AttemptFailure, AttemptInput, AttemptResult, FailureKind
from flowkit.workflows.input_args import ADAPTERS, NOOP, PullArgs, parse_pull

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from flowkit.activities.handlers import BatchResult, RoleHandler
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.store import TaskStore

_logger = logging.getLogger("flowkit.worker")


class RoleActivities:
    """The activities of a worker's roles."""

    def __init__(self, *, host: Host, artifacts: ArtifactStore, handlers: Mapping[str, RoleHandler]) -> None:
        self._host = host
        self._artifacts = artifacts
        self._handlers = handlers

    def of(self, role: str) -> Callable[..., Awaitable[AttemptResult]]:
        """The activity that runs attempts of `role`."""

        @activity.defn(name=role)
        async def run_role(attempt: AttemptInput) -> AttemptResult:
            info = activity.info()
            body = RoleBody(
                attempt=attempt,
                run_id=info.workflow_run_id or "",
                handler=self._handlers[role],
                tasks=self._host.tasks,
                artifacts=self._artifacts,
                worker_id=self._host.worker_id,
            )
            return await Attempt(self._host, attempt, body).run()

        return run_role


class RoleBody:
    """One run of a handler, on the handler's own loop."""

    def __init__(
        self,
        *,
        attempt: AttemptInput,
        run_id: str,
        handler: RoleHandler,
        tasks: TaskStore,
        artifacts: ArtifactStore,
        worker_id: str,
    ) -> None:
        self._attempt = attempt
        self._run_id = run_id
        self._handler = handler
        self._tasks = tasks
        self._artifacts = artifacts
        self._worker_id = worker_id
        writer = ArtifactsWriter(artifacts, attempt, worker_id)
        self._ctx = RunContext(attempt=attempt, worker_id=worker_id, artifacts=writer)
        self._batches = 0

    def cancel(self, reason: str, grace_sec: float) -> None:
        """Raise the handler's cancel flag."""
        self._ctx.cancel(reason, grace_sec)

    async def run(self) -> AttemptResult:
        """The whole attempt, from its first write to its last."""
        await begin(self._tasks, self._artifacts, self._attempt, self._run_id, self._worker_id)
        try:
            await self._handle()
        except (FlowKitError, AttemptFailed):
            raise
        except asyncio.CancelledError:
            self._refuse_stray_cancel()
            raise
        except Exception as error:
            raise AttemptFailed(self._classified(error)) from error
        await durably(lambda: self._tasks.finish_attempt(self._attempt, self._run_id, time.time()))
        return AttemptResult(worker_id=self._worker_id, batches=self._batches)

    def _refuse_stray_cancel(self) -> None:
        """A handler that raises CancelledError of its own accord has failed, and may be retried."""
        task = asyncio.current_task()
        if not self._ctx.cancelled() and task is not None and not task.cancelling():
            text = "the handler raised CancelledError although nobody cancelled it"
            raise AttemptFailed(_failure("cancelled_by_worker", text, permanent=False)) from None

    async def _handle(self) -> None:
        attempt, handler = self._attempt, self._handler
        await handler.init(
            {
                "task_id": attempt.task_id,
                "node_id": attempt.node_id,
                "attempt_epoch": attempt.epoch,
                "worker_id": self._worker_id,
                "role": attempt.role,
            }
        )
        loaded = await handler.load_input(attempt.io.input_ref, attempt.io.input_inline)
        async for batch in self._input(loaded):
            await self._ctx.raise_if_cancelled()
            await self._process(batch)
        await self._ctx.raise_if_cancelled()
        await self._finalize()

    def _input(self, loaded: Any) -> AsyncIterator[Batch]:
        args = self._route(loaded)
        return self._handler.iter_batches(loaded) if args is None else self._pulled(args)

    def _route(self, loaded: Any) -> PullArgs | None:
        """The command's adapter, else a known one that the handler proposes, else none."""
        ordered = self._attempt.io.input_inline or {}
        if not ordered.get("input_adapter"):
            proposed = loaded if isinstance(loaded, dict) else {}
            ordered = proposed if proposed.get("input_adapter") in ADAPTERS else {}
        if not ordered or ordered["input_adapter"] == NOOP:
            return None
        try:
            return parse_pull(ordered)
        except BadInput as error:
            raise AttemptFailed(_failure(error.reason_code, str(error), permanent=True)) from None

    async def _pulled(self, args: PullArgs) -> AsyncIterator[Batch]:
        puller = Puller(artifacts=self._artifacts, tasks=self._tasks, attempt=self._attempt, args=args)
        async for uid, payload in puller.batches():
            yield Batch(batch_uid=uid, payload=payload)

    async def _process(self, batch: Batch) -> None:
        uid = batch.batch_uid or stable_hash({"payload": batch.payload})
        try:
            result = await self._handler.process_batch(batch, self._ctx)
        except (FlowKitError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise await self._failed_batch(uid, self._classified(error)) from error
        if not result.success:
            raise await self._failed_batch(uid, _unsuccessful(result))
        await self._store(uid, result.metrics)
        self._batches += 1

    async def _store(self, uid: str, metrics: dict[str, Any]) -> None:
        now = time.time()
        try:
            await durably(
                lambda: self._artifacts.store_batch(self._attempt, uid, metrics, self._worker_id, now)
            )
        except BatchTooLarge as error:
            failure = _failure("batch_too_large", str(error), permanent=True)
            raise await self._failed_batch(uid, failure) from None

    async def _failed_batch(self, uid: str, failure: AttemptFailure) -> AttemptFailed:
        await durably(
            lambda: self._artifacts.store_failed_batch(self._attempt, uid, failure.code, time.time())
        )
        return AttemptFailed(failure)

    async def _finalize(self) -> None:
        final = await self._handler.finalize(self._ctx)
        metrics = final.metrics if final else {}
        now = time.time()
        if metrics:
            await durably(lambda: self._artifacts.store_final(self._attempt, metrics, now))
        await mark(
            self._artifacts, self._attempt, metrics, self._worker_id, final.artifacts_ref if final else None
        )

    def _classified(self, error: Exception) -> AttemptFailure:
        _logger.warning(
            "node %s of task %s failed", self._attempt.node_id, self._attempt.task_id, exc_info=error
        )
        try:
            code, permanent = self._handler.classify_error(error)
        except Exception:
            _logger.exception("classify_error of role %s failed itself", self._attempt.role)
            code, permanent = "unexpected_error", False
        return _failure(code, f"{type(error).__name__}: {error}", permanent=permanent)


async def begin(
    tasks: TaskStore, artifacts: ArtifactStore, attempt: AttemptInput, run_id: str, worker_id: str
) -> None:
    """First writes of an attempt: it takes its epoch and removes the marker of an earlier one."""
    now = time.time()
    lease = {
        "worker_id": worker_id,
        "lease_id": str(uuid.uuid4()),
        "deadline_ts_ms": int((now + attempt.lease_ttl_sec) * 1000),
    }
    await durably(lambda: tasks.begin_attempt(attempt, run_id, lease, now))
    if attempt.epoch > 1:
        await durably(lambda: artifacts.drop_marker(attempt))


async def mark(
    artifacts: ArtifactStore,
    attempt: AttemptInput,
    meta: dict[str, Any],
    worker_id: str,
    artifacts_ref: dict[str, Any] | None = None,
) -> None:
    """Complete marker of an attempt."""
    now = time.time()
    await durably(
        lambda: artifacts.mark_complete(
            attempt.task_id,
            attempt.node_id,
            attempt.epoch,
            meta,
            now,
            worker_id=worker_id,
            artifacts_ref=artifacts_ref,
        )
    )


def _unsuccessful(result: BatchResult) -> AttemptFailure:
    code = result.reason_code or "error"
    return _failure(code, result.error or "", permanent=result.permanent)


def _failure(code: str, message: str, *, permanent: bool) -> AttemptFailure:
    return AttemptFailure(kind=FailureKind.FAILURE, code=code, message=cut(message), permanent=permanent)
