"""Writes status events to `worker_events`, the log of attempts for operators."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from flowkit.adapters.worker_events import WorkerEvent
from flowkit.errors import StoreRefused
from flowkit.limits import LAST_ERROR_CHARS
from flowkit.protocol.kinds import EventKind
from flowkit.text import clean, truncate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flowkit.bridge.context import BridgeContext
    from flowkit.bridge.rules.reading import StatusEvent

_logger = logging.getLogger("flowkit.bridge")

_LARGE = frozenset({"metrics", "artifacts_ref"})
"""Fields that the log leaves out, because they may be large. They are in `metrics_raw` and `artifacts`."""


class EventLog:
    """Collects events, and stores those of several polls in one call."""

    def __init__(self, context: BridgeContext) -> None:
        self._context = context
        self._one_write = asyncio.Lock()
        self.unwritten: list[WorkerEvent] = []

    def add(self, events: Iterable[StatusEvent], at: float) -> None:
        """Note events that were received at this time."""
        self.unwritten += worker_events(events, at)

    async def write(self) -> None:
        """Store what was noted before the call. Log a warning if MongoDB permanently rejects some events."""
        async with self._one_write:
            rows, now = [*self.unwritten], self._context.now()
            try:
                await self._context.db(lambda: self._context.stores.events.append(rows, now))
            except StoreRefused as error:
                _logger.warning("%d events were not stored in worker_events: %s", len(rows), error)
            del self.unwritten[: len(rows)]


def worker_events(events: Iterable[StatusEvent], at: float) -> list[WorkerEvent]:
    """Return the rows for `events`. Omits heartbeats, which would make up most of the log."""
    return [_row(event, at) for event in events if event.event.kind is not EventKind.TASK_HEARTBEAT]


def _row(event: StatusEvent, at: float) -> WorkerEvent:
    envelope = event.envelope
    return WorkerEvent(
        task_id=envelope.task_id,
        node_id=envelope.node_id,
        step_type=clean(envelope.step_type[:100]),
        epoch=envelope.attempt_epoch,
        at=envelope.ts_ms / 1000,
        event_hash=clean(envelope.dedup_id[:200]),
        payload=_payload(event),
        received_at=at,
    )


def _payload(event: StatusEvent) -> dict[str, Any]:
    fields = event.event.model_dump(mode="json", exclude=set(_LARGE))
    return {name: _short(value) for name, value in fields.items()}


def _short(value: Any) -> Any:
    return truncate(clean(value), LAST_ERROR_CHARS) if isinstance(value, str) else value
