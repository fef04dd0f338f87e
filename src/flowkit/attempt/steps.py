"""The writes of every attempt: it takes its epoch at the start and marks its node as complete at the end."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from flowkit.adapters.retry import retry_while_unavailable
from flowkit.errors import WrongDeployment
from flowkit.text import clean

if TYPE_CHECKING:
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.models import AttemptInput


def check_database(attempt: AttemptInput, ours: str, process: str) -> None:
    """Raise WrongDeployment if the engine uses another database than this `process`, whose database has the id `ours`."""
    if attempt.deployment and attempt.deployment != ours:
        raise WrongDeployment(
            f"the engine uses the database with id {attempt.deployment}, this {process} the one with id {ours}: "
            "configure the same MongoDB database for both"
        )


async def begin(
    tasks: TaskStore,
    artifacts: ArtifactStore,
    attempt: AttemptInput,
    run_id: str,
    worker_id: str,
    *,
    once: bool = False,
) -> dict[str, Any]:
    """Take the attempt's epoch, remove the complete marker of an earlier attempt, and return the new lease.

    With `once`, raise TriedBefore if an earlier try of the same attempt has taken the epoch.
    """
    now = time.time()
    lease = new_lease(worker_id, now + attempt.lease_ttl_sec)
    await retry_while_unavailable(lambda: tasks.begin_attempt(attempt, run_id, lease, now, once=once))
    if attempt.epoch > 1:
        await retry_while_unavailable(lambda: artifacts.drop_marker(attempt))
    return lease


def new_lease(worker_id: str, until: float) -> dict[str, Any]:
    """Return a new lease as stored in documents. `until` is its deadline in seconds since the Unix epoch."""
    return {"worker_id": clean(worker_id), "lease_id": str(uuid.uuid4()), "deadline_ts_ms": int(until * 1000)}


async def mark(
    artifacts: ArtifactStore,
    attempt: AttemptInput,
    meta: dict[str, Any],
    worker_id: str,
    artifacts_ref: dict[str, Any] | None = None,
    *,
    exists: bool = False,
) -> None:
    """Write the complete marker of the attempt's node, which probably `exists`. Wait while MongoDB is unavailable."""
    now = time.time()
    await retry_while_unavailable(
        lambda: artifacts.mark_complete(
            attempt.task_id,
            attempt.node_id,
            attempt.epoch,
            meta,
            now,
            worker_id=worker_id,
            artifacts_ref=artifacts_ref,
            exists=exists,
        )
    )


async def complete_end(artifacts: ArtifactStore, attempt: AttemptInput) -> int | None:
    """Complete the last writes of an earlier try of an attempt, which has finished the node.

    The complete marker contains the final metrics. Return the number of batches that the node has stored; None if the
    earlier try has not written its marker, so that another attempt must run.
    """
    metrics = await retry_while_unavailable(lambda: artifacts.complete_meta(attempt))
    if metrics is None:
        return None
    if metrics:
        now = time.time()
        await retry_while_unavailable(lambda: artifacts.store_final(attempt, metrics, now))
    stored = await retry_while_unavailable(lambda: artifacts.batch_uids(attempt.task_id, attempt.node_id))
    return len(stored)
