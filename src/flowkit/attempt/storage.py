"""What an attempt writes: its begin, the results of its batches, and its end. Each write waits for MongoDB."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowkit.adapters.metrics import storable
from flowkit.adapters.mongo import gather_writes
from flowkit.adapters.outages import retry_while_unavailable
from flowkit.adapters.tasks.attempts import FinalWrite, StoredParams, new_lease
from flowkit.adapters.tasks.store import is_same_database, show_database
from flowkit.adapters.vars.changes import final_increments
from flowkit.adapters.vars.store import Variables
from flowkit.core.handler_lines import mask_lines
from flowkit.core.log import bound_mask
from flowkit.errors import AdapterError, BadVars, WrongDeployment
from flowkit.graph.expressions import with_values
from flowkit.masks import AttemptMask
from flowkit.validation.json_keys import with_lists

if TYPE_CHECKING:
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.batch_tries import LostTries
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.adapters.vars.changes import VarsChange
    from flowkit.models import AttemptInput


def check_database(attempt: AttemptInput, ours: str, process: str) -> None:
    """Log and raise WrongDeployment if the engine uses another database than this `process`, whose
    deployment is `ours`.
    """
    if attempt.deployment in ("", ours) or is_same_database(attempt.deployment, ours):
        return
    problem = (
        f"the engine uses {show_database(attempt.deployment)}, this {process} {show_database(ours)}: "
        "set the same MONGO_URL and MONGO_DATABASE for both"
    )
    logging.getLogger(f"flowkit.{process}").error(
        "node %s of task %s fails: %s", attempt.node_id, attempt.task_id, problem
    )
    raise WrongDeployment(problem)


async def resolve(tasks: TaskStore, attempt: AttemptInput) -> tuple[AttemptInput, AttemptMask]:
    """Return the attempt with the stored values in place of the expressions in its input, and the mask of its errors.

    The lines of the running attempt hide the same: values of expressions that may be secrets, and what the input holds
    by keys such as `password`.
    """
    hidden: dict[str, Any] = {}
    shown: list[str] | None = []
    if attempt.by_expression:
        values, shown = await retry_while_unavailable(lambda: tasks.values.get(attempt))
        attempt = replace(attempt, io=with_values(attempt.io, values), by_expression=False)
        hidden = {text: value for text, value in values.items() if text not in (shown or ())}

    def given() -> Any:
        return attempt.io.input_inline, attempt.io.input_ref, attempt.io.fn_args

    mask_lines(hidden, given)
    mask = bound_mask() or AttemptMask()
    mask.hide(hidden, are_known=shown is not None)
    mask.read(given)
    return attempt, mask


async def begin(
    tasks: TaskStore,
    artifacts: ArtifactStore,
    attempt: AttemptInput,
    run_id: str,
    worker_id: str,
    *,
    once: bool = False,
    read: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Take the attempt's epoch, remove the complete marker of an earlier attempt, and return the new lease.

    The first attempt of a generation also deletes what late attempts of earlier ones have stored since the reset.

    With `once`, raise TriedBefore if an earlier try of the same attempt has taken the epoch. With `read`,
    add the params of the task to it, as `Attempts.begin` does.
    """
    now = time.time()
    lease = new_lease(worker_id, now + attempt.lease_ttl_sec, attempt.version)
    shown = {**lease}
    if attempt.shard:
        del shown[
            "deadline_ts_ms"
        ]  # The row of the shard has the lease; the entry of the node shows the latest shard.
    await retry_while_unavailable(
        lambda: tasks.attempts.begin(attempt, run_id, shown, now, once=once, read=read)
    )
    if attempt.epoch > 1:
        await retry_while_unavailable(lambda: artifacts.drop_marker(attempt))
    if attempt.first_epoch and attempt.epoch == attempt.first_epoch + 1:
        earlier = {attempt.node_id: attempt.first_epoch}
        await retry_while_unavailable(
            lambda: artifacts.delete_earlier_generations(attempt.task_id, earlier, now)
        )
    return lease


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
    given, now = with_lists(meta), time.time()
    await retry_while_unavailable(
        lambda: artifacts.mark_complete(
            attempt.task_id,
            attempt.node_id,
            attempt.epoch,
            given,
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
    stored = await retry_while_unavailable(
        lambda: artifacts.batch_uids(attempt.task_id, attempt.node_id, attempt.first_epoch)
    )
    return len(stored)


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
        self._read: dict[str, Any] = {}

    def take_params(self) -> StoredParams:
        """Return the params of the task, which the begin has read, and keep no reference to them."""
        found: StoredParams = self._read.pop("params", StoredParams())
        return found

    async def begin(self) -> dict[str, Any]:
        """Take the attempt's epoch, read the params and return the lease. Raise as `Attempts.begin` with `once`.

        Another attempt of the same run of the task, in this process, may have read the params.
        """
        ids, attempt, known = (self._run_id, self._worker_id), self._attempt, self._tasks.attempts.params
        if (params := known.get(attempt.task_id, self._run_id)) is not None:
            self._read["params"] = params
        read = None if params is not None else self._read
        lease = await begin(self._tasks, self._artifacts, attempt, *ids, once=True, read=read)
        if read:
            known.note(attempt.task_id, self._run_id, read["params"])
        await self._begin_shards(ids)
        return lease

    async def _begin_shards(self, ids: tuple[str, str]) -> None:
        """Insert the row of a shard. If the attempt closes a node, fence the shards off that have been lost."""
        attempt, artifacts, shards, now = self._attempt, self._artifacts, self._tasks.shards, time.time()
        if attempt.shard:
            await retry_while_unavailable(lambda: shards.begin(attempt, *ids, now))
        elif attempt.parallel > 1 and await retry_while_unavailable(lambda: shards.are_running(attempt)):
            await retry_while_unavailable(lambda: artifacts.seal(attempt))

    async def store_batch(
        self, uid: str, metrics: dict[str, Any], artifacts_ref: dict[str, Any] | None, fence: int = 0
    ) -> None:
        """Store the result of a batch. Raise BadMetrics or BatchTooLarge before the first write.

        `fence` is the fencing number of the batch in a shard.
        """
        now, artifacts, attempt, worker_id = time.time(), self._artifacts, self._attempt, self._worker_id
        meta, ref = with_lists(metrics), with_lists(artifacts_ref)
        await retry_while_unavailable(
            lambda: artifacts.store_batch(attempt, uid, meta, worker_id, now, artifacts_ref=ref, fence=fence)
        )

    async def store_failed_batch(
        self, uid: str, reason: str, fence: int = 0, *, quarantined: dict[str, Any] | None = None
    ) -> None:
        """Record that a batch failed. `quarantined` has its `error` and its `tries` if it is set aside."""
        now, artifacts, attempt, worker_id = time.time(), self._artifacts, self._attempt, self._worker_id
        await retry_while_unavailable(
            lambda: artifacts.store_failed_batch(
                attempt, uid, reason, now, worker_id=worker_id, fence=fence, quarantined=quarantined
            )
        )

    async def begin_try(self, uid: str, *, alone: bool) -> None:
        """Note that the attempt processes a batch now, so that a loss of the process shows which one it was."""
        now, tries, attempt = time.time(), self._tasks.tries, self._attempt
        await retry_while_unavailable(lambda: tries.begin(attempt, uid, self._worker_id, now, alone=alone))

    async def end_tries(self) -> None:
        """Note that the attempt processes no batch any more."""
        await retry_while_unavailable(lambda: self._tasks.tries.end(self._attempt))

    async def lost_tries(self) -> LostTries:
        """Return the tries of batches that ended with the loss of their process."""
        return await retry_while_unavailable(lambda: self._tasks.tries.lost(self._attempt))

    async def skipped_batches(self) -> set[str]:
        """Return the batches of the node that a user has skipped."""
        return await retry_while_unavailable(lambda: self._artifacts.skipped(self._attempt))

    async def count_batches(self) -> tuple[int, int]:
        """Return how many batches the node has stored, and how many it has set aside."""
        artifacts, attempt = self._artifacts, self._attempt
        return (
            await retry_while_unavailable(lambda: artifacts.count_stored(attempt)),
            await retry_while_unavailable(lambda: artifacts.count_quarantined(attempt)),
        )

    async def why_set_aside(self) -> str:
        """Return why the batches have failed that the node has set aside, in words."""
        artifacts, attempt = self._artifacts, self._attempt
        return await retry_while_unavailable(lambda: artifacts.why_quarantined(attempt))

    async def count_settled(self) -> int:
        """Return how many batches the generation of the node has stored or set aside."""
        return await retry_while_unavailable(lambda: self._artifacts.count_settled(self._attempt))

    async def end_shard(self, status: str, batches: int) -> None:
        """Note how the attempt of a shard has ended."""
        now, shards = time.time(), self._tasks.shards
        await retry_while_unavailable(lambda: shards.end(self._attempt, self._run_id, status, batches, now))

    async def end(
        self,
        metrics: dict[str, Any],
        artifacts_ref: dict[str, Any] | None,
        variables: Any = None,
        *,
        failed_batches: int | None = None,
    ) -> None:
        """Write the final metrics, the complete marker and the end of the attempt concurrently: each is independent.

        A later try of an attempt that may be repeated completes these writes from the marker (`complete_end`).

        Increments of `variables` are part of the write that ends the attempt, which then comes first, because they may
        conflict with the variables of the task. Raise BadVars if they are invalid or do, and write nothing.

        `failed_batches` is the number of batches that were set aside; None if the node sets none aside.
        """
        if failed_batches is not None:
            show, attempt = self._tasks.attempts.show_failed_batches, self._attempt
            await retry_while_unavailable(lambda: show(attempt, self._run_id, failed_batches))
        increments = _checked_increments(variables) if variables else None
        final, _ = storable("metrics of finalize", metrics)
        ref, _ = storable("artifacts_ref of finalize", artifacts_ref or {})
        now, tasks, artifacts, attempt = time.time(), self._tasks, self._artifacts, self._attempt
        if increments is not None:
            await self._finish_with(increments, now)
        writes = [mark(artifacts, attempt, final, self._worker_id, ref or artifacts_ref)]
        if increments is None:
            finish = tasks.attempts.finish
            writes.append(retry_while_unavailable(lambda: finish(attempt, self._run_id, now)))
        if final:
            writes.append(retry_while_unavailable(lambda: artifacts.store_final(attempt, final, now)))
        await gather_writes(*writes)

    async def _finish_with(self, increments: VarsChange, at: float) -> None:
        write = FinalWrite(attempt=self._attempt, run_id=self._run_id, at=at)
        variables, task_id = self._variables(), self._attempt.task_id
        try:
            await retry_while_unavailable(lambda: variables.write(task_id, increments, write))
        except AdapterError as error:
            raise _bad_vars(error) from None

    def _variables(self) -> Variables:
        return Variables(self._tasks)


def _checked_increments(variables: Any) -> VarsChange | None:
    try:
        return final_increments(variables)
    except AdapterError as error:
        raise _bad_vars(error) from None


def _bad_vars(error: AdapterError) -> BadVars:
    return BadVars(f"the result of finalize: {error}")
