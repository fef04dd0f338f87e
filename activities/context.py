"""What a handler sees of its run (spec: RunContext): identity, cancellation, scratch space, artifacts."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, TypeVar

from flowkit.activities.resources import Resources, Subprocess
from flowkit.adapters.retry import retry_while_unavailable
from flowkit.arguments import is_unicode, shown
from flowkit.errors import StoreUnavailable

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Awaitable, Callable

    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.tasks.task_store import TaskStore
    from flowkit.models import AttemptInput

T = TypeVar("T")


class ArtifactsWriter:
    """Artifacts of the node that is running, for handlers that write or read them themselves.

    All methods wait while MongoDB does not answer.
    """

    def __init__(self, store: ArtifactStore, attempt: AttemptInput, worker_id: str) -> None:
        self._store = store
        self._attempt = attempt
        self._worker_id = worker_id

    async def upsert_partial(self, batch_uid: str, meta: dict[str, Any]) -> dict[str, Any]:
        """Store `meta` as the artifact of a batch; returns a reference to it. ValueError for what is no uid."""
        if not isinstance(batch_uid, str) or not batch_uid or not is_unicode(batch_uid):
            raise ValueError(f"batch_uid must not be empty and must be a text, not {shown(batch_uid)}")
        now = time.time()
        await retry_while_unavailable(
            lambda: self._store.upsert_partial(self._attempt, batch_uid, meta, self._worker_id, now)
        )
        return {**self._ref(), "batch_uid": batch_uid}

    async def mark_complete(
        self, meta: dict[str, Any], artifacts_ref: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Write the node's complete marker; answers a reference to it. The end of the run writes it anyway."""
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
            )
        )
        return artifacts_ref or self._ref()

    async def partials(self) -> AsyncIterator[dict[str, Any]]:
        """`batch_uid` and `meta` of this node's own stored batches, those of earlier attempts included."""
        task_id, node_id = self._attempt.task_id, self._attempt.node_id
        pages, given = self._store.pages(task_id, node_id), set[str]()

        async def next_page() -> list[dict[str, Any]] | None:
            nonlocal pages
            try:
                return await anext(pages, None)
            except StoreUnavailable:
                pages = self._store.pages(task_id, node_id, skip=given)
                raise

        while (page := await retry_while_unavailable(next_page)) is not None:
            given.update(partial["batch_uid"] for partial in page)
            for partial in page:
                yield partial

    def _ref(self) -> dict[str, Any]:
        return {"task_id": self._attempt.task_id, "node_id": self._attempt.node_id}


class RunContext:
    """One run of a handler: its identity, its cancellation, its scratch space, and what it has to give back."""

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
        self.artifacts = artifacts
        self.clock = clock
        """The worker's clock: `now_dt()`, `now_ms()`, `mono_ms()`, `sleep_ms(ms)`."""
        self._tasks = tasks
        self._resources = Resources()
        self.kv: dict[str, Any] = {}
        """Scratch space of this run; empty again in the next attempt."""
        self.cancel_flag = asyncio.Event()
        """Set when the run is to stop."""
        self.cancel_reason: str | None = None
        self.cancel_deadline_ts_ms: int | None = None
        """When the run is ended by force, in milliseconds since the epoch."""

    def cancelled(self) -> bool:
        """Whether the run is to stop."""
        return self.cancel_flag.is_set()

    def remaining_ms(self) -> float | None:
        """Milliseconds until the run is ended by force; None while nobody cancelled it."""
        if self.cancel_deadline_ts_ms is None:
            return None
        return max(0.0, self.cancel_deadline_ts_ms - time.time() * 1000)

    async def raise_if_cancelled(self) -> None:
        """Raise asyncio.CancelledError when the run is to stop."""
        if self.cancelled():
            raise asyncio.CancelledError(self.cancel_reason)

    async def cancellable(self, work: Awaitable[T]) -> T:
        """Wait for `work`; cancel it and raise asyncio.CancelledError as soon as the run is to stop."""
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
        """Ask the run to stop; the first reason is kept."""
        if not self.cancel_flag.is_set():
            self.cancel_reason = reason
            self.cancel_deadline_ts_ms = int((time.time() + grace_sec) * 1000)
            self.cancel_flag.set()

    async def vars(self) -> dict[str, Any]:
        """The task's variables (`coordinator.vars`) as they are now; `{}` while there are none.

        Waits while MongoDB does not answer.
        """
        return await retry_while_unavailable(lambda: self._tasks.variables(self.task_id))

    async def run_subprocess(self, *command: str, grace_ms: int = 5000) -> int:
        """Run a command in a process group of its own and answer its return code.

        When the run is to stop, the whole group is terminated, after `grace_ms` milliseconds killed, and
        asyncio.CancelledError raised. What it prints is not kept, but for the end of it in the log of a failure.
        """
        process = await Subprocess.start(*command)
        try:
            return await self.cancellable(process.wait())
        finally:
            await asyncio.shield(process.end(grace_ms / 1000))

    def register_subprocess(self, process: Any) -> None:
        """Kill `process` (of asyncio or subprocess) at the end of the run, if it still runs then."""
        self._resources.add_process(process)

    def register_temp_path(self, path: str | os.PathLike[str]) -> None:
        """Remove a file or folder at the end of the run."""
        self._resources.add_path(path)

    def on_cleanup(self, callback: Callable[[], Any]) -> None:
        """Call `callback`, plain or coroutine function, at the end of the run; the last registered comes first."""
        self._resources.add(callback)

    async def release(self) -> None:
        """Give back what the run has registered; called after every end of a run."""
        await self._resources.release()
