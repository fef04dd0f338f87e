"""Whether the sources of a pulling attempt have ended, and whether one of them runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowkit.adapters.retry import retry_while_unavailable
from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flowkit.adapters.tasks.task_store import TaskStore
    from flowkit.models import AttemptInput

_STATES_PAUSE_SEC = 2.0
_IDLE_SEC = 5.0
"""How long no source may run before a pulling attempt gives its slot away."""


class SourcesIdle(Exception):
    """Nothing is left to deliver and no source runs; the attempt had better begin again later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """That all sources had ended at one moment."""

    epochs: Mapping[str, int]
    """The epoch at which each of them had."""
    unfinished: frozenset[str]
    """Those that ended otherwise than by finishing, so that they may run again with the same epoch."""


class Sources:
    """The sources of one attempt, as their task's document and their complete markers show them."""

    def __init__(self, tasks: TaskStore, attempt: AttemptInput, names: Sequence[str]) -> None:
        self._tasks = tasks
        self._attempt = attempt
        self._names = names
        self._states: dict[str, tuple[NodeStatus, int]] = {}
        self._looked_at: float | None = None
        self._moved = False
        """Whether a source has begun anew since its state was read."""
        self._idle_since: float | None = None

    async def ended(self, markers: Mapping[str, int]) -> Ended | None:
        """That every source has ended, as far as it shows; None while one has not.

        States may be two seconds old: confirm with `have_stayed`, at or after the scan that finds nothing more.
        """
        if self._moved:
            await self._look()
        if (ended := self._all_ended(markers)) is None:
            await self._look()
            ended = self._all_ended(markers)
        return ended

    async def have_stayed(self, ended: Ended | None) -> bool:
        """Whether the sources are still where `ended` has them: none has begun anew since."""
        if ended is None:
            return False
        moved = await retry_while_unavailable(
            lambda: self._tasks.moved_on(self._attempt.task_id, ended.epochs, ended.unfinished)
        )
        self._moved |= moved
        return not moved

    def _all_ended(self, markers: Mapping[str, int]) -> Ended | None:
        epochs = {name: self._end_of(name, markers.get(name)) for name in self._names}
        known = {name: epoch for name, epoch in epochs.items() if epoch is not None}
        if len(known) < len(epochs):
            return None
        unfinished = frozenset(name for name in self._names if self._is_unfinished(name))
        return Ended(epochs=known, unfinished=unfinished)

    def _end_of(self, name: str, marker: int | None) -> int | None:
        """Epoch at which a source has ended; None when it has not, or when its marker is of an earlier attempt."""
        status, epoch = self._states.get(name, (None, self._attempt.sources.get(name)))
        if epoch is None and self._looked_at is not None:
            epoch = 0
        if self._is_unfinished(name):
            return epoch
        if marker is None or epoch is None or marker < epoch:
            return None
        never_begun = marker == 0 and status is not None and not status.ended
        return None if never_begun else marker

    def _is_unfinished(self, name: str) -> bool:
        status = self._states[name][0] if name in self._states else None
        return status is not None and status.ended and status is not NodeStatus.FINISHED

    async def _look(self) -> None:
        now = time.monotonic()
        if not self._moved and self._looked_at is not None and now - self._looked_at < _STATES_PAUSE_SEC:
            return
        self._looked_at, self._moved = now, False
        self._states = await retry_while_unavailable(lambda: self._tasks.node_states(self._attempt.task_id))
        going = {self._status(name) for name in self._names if not self._status(name).ended}
        idle = going and not going & {NodeStatus.RUNNING, NodeStatus.CANCELLING}
        self._idle_since = (self._idle_since or now) if idle else None

    def _status(self, name: str) -> NodeStatus:
        return self._states.get(name, (NodeStatus.QUEUED, 0))[0]

    def check_idle(self) -> None:
        """SourcesIdle when no source has run for a while."""
        if self._idle_since is not None and time.monotonic() - self._idle_since > _IDLE_SEC:
            raise SourcesIdle
