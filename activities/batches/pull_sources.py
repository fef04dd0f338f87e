"""Determines whether the sources of a pulling attempt have ended, and whether any of them is running."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowkit.adapters.retry import retry_while_unavailable
from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from flowkit.adapters.tasks.task_store import TaskStore
    from flowkit.models import AttemptInput

_STATES_PAUSE_SEC = 2.0
"""The shortest time between two reads of the states of the sources."""
_IDLE_SEC = 5.0
"""How long all sources may be idle before a pulling attempt yields and frees its slot."""


class SourcesIdle(Exception):
    """Raised when nothing is left to deliver and no source is running, so the attempt should start again later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A snapshot in which all sources had ended."""

    epochs: Mapping[str, int]
    """The epoch at which each source ended."""
    unfinished: frozenset[str]
    """Sources that ended without finishing. They can run again with the same epoch."""


class Sources:
    """The state of the sources of one attempt, according to the task document and their complete markers."""

    def __init__(self, tasks: TaskStore, attempt: AttemptInput, names: Sequence[str]) -> None:
        self._tasks = tasks
        self._attempt = attempt
        self._names = names
        self._states: dict[str, tuple[NodeStatus, int]] = {}
        self._read_at: float | None = None
        self._restarted = False
        """Whether a source has started again since its state was read."""
        self._idle_since: float | None = None

    async def find_end(self, markers: Mapping[str, int], unconfirmed: Collection[str] = ()) -> Ended | None:
        """Return a snapshot if every source appears to have ended, otherwise None.

        An external worker writes its marker before the bridge has stored its last batches (protocol: hazard H19). Such
        a marker of one of the nodes in `unconfirmed` counts only once the node has ended.

        States can be two seconds old. Confirm the snapshot with `are_still_ended`, during or after the scan that finds no
        more batches.
        """
        if self._restarted:
            await self._read_states()
        if unconfirmed:
            await self._read_states(now=True)
            markers = {
                name: epoch for name, epoch in markers.items() if self._is_valid_marker(name, unconfirmed)
            }
        if (ended := self._find_end(markers)) is None:
            await self._read_states()
            ended = self._find_end(markers)
        return ended

    def _is_valid_marker(self, name: str, unconfirmed: Collection[str]) -> bool:
        return name not in unconfirmed or name not in self._states or self._get_status(name).ended

    async def are_still_ended(self, ended: Ended | None) -> bool:
        """Return whether `ended` still holds, that is, no source has started again since. Return False for None."""
        if ended is None:
            return False
        restarted = await retry_while_unavailable(
            lambda: self._tasks.have_restarted(self._attempt.task_id, ended.epochs, ended.unfinished)
        )
        self._restarted |= restarted
        return not restarted

    def _find_end(self, markers: Mapping[str, int]) -> Ended | None:
        epochs = {name: self._end_of(name, markers.get(name)) for name in self._names}
        known = {name: epoch for name, epoch in epochs.items() if epoch is not None}
        if len(known) < len(epochs):
            return None
        unfinished = frozenset(name for name in self._names if self._is_unfinished(name))
        return Ended(epochs=known, unfinished=unfinished)

    def _end_of(self, name: str, marker: int | None) -> int | None:
        """Return the epoch at which a source ended, or None if it has not, or its marker is from an earlier attempt."""
        status, epoch = self._states.get(name, (None, self._attempt.sources.get(name)))
        if epoch is None and self._read_at is not None:
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

    async def _read_states(self, *, now: bool = False) -> None:
        """Read the states of the sources, at most every two seconds unless `now` is set."""
        at = time.monotonic()
        recent = self._read_at is not None and at - self._read_at < _STATES_PAUSE_SEC
        if recent and not (self._restarted or now):
            return
        self._read_at, self._restarted = at, False
        self._states = await retry_while_unavailable(lambda: self._tasks.node_states(self._attempt.task_id))
        active = {self._get_status(name) for name in self._names if not self._get_status(name).ended}
        idle = active and not active & {NodeStatus.RUNNING, NodeStatus.CANCELLING}
        self._idle_since = (self._idle_since or at) if idle else None

    def _get_status(self, name: str) -> NodeStatus:
        return self._states.get(name, (NodeStatus.QUEUED, 0))[0]

    async def check_idle(self) -> None:
        """Raise SourcesIdle if no source has been running for five seconds, according to a fresh read."""
        if self._is_idle():
            await self._read_states(now=True)
            if self._is_idle():
                raise SourcesIdle

    def _is_idle(self) -> bool:
        return self._idle_since is not None and time.monotonic() - self._idle_since > _IDLE_SEC
