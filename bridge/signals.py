"""Sends cancel signals and queries to workers, without waiting for confirmation. The bridge may repeat or drop them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from cachetools import LRUCache

from flowkit import reason_codes
from flowkit.bridge.context import REMEMBERED
from flowkit.bridge.rules.messages import cancel_signal, task_discover
from flowkit.errors import FlowKitError

if TYPE_CHECKING:
    from flowkit.adapters.dispatches import Dispatch
    from flowkit.bridge.context import BridgeContext
    from flowkit.models import AttemptInput
    from flowkit.protocol.messages import Envelope

_logger = logging.getLogger("flowkit.bridge")

_REPEAT_SEC = 2.0
"""The shortest time between two signals to one worker about one attempt."""

_MAX_PENDING = 200
"""Maximum number of messages that wait for Kafka. Signals are repeated, so more of them may be dropped."""


class WorkerSignals:
    """Sends cancel signals and queries in the background."""

    def __init__(self, context: BridgeContext) -> None:
        self._context = context
        self._sent_at = LRUCache[tuple[str, str, int, str], float](REMEMBERED)
        self._pending: set[asyncio.Task[None]] = set()

    def cancel(
        self, attempt: AttemptInput, reason: str, *, worker_id: str | None, deadline: float | None = None
    ) -> None:
        """Signal a worker, or all if `worker_id` is None, to stop one epoch of a node. Drop repeats within 2 s."""
        now = self._context.now()
        about = (attempt.task_id, attempt.node_id, attempt.epoch, worker_id or "")
        if now - self._sent_at.get(about, 0.0) < _REPEAT_SEC:
            return
        self._sent_at[about] = now
        signal = cancel_signal(attempt, reason, now, worker_id=worker_id, deadline=deadline)
        self._send(self._context.topics.signals, worker_id, signal)

    def stop_owner(self, record: Dispatch) -> None:
        """Signal the worker that owns a run, if there is one, to stop an attempt that is no longer its own."""
        if record.lease is not None:
            self.cancel(record.attempt, reason_codes.STALE_EPOCH, worker_id=record.lease.worker_id or None)

    def discover(self, attempt: AttemptInput) -> None:
        """Ask which worker runs an attempt. The query reaches only one worker, so there may be no reply (H8)."""
        query = task_discover(attempt, self._context.now())
        self._send(self._context.topics.query, attempt.task_id, query)

    def _send(self, topic: str, key: str | None, envelope: Envelope) -> None:
        if len(self._pending) >= _MAX_PENDING:
            return
        sending = asyncio.create_task(self._produce(topic, key, envelope))
        self._pending.add(sending)
        sending.add_done_callback(self._pending.discard)

    async def _produce(self, topic: str, key: str | None, envelope: Envelope) -> None:
        try:
            await self._context.producer.send(topic, key, envelope.to_json())
        except FlowKitError as error:
            _logger.warning("could not send to topic %s: %s", topic, error)

    async def stop(self) -> None:
        """Drop the messages that Kafka has not stored yet."""
        pending = [*self._pending]
        for sending in pending:
            sending.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
