"""Sends commands to external workers: chooses a partition, sends TASK_START, and finds commands in their topics."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from flowkit.attempt.failures import failed_attempt
from flowkit.bridge.rules.commands import key_of, task_start
from flowkit.bridge.rules.outcomes import not_in_topic
from flowkit.errors import CommandTooLarge, FlowKitError, SendUncertain

if TYPE_CHECKING:
    from flowkit.adapters.dispatches.record import Dispatch
    from flowkit.bridge.context import BridgeContext
    from flowkit.bridge.placement import Placement
    from flowkit.models import AttemptInput
    from flowkit.protocol.envelope import Envelope

_logger = logging.getLogger("flowkit.bridge")

_RETRY_SEC = 0.5


class CommandSender:
    """Sends the commands of one bridge. Its methods wait while Kafka is unavailable."""

    def __init__(self, context: BridgeContext, placement: Placement) -> None:
        self._context = context
        self._placement = placement

    def sent(self, role: str, partition: int, offset: int | None) -> None:
        """Note that the command for a chosen partition has this offset, or will not be sent (None)."""
        self._placement.sent(role, partition, offset)

    async def choose(self, role: str) -> tuple[int, int]:
        """Return a partition and a lower bound for its end. Wait while Kafka is unavailable."""
        while True:
            try:
                return await self._placement.choose(role)
            except FlowKitError as error:
                if not error.retryable:
                    raise
                _logger.warning("role %s cannot be dispatched: %s; retrying", role, error)
                await asyncio.sleep(_RETRY_SEC)

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
