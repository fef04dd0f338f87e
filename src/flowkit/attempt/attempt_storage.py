"""What one attempt writes: its begin, the results of its batches, and its end.

An attempt in an engine may begin late: if its handler never waits, begin and end are a single write. Until then, another
try of the attempt may hold its epoch. This is safe for three reasons:

* The first write to the task document decides which try holds the epoch. The write's own filter is its fence.
* The rows of an attempt that has not begun name its try, and replace no row of another try with the same epoch.
* The try that holds the epoch replaces the rows of all other tries.

As soon as the handler waits, the attempt begins in the background, so that its node is shown as running.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flowkit.adapters.concurrent_writes import together
from flowkit.adapters.metrics import storable
from flowkit.adapters.retry import retry_while_unavailable
from flowkit.attempt.steps import mark, new_lease, take_epoch
from flowkit.errors import Fenced

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.tasks.task_store import TaskStore
    from flowkit.models import AttemptInput

LATEST_BEGIN_SEC = 0.2
"""An attempt that is older than this begins before it stores a batch."""


class AttemptStorage:
    """Stores one attempt. Use it on one event loop, within the task that runs the attempt."""

    def __init__(
        self,
        tasks: TaskStore,
        artifacts: ArtifactStore,
        attempt: AttemptInput,
        run_id: str,
        worker_id: str,
        *,
        on_begun: Callable[[], None],
    ) -> None:
        """Prepare the attempt. `on_begun` is called when its epoch is taken."""
        self._tasks = tasks
        self._artifacts = artifacts
        self._attempt = attempt
        self._run_id = run_id
        self._worker_id = worker_id
        self._on_begun = on_begun
        self._created_at = time.time()
        self.lease = new_lease(worker_id, self._created_at + attempt.lease_ttl_sec)
        self._begun = False
        self._beginning: asyncio.Task[None] | None = None
        self._runner: asyncio.Task[Any] | None = None
        """The task to cancel if the attempt must not begin."""

    @cached_property
    def _unbegun_artifacts(self) -> ArtifactStore:
        return self._artifacts.of_try(self._run_id, self.lease["lease_id"])

    # --- begin ----------------------------------------------------------------------------------------------------

    async def start(self, *, late: bool) -> None:
        """Begin, unless the attempt may begin `late`. Raise as `TaskStore.begin_attempt` with `once`."""
        self._runner = asyncio.current_task()
        if not late:
            await self._begin()

    async def begin(self) -> None:
        """Begin, if the attempt has not begun. Each call raises the error that prevents it."""
        if not self._begun:
            self._begin_in_background()
            assert self._beginning is not None
            self._runner = None  # the caller receives the error
            await asyncio.shield(self._beginning)

    @contextmanager
    def begun_while_waiting(self) -> Iterator[None]:
        """Begin in the background if the block waits. If the attempt must not begin, cancel the task that runs it."""
        if self._begun:
            yield
            return
        handle = asyncio.get_running_loop().call_soon(self._begin_in_background)
        try:
            yield
        finally:
            handle.cancel()

    def _begin_in_background(self) -> None:
        if not self._begun and self._beginning is None:
            self._beginning = asyncio.create_task(self._begin())
            self._beginning.add_done_callback(self._stop_if_refused)

    def _stop_if_refused(self, beginning: asyncio.Task[None]) -> None:
        refused = not beginning.cancelled() and beginning.exception() is not None
        if refused and self._runner is not None:
            self._runner.cancel()

    async def _begin(self) -> None:
        stores, attempt = (self._tasks, self._artifacts), self._attempt
        await take_epoch(*stores, attempt, self._run_id, self.lease, self._created_at, once=True)
        self._set_begun()

    def _set_begun(self) -> None:
        self._begun = True
        self._on_begun()

    def raise_refusal(self) -> None:
        """Raise the error that prevented a begin in the background, which has cancelled the current task."""
        beginning = self._beginning
        if beginning is not None and beginning.done() and not beginning.cancelled():
            error, task = beginning.exception(), asyncio.current_task()
            if error is not None and task is not None:
                task.uncancel()
                raise error

    def close(self) -> None:
        """Stop beginning. Call this when the attempt has ended."""
        self._runner = None
        if self._beginning is not None:
            self._beginning.cancel()

    # --- batches and end ------------------------------------------------------------------------------------------

    async def store_batch(
        self, uid: str, metrics: dict[str, Any], artifacts_ref: dict[str, Any] | None
    ) -> None:
        """Store the result of a batch. Raise BadMetrics or BatchTooLarge before the first write."""
        now, worker_id = time.time(), self._worker_id
        if now - self._created_at > LATEST_BEGIN_SEC:
            await self.begin()
        await self._write(
            lambda artifacts: retry_while_unavailable(
                lambda: artifacts.store_batch(
                    self._attempt, uid, metrics, worker_id, now, artifacts_ref=artifacts_ref
                )
            )
        )

    async def store_failed_batch(self, uid: str, reason: str) -> None:
        """Record that a batch failed."""
        await self.begin()
        now, artifacts = time.time(), self._artifacts
        await retry_while_unavailable(
            lambda: artifacts.store_failed_batch(self._attempt, uid, reason, now, worker_id=self._worker_id)
        )

    async def end(
        self, metrics: dict[str, Any], artifacts_ref: dict[str, Any] | None, *, finish_last: bool
    ) -> None:
        """Write the final metrics, the complete marker and the end of the attempt concurrently: each is independent.

        A later try of an attempt that may be repeated completes these writes from the marker (`complete_end`). If that
        would be ambiguous, make *finished* the last write.
        """
        final, _ = storable("metrics of finalize", metrics)
        ref, _ = storable("artifacts_ref of finalize", artifacts_ref or {})
        now, attempt = time.time(), self._attempt

        async def write(artifacts: ArtifactStore) -> None:
            rows = [mark(artifacts, attempt, final, self._worker_id, ref or artifacts_ref)]
            if final:
                rows.append(retry_while_unavailable(lambda: artifacts.store_final(attempt, final, now)))
            if finish_last:
                await together(*rows)
                rows = []
            await together(*rows, self._finish(now))

        if self._beginning is not None:
            await self.begin()
        await self._write(write)

    async def _finish(self, at: float) -> None:
        if self._begun:
            tasks, attempt, run_id = self._tasks, self._attempt, self._run_id
            return await retry_while_unavailable(lambda: tasks.finish_attempt(attempt, run_id, at))
        self._beginning = asyncio.create_task(self._begin_and_finish(at))
        await self.begin()

    async def _begin_and_finish(self, at: float) -> None:
        begin_and_finish = self._tasks.attempts.begin_and_finish
        attempt, run_id, began_at = self._attempt, self._run_id, self._created_at
        await retry_while_unavailable(lambda: begin_and_finish(attempt, run_id, self.lease, began_at, at))
        self._set_begun()

    async def _write(self, write: Callable[[ArtifactStore], Awaitable[None]]) -> None:
        """Call `write` with the store for the attempt's rows. If another try has written some, begin and repeat it."""
        if not self._begun:
            try:
                return await write(self._unbegun_artifacts)
            except Fenced:
                await self.begin()
        await write(self._artifacts)
