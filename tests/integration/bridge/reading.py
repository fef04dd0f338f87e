"""Reads what is in the topics of a test, from their beginnings."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from aiokafka import AIOKafkaConsumer

from tests.integration.harness import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.bridge.external_tasks import ExternalTasks

Message = dict[str, Any]


async def messages(external: ExternalTasks, topic: str) -> list[Message]:
    """Return the envelopes that a topic contains now."""
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=external.names.bootstrap, auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        ends = await consumer.end_offsets(consumer.assignment())
        found: list[Message] = []
        while any([await consumer.position(place) < end for place, end in ends.items()]):
            read = await consumer.getmany(timeout_ms=200)
            found += [json.loads(record.value) for records in read.values() for record in records]
        return found
    finally:
        await consumer.stop()


async def signals(external: ExternalTasks, node_id: str, epoch: int = 1) -> list[Message]:
    """Return the cancel signals about one attempt."""
    topic = external.config.topic_signals
    return [
        each
        for each in await messages(external, topic)
        if (each["node_id"], each["attempt_epoch"]) == (node_id, epoch)
    ]


async def until_signals(
    external: ExternalTasks, node_id: str, enough: Callable[[list[Message]], bool], epoch: int = 1
) -> list[Message]:
    """Wait until the signals about an attempt are `enough`, and return them."""

    async def look() -> list[Message] | None:
        found = await signals(external, node_id, epoch)
        return found if enough(found) else None

    return await eventually(look)
