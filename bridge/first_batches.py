"""Signals workflows that attempts of external workers have stored their first batches, without delaying the events."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from flowkit.attempt.first_batch import signal_first_batch

if TYPE_CHECKING:
    from flowkit.adapters.dispatches.record import Dispatch
    from flowkit.bridge.context import BridgeContext

_REMEMBERED = 10_000


class FirstBatches:
    """Sends the signals in the background, one for each attempt.

    Another bridge, or this one after a restart, may send a signal again. The workflow ignores the repetition.
    """

    def __init__(self, context: BridgeContext) -> None:
        self._context = context
        self._sent: OrderedDict[str, None] = OrderedDict()
        self._sending: dict[str, asyncio.Task[None]] = {}

    def batch_stored(self, record: Dispatch) -> None:
        """Send the signal of an attempt, if it is wanted and this process has not sent it."""
        key = record.key
        if not record.attempt.signal_first_batch or key in self._sent:
            return
        self._sent[key] = None
        if len(self._sent) > _REMEMBERED:
            self._sent.popitem(last=False)
        sending = asyncio.create_task(signal_first_batch(self._context.client, record.attempt, record.run_id))
        self._sending[key] = sending
        sending.add_done_callback(lambda _: self._sending.pop(key, None))

    async def resumed(self, record: Dispatch) -> None:
        """Send the signal of an attempt that begins or that this bridge adopts, if its node has stored batches before."""
        attempt, artifacts = record.attempt, self._context.stores.artifacts
        if attempt.signal_first_batch:
            stored = await self._context.db(lambda: artifacts.batch_uids(attempt.task_id, attempt.node_id))
            if stored:
                self.batch_stored(record)

    async def stop(self) -> None:
        """Drop the signals that Temporal has not accepted yet. The bridge that adopts the attempts sends them."""
        sending = [*self._sending.values()]
        for each in sending:
            each.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
