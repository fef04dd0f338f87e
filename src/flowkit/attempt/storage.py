"""What one attempt writes: its begin, the results of its batches, and its end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from flowkit.adapters.concurrent_writes import together
from flowkit.adapters.metrics import storable
from flowkit.adapters.retry import retry_while_unavailable
from flowkit.attempt.steps import begin, mark

if TYPE_CHECKING:
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.models import AttemptInput


class AttemptStorage:
    """Stores one attempt. Each write waits while MongoDB is unavailable."""

    def __init__(
        self,
        tasks: TaskStore,
        artifacts: ArtifactStore,
        attempt: AttemptInput,
        run_id: str,
        worker_id: str,
    ) -> None:
        self._tasks = tasks
        self._artifacts = artifacts
        self._attempt = attempt
        self._run_id = run_id
        self._worker_id = worker_id

    async def begin(self) -> dict[str, Any]:
        """Take the attempt's epoch and return its lease. Raise as `TaskStore.begin_attempt` with `once`."""
        return await begin(
            self._tasks, self._artifacts, self._attempt, self._run_id, self._worker_id, once=True
        )

    async def store_batch(
        self, uid: str, metrics: dict[str, Any], artifacts_ref: dict[str, Any] | None
    ) -> None:
        """Store the result of a batch. Raise BadMetrics or BatchTooLarge before the first write."""
        now, artifacts = time.time(), self._artifacts
        await retry_while_unavailable(
            lambda: artifacts.store_batch(
                self._attempt, uid, metrics, self._worker_id, now, artifacts_ref=artifacts_ref
            )
        )

    async def store_failed_batch(self, uid: str, reason: str) -> None:
        """Record that a batch failed."""
        now, artifacts = time.time(), self._artifacts
        await retry_while_unavailable(
            lambda: artifacts.store_failed_batch(self._attempt, uid, reason, now, worker_id=self._worker_id)
        )

    async def end(self, metrics: dict[str, Any], artifacts_ref: dict[str, Any] | None) -> None:
        """Write the final metrics, the complete marker and the end of the attempt concurrently: each is independent.

        A later try of an attempt that may be repeated completes these writes from the marker (`complete_end`).
        """
        final, _ = storable("metrics of finalize", metrics)
        ref, _ = storable("artifacts_ref of finalize", artifacts_ref or {})
        now, tasks, artifacts, attempt = time.time(), self._tasks, self._artifacts, self._attempt
        writes = [
            mark(artifacts, attempt, final, self._worker_id, ref or artifacts_ref),
            retry_while_unavailable(lambda: tasks.finish_attempt(attempt, self._run_id, now)),
        ]
        if final:
            writes.append(retry_while_unavailable(lambda: artifacts.store_final(attempt, final, now)))
        await together(*writes)
