"""Poison records in real topics: the records behind them are handled soon, and their offsets are committed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from flowkit.bridge.kafka.offsets import Offsets
from flowkit.bridge.kafka.topics import Provisioner
from flowkit.testing import memory_database
from tests.contract.bridge_side import ROLES, BridgeSide
from tests.contract.poison import mixed, unhandled
from tests.integration.bridge.clients import producing
from tests.integration.harness import eventually

if TYPE_CHECKING:
    from tests.integration.bridge.conftest import Names

pytestmark = pytest.mark.server


async def test_records_behind_poison_are_handled_and_committed(names: Names) -> None:
    """A hundred tests of one record each would only repeat the start of the servers."""
    config = names.config(kafka_cmd_partitions=1)
    side = await BridgeSide.create(memory_database(), config)
    await Provisioner(names.connection, config).ensure(ROLES)
    records = await mixed(side)
    async with producing(names) as producer:
        await asyncio.gather(
            *(
                producer.send(each.topic, each.key and each.key.decode(), each.value or b"", 0)
                for each in records
            )
        )
    consuming = [asyncio.create_task(consumer.run()) for consumer in side.bridge.consumers]
    try:

        async def handled() -> bool:
            return await unhandled(side) == []

        await eventually(handled)
        await _until_committed(side, names)
    finally:
        for each in consuming:
            each.cancel()
        await asyncio.gather(*consuming, return_exceptions=True)
        await side.bridge.context.offsets.close()


async def _until_committed(side: BridgeSide, names: Names) -> None:
    context, offsets = side.bridge.context, Offsets(names.connection)
    groups = {
        context.topics.status(ROLES[0]): context.status_group(ROLES[0]),
        context.topics.announce: context.announce_group,
        context.topics.reply: context.announce_group,
    }
    try:
        for topic, group in groups.items():
            ends = await offsets.read_ends(topic)

            async def committed(group: str = group, topic: str = topic, ends: dict[int, int] = ends) -> bool:
                return await offsets.has_caught_up(group, topic, ends)

            await eventually(committed)
    finally:
        await offsets.close()
