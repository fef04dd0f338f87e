"""Watches commands that no worker has accepted, and the progress of the status events.

See docs/protocol.md, "Commands that no worker accepts". The watch knows only what it last read from Kafka.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowkit.attempt.background import OutageLogger
from flowkit.bridge.kafka.topics import worker_group
from flowkit.bridge.rules.dispatch_check import CommandState, command_state, queue_position
from flowkit.errors import KafkaUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping

    from flowkit.adapters.dispatches.record import Dispatch
    from flowkit.bridge.context import BridgeContext

_CHECK_AFTER_SEC = 1.0
"""Age of a command at which the watch starts. Most commands are accepted earlier."""


@dataclass(kw_only=True, slots=True)
class RoleQueue:
    """The command queue of one role, as last read."""

    committed: Mapping[int, int | None] = field(default_factory=dict)
    members: int = 0


class CommandWatch:
    """The command queues of the roles that have unaccepted commands."""

    def __init__(self, context: BridgeContext) -> None:
        self._context = context
        self._queues: dict[str, RoleQueue] = {}
        self._outage = OutageLogger("read the offsets of external workers")
        self._reads: dict[Hashable, Any] = {}
        self._failure: KafkaUnavailable | None = None
        self._one_read = asyncio.Lock()

    async def refresh(self, records: Iterable[Dispatch]) -> None:
        """Begin a new round: forget what the last one read, and read the offsets of the roles of unaccepted commands."""
        self._reads, self._failure = {}, None
        now = self._context.now()
        unaccepted = [record for record in records if record.lease is None and record.offset is not None]
        due = {r.attempt.role for r in unaccepted if now - r.created_at >= _CHECK_AFTER_SEC or r.cancel}
        self._queues = {role: queue for role, queue in self._queues.items() if role in due}
        try:
            for role in sorted(due):
                self._queues[role] = await self._once(("queue", role), functools.partial(self._read, role))
        except KafkaUnavailable:
            self._queues = {}

    async def _once(self, what: Hashable, read: Callable[[], Awaitable[Any]]) -> Any:
        """Return what `read` returns. It is called once in a round, and not after the round's first failure."""
        async with self._one_read:
            if self._failure is not None:
                raise KafkaUnavailable(str(self._failure))
            if what not in self._reads:
                try:
                    self._reads[what] = await read()
                except KafkaUnavailable as error:
                    self._failure = error
                    self._outage.failed(error)
                    raise
                self._outage.recovered()
            return self._reads[what]

    async def _read(self, role: str) -> RoleQueue:
        group, offsets = worker_group(role), self._context.offsets
        committed = await offsets.committed(group, self._context.topics.cmd(role))
        members = await offsets.members(group)
        return RoleQueue(committed=committed, members=len(members))

    def is_queued(self, record: Dispatch) -> bool:
        """Return whether no worker has read the command yet. False if that is unknown."""
        return self._state(record) is CommandState.QUEUED

    def was_read(self, record: Dispatch) -> bool:
        """Return whether a worker has read the command, or the workers' group has skipped it. False if unknown."""
        return self._state(record) is CommandState.READ

    def _state(self, record: Dispatch) -> CommandState | None:
        queue = self._queues.get(record.attempt.role)
        if queue is None or record.offset is None or record.partition not in queue.committed:
            return None
        age = self._context.now() - record.created_at
        committed = queue.committed[record.partition]
        return command_state(record, committed, members=queue.members, age_sec=age)

    def details(self, record: Dispatch) -> dict[str, object]:
        """Return what a queued attempt waits for, for the Web UI and the task document."""
        queue = self._queues.get(record.attempt.role)
        if queue is None:
            return {}
        waits_for = {"waits_for": self.waits_for(record)}
        if not queue.members:
            return {**waits_for}
        ahead = queue_position(record, queue.committed.get(record.partition))
        return {**waits_for, "commands_ahead": ahead, "workers": queue.members}

    def waits_for(self, record: Dispatch) -> str | None:
        """Return in words what a queued attempt waits for; None if that is unknown."""
        queue, role = self._queues.get(record.attempt.role), record.attempt.role
        if queue is None:
            return None
        if not queue.members:
            return f"an external worker of role {role}; none is connected to Kafka"
        plural = "" if queue.members == 1 else "s"
        return f"a free external worker of role {role} ({queue.members} worker{plural} connected)"

    async def status_ends(self, role: str) -> dict[int, int]:
        """Return the present end of each partition of a role's status topic."""
        topic = self._context.topics.status(role)
        return dict(await self._once(("ends", role), lambda: self._context.offsets.ends(topic)))

    async def status_processed(self, role: str, ends: Mapping[int, int]) -> bool:
        """Return whether the bridges have processed all status events before `ends`."""
        group, topic = self._context.status_group(role), self._context.topics.status(role)
        processed: bool = await self._once(
            (role, *ends.items()), lambda: self._context.offsets.caught_up(group, topic, ends)
        )
        return processed
