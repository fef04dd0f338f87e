"""Runs an attempt as a local activity of an engine. It ends soon, so it sends no heartbeats and reads no cancel flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from temporalio import activity
from temporalio.exceptions import ApplicationError

from flowkit import reason_codes, temporal_names
from flowkit.activities.attempts import Attempt, AttemptFailed
from flowkit.attempt.cancelling import pending, request_cancel
from flowkit.models import AttemptInput, AttemptResult

if TYPE_CHECKING:
    from flowkit.adapters.tasks.cancel_flags import CancelFlag


def not_hosted(role: str) -> ApplicationError:
    """Return the error with which an engine refuses an inline attempt. An ordinary attempt follows."""
    return ApplicationError(
        f"this engine does not host role {role!r}", type=reason_codes.NOT_LOCAL, non_retryable=True
    )


@activity.defn(name=temporal_names.INLINE_ATTEMPT)
async def refuse_inline(attempt: AttemptInput) -> AttemptResult:
    """Refuse an inline attempt, in an engine that hosts no roles."""
    raise not_hosted(attempt.role)


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
