"""A consumer skips no record: not after errors of its handler, nor after rebalances and restarts of the broker."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import cramjam
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.records_to_delete import RecordsToDelete

from flowkit.bridge.kafka import consumer as kafka_consumer
from flowkit.bridge.kafka import record_reader
from flowkit.bridge.kafka.consumer import RecordConsumer
from flowkit.bridge.kafka.offsets import Offsets
from flowkit.limits import KAFKA_RECORD_BYTES
from tests.integration.bridge.clients import (
    Reading,
    command_topic,
    consuming,
    producing,
)
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually
from tests.kafka_batches import (
    CODECS,
    MB,
    Codec,
    batch,
    compress,
    good_large_good,
    peak_memory_mb,
    record,
    reset_peak_memory,
    send_batch,
)

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


async def test_a_record_of_300_mb_takes_no_memory_and_none_beside_it_is_lost(names: Names) -> None:
    """The limits of a fetch count compressed bytes: a few kilobytes can decompress to gigabytes."""
    topic, group, reading = await command_topic(names), f"{names.prefix}.g", Reading()
    for codec in CODECS:
        good = partial(_good, codec)
        raw = good_large_good(codec, megabytes=300 if codec is Codec.zstd else 10, good=good)
        await send_batch(names.bootstrap, topic, raw)
    reset_peak_memory()
    before = peak_memory_mb()
    async with consuming(names, topic, group, reading):
        cut = bytes(KAFKA_RECORD_BYTES + 1)
        await reading.until({_good(codec, number) for codec in CODECS for number in (0, 2)})
        assert reading.values.count(cut) == len(CODECS)
        assert await committed_all(names, topic, group)
    assert peak_memory_mb() - before < 100


def _good(codec: Codec, number: int) -> bytes:
    return f"{codec.name} {number}".encode()


async def test_records_that_brokers_accept_and_aiokafka_does_not_are_handled(names: Names) -> None:
    """A name of a header that is not UTF-8 raises an error in aiokafka, and a record without a time has None."""
    topic, group, reading = await command_topic(names), f"{names.prefix}.g", Reading()
    odd = record(0, b"odd", headers=[(b"\xff", b"v")])
    await send_batch(names.bootstrap, topic, batch(odd, 1, time_ms=-1))
    async with consuming(names, topic, group, reading):
        await reading.until({b"odd"})


async def test_a_batch_that_cannot_be_read_holds_the_consumer_until_it_is_deleted(
    names: Names, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(record_reader, "_MEMORY_BITS", 20)
    monkeypatch.setattr(kafka_consumer, "UNREADABLE_SEC", 0.05)
    monkeypatch.setattr(kafka_consumer, "RELEASED_SEC", 0.1)
    topic, group, reading = await command_topic(names), f"{names.prefix}.g", Reading()
    block = bytes(cramjam.snappy.compress_raw(record(0, bytes(2 * MB))))
    for raw in (
        batch(record(0, b"0") + record(1, b"1"), 2),
        batch(block, 1, Codec.snappy),
        batch(record(0, b"3"), 1),
    ):
        await send_batch(names.bootstrap, topic, raw, 1)
    async with consuming(names, topic, group, reading) as consumer:
        await eventually(lambda: _true(consumer.held is not None and b"1" in reading.values))
        assert consumer.held is not None
        assert f"(partition 1 of the topic {topic}): the record at offset 2 cannot be read: " in consumer.held
        assert consumer.held.endswith("delete the records before offset 3 with kafka-delete-records")
        assert consumer.health.last_error == consumer.held
        await delete_records(names, topic, 1, 3)
        await reading.until({b"3"})
        await eventually(lambda: _true(consumer.held is None))
    assert bytes(2 * MB) not in reading.values
    assert caplog.text.count("is held: a batch in Kafka cannot be read") == 1


async def delete_records(names: Names, topic: str, partition: int, before: int) -> None:
    """Delete the records of a partition before an offset, as kafka-delete-records does."""
    admin = AIOKafkaAdminClient(bootstrap_servers=names.bootstrap)
    await admin.start()
    try:
        await admin.delete_records({TopicPartition(topic, partition): RecordsToDelete(before)})
    finally:
        await admin.close()


async def test_other_clients_of_the_process_read_as_before(names: Names) -> None:
    topic, group, reading = await command_topic(names), f"{names.prefix}.g", Reading()
    large = bytes(KAFKA_RECORD_BYTES + 200_000)
    raw = batch(compress(Codec.zstd, [record(0, large)]), 1, Codec.zstd)
    await send_batch(names.bootstrap, topic, raw)
    async with consuming(names, topic, group, reading):
        await reading.until({large[: KAFKA_RECORD_BYTES + 1]})
        other = AIOKafkaConsumer(topic, bootstrap_servers=names.bootstrap, auto_offset_reset="earliest")
        async with other:
            assert (await other.getone()).value == large


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
