"""The commands of one bridge: chooses a partition for each, sends it, and watches it until a worker accepts it.

See docs/protocol.md, "Commands that no worker accepts".
"""

from __future__ import annotations

import asyncio
import functools
import logging
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from flowkit.adapters.worker_registry import BRIDGE_PREFIX
from flowkit.attempt.background import BackgroundLoop, OutageLogger
from flowkit.attempt.failures import failed_attempt
from flowkit.bridge.kafka.topics import worker_group
from flowkit.bridge.rules.fencing import left_sec
from flowkit.bridge.rules.messages import key_of, task_start
from flowkit.bridge.rules.outcomes import not_in_topic
from flowkit.errors import CommandTooLarge, FlowKitError, KafkaUnavailable, SendUncertain
from flowkit.models.waits import TEXT, for_worker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Iterator, Mapping

    from flowkit.adapters.dispatches import Dispatch, PlacedCommand, WorkerLease
    from flowkit.bridge.context import BridgeContext
    from flowkit.bridge.signals import WorkerSignals
    from flowkit.models import AttemptInput
    from flowkit.protocol.messages import Envelope

_logger = logging.getLogger("flowkit.bridge")

_OWNERS_SEC = 3.0
"""How long a read assignment of partitions to workers is used. An outdated one only makes a choice less good."""

_OTHERS_SEC = 1.0
"""The shortest pause between two reads of the commands of other bridges."""

_OTHERS_PAUSES = 9
"""The shortest pause in durations of a read, so that thousands of commands are not read all the time."""

_RETRY_SEC = 0.5

_LATE_SEC_EACH = 0.005
"""Shortest pause between two looks at late commands, for each attempt that waits for some: thousands may
wait for days."""

_CHECK_AFTER_SEC = 1.0
"""Age of a command at which the watch starts. Most commands are accepted earlier."""

_SHOW_EVERY_SEC = 3.0
"""Minimum time between two writes of one attempt."""

_SHOWN_AT_ONCE = 50
"""Maximum number of attempts that one call writes, so that a long queue does not delay other writes."""

SKIPPED_AFTER_SEC = 10.0
"""Age at which a command counts as skipped if the group has members but no committed offset (H4)."""


@dataclass(kw_only=True, slots=True)
class _RolePartitions:
    ends: dict[int, int] = field(default_factory=dict)
    """A lower bound for the end of each partition."""
    owners: dict[int, str] = field(default_factory=dict)
    owners_at: float = 0.0
    last: int = -1
    planned: Counter[int] = field(default_factory=Counter)
    """Commands that are being sent, by partition."""


class Placement:
    """Chooses partitions of the command topics for one bridge, and knows where a search for a command must begin.

    A choice reads nothing: the commands of other bridges are read in the background.
    """

    def __init__(self, context: BridgeContext, records: Callable[[], Iterable[Dispatch]]) -> None:
        self._context = context
        self._records = records
        self._roles: dict[str, _RolePartitions] = {}
        self._reading: asyncio.Task[None] | None = None
        self._others: list[PlacedCommand] = []
        self.loop = BackgroundLoop("commands of other bridges", self.read_others, pause_sec=_OTHERS_SEC)

    async def choose(self, role: str) -> tuple[int, int]:
        """Return a partition for the next command of a role, and a lower bound for its end.

        Wait while Kafka is unavailable, unless the topic has been read before.
        """
        while True:
            try:
                return await self._choose(role)
            except FlowKitError as error:
                if not error.retryable:
                    raise
                _logger.warning("role %s cannot be dispatched: %s; retrying", role, error)
                await asyncio.sleep(_RETRY_SEC)

    async def _choose(self, role: str) -> tuple[int, int]:
        known = self._roles.setdefault(role, _RolePartitions())
        if not known.ends:
            known.ends = dict(await self._context.offsets.read_ends(self._context.topics.cmd(role)))
            known.last = zlib.crc32(self._context.bridge_id.encode()) % len(known.ends)
        self._read_owners_later(role, known)
        outstanding, busy = self._count_commands(role, known)
        known.last = choose_partition(
            tuple(known.ends), owners=known.owners, outstanding=outstanding, busy=busy, last=known.last
        )
        known.planned[known.last] += 1
        return known.last, known.ends[known.last]

    def note_sent(self, role: str, partition: int, offset: int | None) -> None:
        """Note the offset of the command for which `choose` was called; None if it is unknown or was not sent."""
        known = self._roles[role]
        known.planned[partition] -= 1
        if offset is not None:
            known.ends[partition] = max(known.ends.get(partition, 0), offset + 1)

    async def read_others(self) -> None:
        """Read the commands of other bridges, then pause in proportion to the duration of the read."""
        began, owner, roles = self._context.monotonic(), self._context.bridge_id, self._context.roles
        self._others = await self._context.db(
            lambda: self._context.stores.dispatches.find_placed_by_others(owner, roles)
        )
        self.loop.worked()
        await asyncio.sleep(_OTHERS_PAUSES * (self._context.monotonic() - began))

    async def stop(self) -> None:
        """Stop reading assignments, so that no read opens a client after the bridge has closed its clients."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _count_commands(self, role: str, known: _RolePartitions) -> tuple[Counter[int], Counter[str]]:
        """Return unaccepted commands by partition, and running attempts by group member."""
        outstanding, busy = Counter(known.planned), Counter[str]()
        own = {record.key: record for record in self._records() if record.attempt.role == role}
        placed = [
            (record.partition, record.lease is not None)
            for record in own.values()
            if record.lease is not None or record.offset is not None
        ]
        placed += [
            (each.partition, each.accepted)
            for each in self._others
            if each.role == role and each.key not in own
        ]
        for partition, accepted in placed:
            if not accepted:
                outstanding[partition] += 1
            elif (owner := known.owners.get(partition)) is not None:
                busy[owner] += 1
        return outstanding, busy

    def _read_owners_later(self, role: str, known: _RolePartitions) -> None:
        now = self._context.now()
        if now - known.owners_at < _OWNERS_SEC or (self._reading is not None and not self._reading.done()):
            return
        known.owners_at = now
        self._reading = asyncio.create_task(self._read_owners(role, known))

    async def _read_owners(self, role: str, known: _RolePartitions) -> None:
        topic = self._context.topics.cmd(role)
        try:
            members = await self._context.offsets.read_members(worker_group(role))
            partitions = await self._context.offsets.list_partitions(topic)
        except KafkaUnavailable as error:
            _logger.debug("the members of %s cannot be read: %s", worker_group(role), error)
            return
        known.owners = {
            partition: member
            for member, places in members.items()
            for place, partition in places
            if place == topic
        }
        for partition in partitions:
            known.ends.setdefault(partition, 0)


def choose_partition(
    partitions: Collection[int],
    *,
    owners: Mapping[int, str],
    outstanding: Mapping[int, int],
    busy: Mapping[str, int],
    last: int,
) -> int:
    """Return the best partition for the next command; raise ValueError if there are no partitions.

    A worker reads none of its partitions while it runs a command, so a command behind another one waits.
    Preferred in this order: partitions whose owner is idle and has no outstanding command; partitions without
    a known owner and without outstanding commands; partitions whose owner has the fewest commands. Among
    equals, the partitions take turns, beginning after `last`.

    `owners` maps a partition to the member that reads it, as far as known. `outstanding` counts the commands
    of a partition that no worker has accepted yet, and `busy` the commands that a member runs.
    """
    if not partitions:
        raise ValueError("a command topic has at least one partition")
    waiting = _count_waiting(owners, outstanding)

    def load(partition: int) -> tuple[int, int, int]:
        return _rank_partition(partition, owners.get(partition), outstanding, busy, waiting)

    least = min(load(partition) for partition in partitions)
    best = [partition for partition in partitions if load(partition) == least]
    return min(best, key=lambda partition: (partition <= last, partition))


def _count_waiting(owners: Mapping[int, str], outstanding: Mapping[int, int]) -> dict[str, int]:
    waiting: dict[str, int] = {}
    for partition, owner in owners.items():
        waiting[owner] = waiting.get(owner, 0) + outstanding.get(partition, 0)
    return waiting


def _rank_partition(
    partition: int,
    owner: str | None,
    outstanding: Mapping[int, int],
    busy: Mapping[str, int],
    waiting: Mapping[str, int],
) -> tuple[int, int, int]:
    """Return the rank of a partition, and how many commands a new one would follow: at its owner, in the partition."""
    queued = outstanding.get(partition, 0)
    if owner is None:
        return (1 if queued == 0 else 2, queued, queued)
    ahead = busy.get(owner, 0) + waiting[owner]
    return (0 if ahead == 0 else 2, ahead, queued)


class CommandSender:
    """Sends the commands of one bridge. Its methods wait while Kafka is unavailable."""

    def __init__(self, context: BridgeContext) -> None:
        self._context = context

    async def send(self, attempt: AttemptInput, record: Dispatch) -> int:
        """Send the command and return its offset. Wait while Kafka is unavailable.

        If it is uncertain whether Kafka has stored the command, look for it in the topic. If it is not there, raise the
        failure `dispatch_lost`, so that the workflow starts a new epoch. Raise CommandTooLarge if Kafka rejects it.
        """
        command = task_start(attempt, record.cancel_token, self._context.now())
        try:
            offset = await self._produce(record, command)
        except SendUncertain:
            offset = -1
        if offset >= 0:
            return offset
        found = await self.search(record)
        if found is None:
            raise failed_attempt(not_in_topic())
        return found

    async def _produce(self, record: Dispatch, command: Envelope) -> int:
        value, key = command.to_json(), key_of(record.attempt)
        while True:
            try:
                _, offset = await self._context.producer.send(record.topic, key, value, record.partition)
            except (SendUncertain, CommandTooLarge):
                raise
            except FlowKitError as error:
                _logger.warning("node %s was not dispatched: %s; retrying", record.attempt.node_id, error)
                await asyncio.sleep(_RETRY_SEC)
            else:
                return offset

    async def search(self, record: Dispatch) -> int | None:
        """Return the offset of the record's command in its topic, or None. Wait while Kafka is unavailable."""
        while True:
            try:
                return await self._context.offsets.find(
                    record.topic, record.partition, record.end_offset, record.dedup_id
                )
            except FlowKitError as error:
                _logger.warning("topic %s cannot be searched: %s; retrying", record.topic, error)
                await asyncio.sleep(_RETRY_SEC)


class CommandState(Enum):
    """The state of a command that no worker has accepted."""

    QUEUED = auto()
    """No worker has read it: the worker that its partition is assigned to is busy, or there is none."""
    READ = auto()
    """A worker has read it. Without an acceptance in the status topic, the worker dropped it (H2)."""


def command_state(record: Dispatch, committed: int | None, *, members: int, age_sec: float) -> CommandState:
    """Return the state of the command of `record`, whose offset is known.

    `committed` is the offset that the workers' group has committed for the partition, `members` the number of its
    members, and `age_sec` the time since the command was sent.
    """
    assert record.offset is not None
    if committed is None:
        skipped = members > 0 and age_sec >= SKIPPED_AFTER_SEC
        return CommandState.READ if skipped else CommandState.QUEUED
    return CommandState.READ if committed > record.offset else CommandState.QUEUED


def queue_position(record: Dispatch, committed: int | None) -> int:
    """Return the number of commands ahead of this one in its partition."""
    if record.offset is None or committed is None:
        return 0
    return max(0, record.offset - committed)


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
        """Begin a new round: forget what the last one read, and read the offsets of the roles of unaccepted
        commands.
        """
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
        committed = await offsets.read_committed(group, self._context.topics.cmd(role))
        members = await offsets.read_members(group)
        return RoleQueue(committed=committed, members=len(members))

    def is_queued(self, record: Dispatch) -> bool:
        """Return whether no worker has read the command yet. False if that is unknown."""
        return self._read_state(record) is CommandState.QUEUED

    def was_read(self, record: Dispatch) -> bool:
        """Return whether a worker has read the command, or the workers' group has skipped it. False if unknown."""
        return self._read_state(record) is CommandState.READ

    def _read_state(self, record: Dispatch) -> CommandState | None:
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
        waits_for = {TEXT: self.waits_for(record)}
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
        return dict(await self._once(("ends", role), lambda: self._context.offsets.read_ends(topic)))

    async def status_processed(self, role: str, ends: Mapping[int, int]) -> bool:
        """Return whether the bridges have processed all status events before `ends`."""
        group, topic = self._context.status_group(role), self._context.topics.status(role)
        processed: bool = await self._once(
            (role, *ends.items()), lambda: self._context.offsets.has_caught_up(group, topic, ends)
        )
        return processed


@dataclass(kw_only=True, slots=True)
class _LateCommand:
    """What a bridge has seen of the command of a cancelled attempt, which may begin late."""

    lease: WorkerLease | None = None
    """The worker that runs it, as last seen."""
    offset: int | None = None
    heard_at: float = 0.0
    """When the lease last changed, by the monotonic clock."""
    status_ends: Mapping[int, int] = field(default_factory=dict)
    """Where the status topic ended once the command could be read no more; empty before."""


class LateCommands:
    """Waits until no worker can run the attempts of a node that were cancelled before a worker had read their commands.

    A worker that reads such a command writes artifacts itself until a signal stops it. Nothing fences these
    writes, so the next attempt of the node must not run meanwhile.
    """

    def __init__(self, context: BridgeContext, signals: WorkerSignals) -> None:
        self._context = context
        self._dispatches = context.stores.dispatches
        self._signals = signals
        self._waiting = 0
        """Number of attempts that wait."""

    async def find(self, attempt: AttemptInput) -> list[Dispatch]:
        """Return the records of earlier attempts that a worker may still begin, or runs."""
        return await self._context.db(
            lambda: self._dispatches.find_late(attempt.task_id, attempt.node_id, attempt.epoch)
        )

    async def settle(self, attempt: AttemptInput) -> None:
        """Return when there is none any more. Wait while Kafka is unavailable."""
        self._waiting += 1
        try:
            await self._settle(attempt)
        finally:
            self._waiting -= 1

    async def _settle(self, attempt: AttemptInput) -> None:
        known: defaultdict[str, _LateCommand] = defaultdict(_LateCommand)
        while late := await self.find(attempt):
            over = [record for record in late if await self._is_over(record, known[record.key])]
            for record in over:
                await self._context.db(functools.partial(self._dispatches.settle, record.key))
            if not over:
                await asyncio.sleep(max(_RETRY_SEC, _LATE_SEC_EACH * self._waiting))

    async def _is_over(self, record: Dispatch, seen: _LateCommand) -> bool:
        now, lease = self._context.monotonic(), record.lease
        if lease is not None:
            if lease.is_later(seen.lease):
                seen.lease, seen.heard_at = lease, now
            self._signals.stop_owner(record)
            return left_sec(lease, now - seen.heard_at) <= 0
        try:
            return await self._was_dropped(record, seen)
        except KafkaUnavailable as error:
            _logger.debug("the command of node %s cannot be looked for: %s", record.attempt.node_id, error)
            return False

    async def _was_dropped(self, record: Dispatch, seen: _LateCommand) -> bool:
        """Return whether a worker has read the command without accepting it, or none can read it any more.

        A worker accepts a command before it commits its offset, so the status topic contains the acceptance then.
        """
        role, offsets = record.attempt.role, self._context.offsets
        status = self._context.topics.status(role)
        if not seen.status_ends:
            if await self._is_unread(record, seen):
                return False
            seen.status_ends = await offsets.read_ends(status)
        if not await offsets.has_caught_up(self._context.status_group(role), status, seen.status_ends):
            return False
        stored = await self._context.db(lambda: self._dispatches.find_all([record.key]))
        return record.key not in stored or stored[record.key].lease is None

    async def _is_unread(self, record: Dispatch, seen: _LateCommand) -> bool:
        """Return whether a worker may still read the command: Kafka has it, and the workers' group is not behind it."""
        offsets, topic, partition = self._context.offsets, record.topic, record.partition
        if seen.offset is None:
            seen.offset = record.offset
        if seen.offset is None:
            seen.offset = await offsets.find(topic, partition, record.end_offset, record.dedup_id)
        begins, ends = await offsets.read_begins(topic), await offsets.read_ends(topic)
        if seen.offset is None or not begins.get(partition, 0) <= seen.offset < ends.get(partition, 0):
            return False
        group, age = worker_group(record.attempt.role), self._context.now() - record.created_at
        committed = (await offsets.read_committed(group, topic)).get(partition)
        members = 0 if committed is not None else len(await offsets.read_members(group))
        found = replace(record, offset=seen.offset)
        return command_state(found, committed, members=members, age_sec=age) is CommandState.QUEUED


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shown:
    record: Dispatch
    text: str
    at: float


class ShownWaits:
    """Keeps the field `waits_for` of the nodes that one bridge supervises. It is for people: no decision reads it."""

    def __init__(self, context: BridgeContext, commands: CommandWatch) -> None:
        self._context = context
        self._commands = commands
        self._shown: dict[str, _Shown] = {}
        self._writing: asyncio.Task[None] | None = None

    def refresh(self, records: Iterable[Dispatch]) -> None:
        """Write, in the background, the texts that have changed. Do nothing while earlier texts are being written."""
        if self._writing is not None and not self._writing.done():
            return
        supervised = {record.key: record for record in records}
        changes = [*self._ended(supervised), *self._changed(supervised.values())][:_SHOWN_AT_ONCE]
        if changes:
            self._writing = asyncio.create_task(self._write(changes))

    async def stop(self) -> None:
        """Wait at most two seconds until the current writes have ended."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=2.0)

    def _ended(self, supervised: dict[str, Dispatch]) -> Iterator[tuple[Dispatch, str | None]]:
        """Yield the attempts that ended before a worker accepted them."""
        for key, shown in self._shown.items():
            if key not in supervised:
                yield shown.record, None

    def _changed(self, records: Iterable[Dispatch]) -> Iterator[tuple[Dispatch, str | None]]:
        """Yield the unaccepted attempts whose text has changed. The acceptance itself removes the text."""
        now = self._context.now()
        for record in records:
            if record.lease is not None:
                self._shown.pop(record.key, None)
                continue
            text, shown = self._commands.waits_for(record), self._shown.get(record.key)
            if text is None or (
                shown is not None and (shown.text == text or now - shown.at < _SHOW_EVERY_SEC)
            ):
                continue
            yield record, text

    async def _write(self, changes: Iterable[tuple[Dispatch, str | None]]) -> None:
        for record, text in changes:
            try:
                await self._show(record, text)
            except FlowKitError as error:
                _logger.debug("what node %s waits for is not shown: %s", record.attempt.node_id, error)
                return

    async def _show(self, record: Dispatch, text: str | None) -> None:
        tasks, attempt, run_id = self._context.stores.tasks, record.attempt, record.run_id
        wait = None if text is None else for_worker(text)
        await self._context.portal.run(tasks.attempts.show_wait(attempt, run_id, wait, holders=BRIDGE_PREFIX))
        if text is None:
            self._shown.pop(record.key, None)
        else:
            self._shown[record.key] = _Shown(record=record, text=text, at=self._context.now())
