"""Runs an attempt as a local activity of an engine. It ends soon, so it sends no heartbeats and reads no cancel flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowkit.activities.attempts import Attempt, AttemptFailed
from flowkit.attempt.cancelling import pending, request_cancel

if TYPE_CHECKING:
    from flowkit.adapters.tasks.cancel_flags import CancelFlag
    from flowkit.models import AttemptResult


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
