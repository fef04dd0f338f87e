"""Kafka: the clients of a worker, and the sender that applies the chosen misbehavior to its records."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.errors import KafkaError

from flowkit.testing.external.journal import Entry
from flowkit.testing.external.messages import TERMINAL, Outgoing
from flowkit.testing.external.misbehavior import Malformed, malformed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flowkit.testing.external.journal import Journal
    from flowkit.testing.external.misbehavior import Misbehavior
    from flowkit.testing.external.settings import Clock


logger = logging.getLogger(__name__)

_STOP_SEC = 5.0


class _Listener:
    """Reports the partitions that a consumer receives."""

    def __init__(self, assigned: Callable[[str], None]) -> None:
        self._assigned = assigned

    async def on_partitions_revoked(self, revoked: Any) -> None:
        """Do nothing: the worker keeps its run during a rebalance."""

    async def on_partitions_assigned(self, assigned: Any) -> None:
        """Report the partitions."""
        self._assigned(", ".join(f"{each.topic}/{each.partition}" for each in sorted(assigned)))


ConsumerRebalanceListener.register(_Listener)


async def open_producer(bootstrap: str, options: Mapping[str, Any]) -> Any:
    """Return a started producer that waits for all replicas and sends each record once."""
    producer: Any = AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True, **options)
    try:
        await producer.start()
    except BaseException:
        await producer.stop()
        raise
    return producer


class Consumer:
    """A consumer of one topic in a group. Its offsets are committed explicitly."""

    def __init__(
        self,
        topic: str,
        group: str,
        bootstrap: str,
        options: Mapping[str, Any],
        assigned: Callable[[str], None],
    ) -> None:
        self.topic = topic
        self._client: Any = AIOKafkaConsumer(
            bootstrap_servers=bootstrap,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="latest",
            **options,
        )
        self._client.subscribe([topic], listener=_Listener(assigned))
        self._commit_failed = False

    async def start(self) -> None:
        """Connect, and wait until the group has assigned partitions, possibly none."""
        await self._client.start()

    async def next(self) -> Any:
        """Return the next record."""
        return await self._client.getone()

    async def commit(self) -> None:
        """Commit the positions of all assigned partitions. The first failure is logged."""
        try:
            await self._client.commit()
        except KafkaError as error:
            if not self._commit_failed:
                logger.warning("Cannot commit the offsets of %s: %s", self.topic, error)
            self._commit_failed = True

    def pause(self) -> None:
        """Stop reading until `resume` or the next rebalance."""
        self._client.pause(*self._client.assignment())

    def resume(self) -> None:
        """Read again."""
        self._client.resume(*self._client.paused())

    @property
    def paused(self) -> bool:
        """Whether any partition is paused."""
        return bool(self._client.paused())

    def partitions(self) -> list[int]:
        """Return the numbers of the assigned partitions."""
        return sorted(each.partition for each in self._client.assignment())

    async def ready(self) -> None:
        """Wait until every assigned partition has a position, so that no later record is skipped."""
        for partition in self._client.assignment():
            await self._client.position(partition)

    async def stop(self) -> None:
        """Leave the group and disconnect, in bounded time: while the broker is down, aiokafka may wait for it."""
        try:
            async with asyncio.timeout(_STOP_SEC):
                await self._client.stop()
        except TimeoutError:
            await self._disconnect()
        except asyncio.CancelledError:
            # While the broker is unreachable, aiokafka passes on the cancellation of its own fetches.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            await self._disconnect()

    async def _disconnect(self) -> None:
        """Do what remains of aiokafka's stop."""
        names = ("_coordination_task", "_heartbeat_task", "_commit_refresh_task")
        tasks = [getattr(self._client._coordinator, name, None) for name in names]
        fetches = getattr(self._client._fetcher, "_pending_tasks", ())
        pending = [task for task in (*tasks, *fetches) if task is not None]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=_STOP_SEC)
        await self._client._client.close()

    async def drop(self) -> None:
        """Disconnect without leaving the group, as after a crash: the broker waits for the session timeout."""
        # A client without a generation has no group to leave.
        if self._client._coordinator is not None:
            self._client._coordinator.reset_generation()
        await self.stop()


async def drop_producer(producer: Any) -> None:
    """Disconnect a producer without sending what it still holds, as after a crash.

    aiokafka leaks a connection whose opening is cancelled. It opens connections while it holds a lock, so this function
    cancels while it holds the lock, too. A cancelled sender waits for its requests, which may need the lock to connect.
    """
    producer._closed = True
    connecting, sending = producer.client._get_conn_lock, producer._sender._sender_task
    async with connecting:
        sending.cancel()
    await asyncio.wait([sending], timeout=_STOP_SEC)
    async with connecting:
        await producer.client.close()


class SendFailed(ConnectionError):
    """Raised when a record cannot be sent because a misbehavior prevents it, or because the worker has ended."""


class Sender:
    """Sends records through a producer. Each `await` ends when the broker has acknowledged the record."""

    def __init__(
        self,
        producer: Any,
        journal: Journal,
        misbehavior: Misbehavior,
        clock: Clock,
        crash: Callable[[], None],
    ) -> None:
        self.ended = asyncio.Event()
        """Set when the worker ends; nothing can be sent then."""
        self.producer = producer
        """None until the worker has connected."""
        self._journal = journal
        self._misbehavior = misbehavior
        self._clock = clock
        self._crash = crash
        self._collected: list[Outgoing] = []
        self._held: list[Outgoing] = []
        self._released = asyncio.Event()
        """Cleared while `release` sends the held events."""
        self._released.set()

    async def event(self, event: Outgoing) -> None:
        """Send a status event. Misbehavior may suppress, hold, reorder, delay or repeat it."""
        if self._misbehavior.fail_accepted and event.kind == "TASK_ACCEPTED":
            raise SendFailed("the misbehavior fail_accepted prevents sending TASK_ACCEPTED")
        if self._suppressed(event.kind):
            self._add("suppressed", event, reason=event.kind)
        elif event.kind in self._misbehavior.hold:
            self._held.append(event)
            self._add("held", event, reason=event.kind)
        else:
            await self._released.wait()
            for due in self._due(event):
                await self._send_event(due)

    async def release(self) -> None:
        """Send the events that `Misbehavior.hold` kept back, in their order. Later events wait until they are sent."""
        self._released.clear()
        try:
            while self._held:
                await self._send_event(self._held.pop(0))
        finally:
            self._released.set()

    async def send(self, record: Outgoing) -> None:
        """Send a record without misbehavior."""
        sent = await self.raw(record.topic, record.value, record.key)
        self._add(record.kind, record, partition=sent.partition, offset=sent.offset)
        if record.kind == self._misbehavior.crash_after:
            self._crash()
            await self.ended.wait()
            raise SendFailed("the external worker has crashed")

    async def raw(self, topic: str, value: bytes | None, key: str | None = None) -> Any:
        """Send any bytes, and return where the broker stored them. They are not recorded."""
        if self.ended.is_set():
            raise SendFailed("the external worker has ended")
        return await self.producer.send_and_wait(topic, value, key=None if key is None else key.encode())

    async def malformed(self, kind: Malformed, topic: str, like: dict[str, Any] | None = None) -> None:
        """Send a malformed record that repeats the ids of the message `like`."""
        value = malformed(kind, like)
        key = f"{like['task_id']}:{like['node_id']}" if like else "unknown"
        sent = await self.raw(topic, value, key)
        self._journal.add(
            Entry(
                kind="malformed",
                reason=str(kind),
                topic=topic,
                key=key,
                value=value,
                partition=sent.partition,
                offset=sent.offset,
            )
        )

    def _suppressed(self, kind: str) -> bool:
        silent = self._misbehavior.silence and kind == "TASK_HEARTBEAT"
        return silent or (self._misbehavior.no_terminal and kind in TERMINAL)

    def _due(self, event: Outgoing) -> list[Outgoing]:
        """Return the events to send now: this one, or a full collection in reverse order, or none."""
        self._collected.append(event)
        if event.kind not in TERMINAL and len(self._collected) < self._misbehavior.reorder_events:
            return []
        due, self._collected = self._collected[::-1], []
        return due

    async def _send_event(self, event: Outgoing) -> None:
        for kind in self._misbehavior.malformed:
            await self.malformed(Malformed(kind), event.topic, event.message)
        if self._misbehavior.delay_sec:
            await self._clock.sleep(self._misbehavior.delay_sec)
        for _ in range(1 + self._misbehavior.duplicate_events):
            await self.send(event)

    def _add(self, entry_kind: str, record: Outgoing, **fields: Any) -> None:
        places = {name: record.message[name] for name in ("task_id", "node_id", "attempt_epoch")}
        self._journal.add(
            Entry(
                kind=entry_kind,
                topic=record.topic,
                key=record.key,
                value=record.value,
                message=record.message,
                **places,
                **fields,
            )
        )
