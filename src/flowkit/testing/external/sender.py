"""Sends the records of a worker, correctly or with the chosen misbehavior."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from flowkit.testing.external.author import TERMINAL, Outgoing
from flowkit.testing.external.journal import Entry
from flowkit.testing.external.malformed import Malformed, malformed

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowkit.testing.external.journal import Journal
    from flowkit.testing.external.misbehavior import Misbehavior
    from flowkit.testing.external.settings import Clock


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
