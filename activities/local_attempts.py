"""Runs an attempt as a local activity of an engine. It ends soon, so it sends no heartbeats and reads no cancel flags."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from flowkit import reason_codes, temporal_names
from flowkit.adapters.retry import retry_while_unavailable
from flowkit.adapters.tasks.epochs import Epochs
from flowkit.attempt.cancelling import pending, request_cancel
from flowkit.attempt.supervision import Attempt, AttemptFailed
from flowkit.errors import EpochTaken, Fenced
from flowkit.models import AttemptInput, AttemptResult

if TYPE_CHECKING:
    from flowkit.adapters.tasks.cancel_flags import CancelFlag
    from flowkit.attempt.supervision import AttemptExecutor, WorkerContext


_logger = logging.getLogger("flowkit.worker")


def not_hosted(role: str) -> ApplicationError:
    """Return the error with which an engine refuses an inline attempt. An ordinary attempt follows."""
    return _not_local(f"this engine does not host role {role!r}")


def check_age(attempt: AttemptInput) -> None:
    """Raise ApplicationError if the attempt must not begin any more. An ordinary attempt follows."""
    late = time.time() - attempt.begin_by
    if attempt.begin_by and late > 0:
        raise _not_local(
            f"the inline attempt of node {attempt.node_id!r} begins {late:.1f} s too late: the engine is overloaded, "
            "was suspended, or its clock differs from that of the Temporal server"
        )


def _not_local(message: str) -> ApplicationError:
    """Return an expected error, for which Temporal's log shows no traceback."""
    return ApplicationError(
        message, type=reason_codes.NOT_LOCAL, non_retryable=True, category=ApplicationErrorCategory.BENIGN
    )


@activity.defn(name=temporal_names.INLINE_ATTEMPT)
async def refuse_inline(attempt: AttemptInput) -> AttemptResult:
    """Refuse an inline attempt, in an engine that hosts no roles."""
    raise not_hosted(attempt.role)


class InlineExecutor:
    """Runs an executor in an engine, which may be frozen so long that another engine continues the workflow."""

    def __init__(self, worker: WorkerContext, attempt: AttemptInput, executor: AttemptExecutor) -> None:
        self._attempt = attempt
        self._executor = executor
        self._epochs = Epochs(worker.tasks.database)

    def cancel(self, reason: str, grace_sec: float) -> None:
        """Request that the work stop."""
        self._executor.cancel(reason, grace_sec)

    async def run(self) -> AttemptResult:
        """Do the work. An attempt that another one has replaced ends at no charge, because both may be current."""
        try:
            return await self._executor.run()
        except Fenced as error:
            attempt = self._attempt
            current = await retry_while_unavailable(lambda: self._epochs.current(attempt))
            raise (EpochTaken(current) if current > attempt.epoch else error) from None


class LocalAttempt(Attempt):
    """Runs one executor within one local activity.

    Temporal's time limit of the local activity cancels the executor, as a shutdown of the engine does.
    """

    async def _supervise(self) -> None:
        """Do nothing: a local activity cannot send heartbeats, and it ends before its lease would be renewed."""

    async def _stopped_for(self, flag: CancelFlag) -> AttemptResult:
        """Report the flag, and yield: Temporal cannot cancel a local activity, but it cancels the next attempt."""
        refused = await request_cancel(self._attempt, flag)
        raise AttemptFailed(refused or pending(flag))

    def _interruption_error(self) -> BaseException:
        """Return the error that ends the attempt. After the time limit, Temporal no longer waits for it."""
        details = activity.cancellation_details()
        if details is not None and (details.cancel_requested or details.worker_shutdown):
            return super()._interruption_error()
        node_id, role = self._attempt.node_id, self._attempt.role
        _logger.warning(
            "the inline attempt of node %s took too long; an ordinary attempt follows. If most attempts of role %s "
            "take a second or more, its handler should not be inline",
            node_id,
            role,
        )
        return _not_local(f"the inline attempt of node {node_id!r} took too long")
