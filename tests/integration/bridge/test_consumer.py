"""A consumer skips no record: not after errors of its handler, nor after rebalances and restarts of the broker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from aiokafka import AIOKafkaProducer

from flowkit.bridge.kafka import consumer as kafka_consumer
from flowkit.bridge.kafka.consumer import RecordConsumer
from flowkit.bridge.kafka.offsets import Offsets
from tests.integration.bridge.clients import (
    Reading,
    command_topic,
    consuming,
    producing,
)
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.bridge.kafka.producer import Producer
    from tests.integration.bridge.conftest import Names

pytestmark = pytest.mark.server


def numbers(start: int, stop: int) -> list[bytes]:
    """Return the values of some records."""
    return [b"%d" % number for number in range(start, stop)]


async def send_all(producer: Producer, topic: str, values: Sequence[bytes]) -> None:
    """Send records to all partitions in turn."""
    await asyncio.gather(*(producer.send(topic, "k", value, int(value) % 3) for value in values))


async def committed_all(names: Names, topic: str, group: str) -> bool:
    """Wait until the group has committed everything that the topic holds."""
    offsets = Offsets(names.connection)
    ends = await offsets.read_ends(topic)
    try:
        return await eventually(lambda: offsets.has_caught_up(group, topic, ends))
    finally:
        await offsets.close()


async def test_records_are_handled_in_order_at_once_and_then_committed(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_consumer, "POLL_MS", 3_600_000)  # No fixed interval.
    topic, group, reading = await command_topic(names), f"{names.prefix}.g", Reading()
    async with producing(names) as producer, consuming(names, topic, group, reading) as consumer:
        for value in numbers(0, 20):
            await producer.send(topic, "k", value, 1)
        await reading.until(set(numbers(0, 20)))
        assert reading.values == numbers(0, 20)
        for value in numbers(20, 30):
            await producer.send(topic, "k", value, 1)
            await reading.until({value})
        assert await committed_all(names, topic, group)
        assert consumer.positions == {(topic, 1): 30}
        assert (consumer.health.running, consumer.connected) == (True, True)
    assert (consumer.health.running, consumer.connected) == (False, False)


async def test_records_of_every_compression_are_handled(names: Names) -> None:
    """A record that the client cannot decompress would stop the topic for ever."""
    topic, group, reading = await command_topic(names), f"{names.prefix}.g", Reading()
    codecs = ("gzip", "snappy", "lz4", "zstd")
    for codec in codecs:
        client = AIOKafkaProducer(bootstrap_servers=names.bootstrap, compression_type=codec)
        async with client:
            await client.send_and_wait(topic, codec.encode() * 100, partition=0)
    async with consuming(names, topic, group, reading):
        await reading.until({codec.encode() * 100 for codec in codecs})


async def test_the_next_member_continues_after_the_last_commit(names: Names) -> None:
    topic, group = await command_topic(names), f"{names.prefix}.g"
    async with producing(names) as producer:
        for start in (0, 10):
            reading = Reading()
            await send_all(producer, topic, numbers(start, start + 10))
            async with consuming(names, topic, group, reading):
                await reading.until(set(numbers(start, start + 10)))
                assert await committed_all(names, topic, group)
            assert len(reading.values) == 10


async def test_records_that_cannot_be_handled_are_handled_again(
    names: Names, caplog: pytest.LogCaptureFixture
) -> None:
    topic, group, reading = await command_topic(names), f"{names.prefix}.g", Reading()
    reading.failures = 2
    async with producing(names) as producer, consuming(names, topic, group, reading) as consumer:
        for value in numbers(0, 5):
            await producer.send(topic, "k", value, 0)
        await reading.until(set(numbers(0, 5)))
        assert reading.values == numbers(0, 5)
        assert consumer.health.last_error == "ValueError: the test refuses these records"
    assert caplog.text.count("cannot handle") == 2


async def test_records_that_fail_are_not_committed(names: Names) -> None:
    topic, group, reading = await command_topic(names), f"{names.prefix}.g", Reading()
    reading.failures = 1_000
    offsets = Offsets(names.connection)
    async with producing(names) as producer:
        await producer.send(topic, "k", b"0", 0)
        async with consuming(names, topic, group, reading):
            await eventually(lambda: _true(reading.failures <= 998))
    assert await offsets.read_committed(group, topic) == {0: None, 1: None, 2: None}
    await offsets.close()


async def _true(value: bool) -> bool:
    return value


async def test_nothing_is_lost_when_members_join_and_leave(names: Names) -> None:
    topic, group, reading = await command_topic(names), f"{names.prefix}.g", Reading()
    async with producing(names) as producer, consuming(names, topic, group, reading):
        await send_all(producer, topic, numbers(0, 50))
        for start in (50, 150, 250):
            async with consuming(names, topic, group, reading):
                await send_all(producer, topic, numbers(start, start + 50))
                await reading.until(set(numbers(0, start + 50)))
            await send_all(producer, topic, numbers(start + 50, start + 100))
        await reading.until(set(numbers(0, 350)))
        assert await committed_all(names, topic, group)


async def test_a_rebalance_waits_for_the_records_in_progress(names: Names) -> None:
    topic, group, other = await command_topic(names), f"{names.prefix}.g", Reading()
    begun, finish, values = asyncio.Event(), asyncio.Event(), list[bytes]()

    async def handle(records: Sequence[Any]) -> None:
        begun.set()
        await finish.wait()
        values.extend(record.value for record in records)

    slow = RecordConsumer(names.connection, [topic], group, handle)
    running = asyncio.create_task(slow.run())
    async with producing(names) as producer, asyncio.timeout(EVENT_TIMEOUT_SEC):
        await send_all(producer, topic, numbers(0, 1))
        await begun.wait()
        async with consuming(names, topic, group, other):
            offsets = Offsets(names.connection)
            await eventually(lambda: _rebalancing(offsets, group))
            finish.set()
            await eventually(lambda: _members(offsets, group, 2))
            assert await committed_all(names, topic, group)
            await offsets.close()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (values, other.values) == (numbers(0, 1), [])


async def _rebalancing(offsets: Offsets, group: str) -> bool:
    """Whether a second member waits to join."""
    members = await offsets.read_members(group)
    return len(members) == 2 or not any(members.values())


async def _members(offsets: Offsets, group: str, count: int) -> bool:
    return sum(bool(assigned) for assigned in (await offsets.read_members(group)).values()) == count
