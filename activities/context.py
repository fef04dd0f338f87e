"""RunContext, a handler's view of its run (spec: RunContext): identity, cancellation, scratch space, artifacts."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, TypeVar

from flowkit.activities.resources import Resources, Subprocess
from flowkit.adapters.retry import retry_while_unavailable
from flowkit.errors import StoreUnavailable
from flowkit.text import shown
from flowkit.validation.values import is_unicode

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Awaitable, Callable

    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.tasks.task_store import TaskStore
    from flowkit.models import AttemptInput

T = TypeVar("T")


class ArtifactsWriter:
    """Writes and reads the artifacts of the running node, for handlers that manage artifacts themselves.

    All methods wait while MongoDB is unavailable.
    """

    def __init__(
        self,
        store: ArtifactStore,
        attempt: AttemptInput,
        worker_id: str,
        on_batch: Callable[[str], None] = lambda uid: None,
    ) -> None:
        """Prepare the writer. `on_batch` is called with the uid of each batch that `upsert_partial` has stored."""
        self._store = store
        self._attempt = attempt
        self._worker_id = worker_id
        self._on_batch = on_batch

    async def upsert_partial(self, batch_uid: str, meta: dict[str, Any]) -> dict[str, Any]:
        """Store `meta` as the artifact of a batch and return a reference to it. Raise ValueError for an invalid uid.

        For nodes that stream from this one, it is a batch like any other: the first one lets them start.
        """
        if not isinstance(batch_uid, str) or not batch_uid or not is_unicode(batch_uid):
            raise ValueError(f"batch_uid must be a non-empty string, not {shown(batch_uid)}")
        now = time.time()
        await retry_while_unavailable(
            lambda: self._store.upsert_partial(self._attempt, batch_uid, meta, self._worker_id, now)
        )
        self._on_batch(batch_uid)
        return {**self._ref(), "batch_uid": batch_uid}

    async def mark_complete(
        self, meta: dict[str, Any], artifacts_ref: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Write the node's complete marker and return a reference to it. FlowKit replaces it when the run ends.

        Until then, it does not end the nodes that pull from this one, because the handler may store more batches.
        """
        attempt, now = self._attempt, time.time()
        await retry_while_unavailable(
            lambda: self._store.mark_complete(
                attempt.task_id,
                attempt.node_id,
                attempt.epoch,
                meta,
                now,
                worker_id=self._worker_id,
                artifacts_ref=artifacts_ref,
                confirmed=False,
            )
        )
        return artifacts_ref or self._ref()

    async def partials(self) -> AsyncIterator[dict[str, Any]]:
        """Yield `batch_uid` and `meta` of each batch that this node has stored, in earlier attempts too."""
        task_id, node_id = self._attempt.task_id, self._attempt.node_id
        pages, yielded = self._store.pages(task_id, node_id), set[str]()

        async def next_page() -> list[dict[str, Any]] | None:
            nonlocal pages
            try:
                return await anext(pages, None)
            except StoreUnavailable:
                pages = self._store.pages(task_id, node_id, skip=yielded)
                raise

        while (page := await retry_while_unavailable(next_page)) is not None:
            yielded.update(partial["batch_uid"] for partial in page)
            for partial in page:
                yield partial

    def _ref(self) -> dict[str, Any]:
        return {"task_id": self._attempt.task_id, "node_id": self._attempt.node_id}


class RunContext:
    """One run of a handler: its identity, cancellation, scratch space, and resources to release at its end."""

    def __init__(
        self,
        *,
        attempt: AttemptInput,
        worker_id: str,
        artifacts: ArtifactsWriter,
        tasks: TaskStore,
        clock: Any = None,
    ) -> None:
        self.task_id = attempt.task_id
        self.node_id = attempt.node_id
        self.attempt_epoch = attempt.epoch
        self.worker_id = worker_id
        self.failed_nodes = list(attempt.failed_nodes)
        """The nodes whose failure started this node: `node_id`, `attempt_epoch`, `reason_code`, `error` of each."""
        self.artifacts = artifacts
        self.clock = clock
        """The worker's clock: `now_dt()`, `now_ms()`, `mono_ms()`, `sleep_ms(ms)`."""
        self._tasks = tasks
        self._resources = Resources()
        self.kv: dict[str, Any] = {}
        """Scratch space of this run; every attempt starts with an empty one."""
        self.cancel_flag = asyncio.Event()
        """Set when the run is cancelled."""
        self.cancel_reason: str | None = None
        self.cancel_deadline_ts_ms: int | None = None
        """When FlowKit stops a cancelled run by force, in milliseconds since the Unix epoch."""

    def cancelled(self) -> bool:
        """Return whether the run is cancelled."""
        return self.cancel_flag.is_set()

    def remaining_ms(self) -> float | None:
        """Return the milliseconds until FlowKit stops the run by force, or None if the run is not cancelled."""
        if self.cancel_deadline_ts_ms is None:
            return None
        return max(0.0, self.cancel_deadline_ts_ms - time.time() * 1000)

    async def raise_if_cancelled(self) -> None:
        """Raise asyncio.CancelledError if the run is cancelled."""
        if self.cancelled():
            raise asyncio.CancelledError(self.cancel_reason)

    async def cancellable(self, work: Awaitable[T]) -> T:
        """Await `work` and return its result.

        As soon as the run is cancelled, cancel `work` and raise asyncio.CancelledError.
        """
        task = asyncio.ensure_future(work)
        flag = asyncio.create_task(self.cancel_flag.wait())
        try:
            await asyncio.wait([task, flag], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise asyncio.CancelledError(self.cancel_reason)
        finally:
            flag.cancel()
            task.cancel()

    def cancel(self, reason: str, grace_sec: float) -> None:
        """Request that the run stop. Later calls do not change the reason or the deadline."""
        if not self.cancel_flag.is_set():
            self.cancel_reason = reason
            self.cancel_deadline_ts_ms = int((time.time() + grace_sec) * 1000)
            self.cancel_flag.set()

    async def vars(self) -> dict[str, Any]:
        """Return the current variables of the task (`coordinator.vars`), or `{}` if it has none.

        Wait while MongoDB is unavailable.
        """
        return await retry_while_unavailable(lambda: self._tasks.variables(self.task_id))

    async def run_subprocess(self, *command: str, grace_ms: int = 5000) -> int:
        """Run a command in its own process group and return its return code.

        If the run is cancelled, FlowKit terminates the whole group, kills it after `grace_ms` milliseconds, and raises
        asyncio.CancelledError. FlowKit discards the output; if the command fails, the log shows its last part.
        """
        process = await Subprocess.start(*command)
        try:
            return await self.cancellable(process.wait())
        finally:
            await asyncio.shield(process.end(grace_ms / 1000))

    def register_subprocess(self, process: Any) -> None:
        """Kill `process` (from asyncio or subprocess) when the run ends, if it is still running."""
        self._resources.add_process(process)

    def register_temp_path(self, path: str | os.PathLike[str]) -> None:
        """Remove a file or directory when the run ends."""
        self._resources.add_path(path)

    def on_cleanup(self, callback: Callable[[], Any]) -> None:
        """Call `callback`, a plain or coroutine function, when the run ends. The last one registered runs first."""
        self._resources.add(callback)

    async def release(self) -> None:
        """Release everything that the run registered; FlowKit calls this however the run ends."""
        await self._resources.release()
