"""Every record is stored once, also when the broker restarts; what cannot be stored is reported as such."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import OutOfOrderSequenceNumber, UnknownProducerId
from aiokafka.partitioner import murmur2
from aiokafka.producer import message_accumulator

from flowkit.bridge.kafka.producer import MAX_REQUEST_BYTES
from flowkit.errors import CommandTooLarge, KafkaUnavailable, SendUncertain
from tests.integration.bridge.clients import (
    Reading,
    command_topic,
    consuming,
    producing,
)
from tests.integration.harness import EVENT_TIMEOUT_SEC

if TYPE_CHECKING:
    from flowkit.local import Kafka
    from tests.integration.bridge.conftest import Names

pytestmark = pytest.mark.server


async def small_topic(names: Names) -> str:
    """Create a topic that accepts records of at most 2,000 bytes."""
    topic = f"{names.prefix}-small"
    admin = AIOKafkaAdminClient(bootstrap_servers=names.bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(topic, 1, 1, topic_configs={"max.message.bytes": "2000"})])
    await admin.close()
    return topic


async def test_offsets_count_up_in_the_chosen_partition(names: Names) -> None:
    topic = await command_topic(names)
    async with producing(names) as producer:
        assert [await producer.send(topic, "k", b"{}", 1) for _ in range(3)] == [(1, 0), (1, 1), (1, 2)]


async def test_a_key_chooses_the_partition_that_java_clients_choose(names: Names) -> None:
    topic = await command_topic(names)
    async with producing(names) as producer:
        for key in ("t1:n1", "t1:n2", "t2:n1", "ü"):
            expected = (murmur2(key.encode()) & 0x7FFFFFFF) % 3
            assert (await producer.send(topic, key, b"{}"))[0] == expected


async def test_concurrent_sends_get_offsets_of_their_own(names: Names) -> None:
    topic = await command_topic(names)
    async with producing(names) as producer:
        sent = await asyncio.gather(*(producer.send(topic, "k", b"{}", 0) for _ in range(200)))
    assert sorted(offset for _, offset in sent) == list(range(200))


async def test_a_record_above_the_limit_of_the_bridge_is_refused(names: Names) -> None:
    topic = await command_topic(names)
    async with producing(names) as producer:
        with pytest.raises(CommandTooLarge, match=rf"2097152 bytes.*at most {MAX_REQUEST_BYTES}"):
            await producer.send(topic, "k", b"x" * (2 << 20), 0)
        assert await producer.send(topic, "k", b"{}", 0) == (0, 0)


async def test_a_record_above_the_limit_of_the_topic_is_refused_and_later_ones_are_stored(
    names: Names,
) -> None:
    topic = await small_topic(names)
    async with producing(names) as producer:
        assert await producer.send(topic, "k", b"{}") == (0, 0)
        with pytest.raises(CommandTooLarge, match=r"max\.message\.bytes"):
            await producer.send(topic, "k", b"x" * 5_000)
        assert await producer.send(topic, "k", b"{}") == (0, 1)


async def test_a_topic_or_partition_that_does_not_exist_is_named(names: Names) -> None:
    topic = await command_topic(names)
    async with producing(names) as producer:
        with pytest.raises(KafkaUnavailable, match="no partition 3 of the topic"):
            await producer.send(topic, "k", b"{}", 3)
        assert (await producer.send(topic, "k", b"{}", 2))[0] == 2


@pytest.mark.parametrize("error", [OutOfOrderSequenceNumber, UnknownProducerId])
async def test_a_broken_sequence_is_uncertain_and_does_not_concern_later_records(
    names: Names, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await command_topic(names)
    async with producing(names) as producer:
        await producer.send(topic, "k", b"{}", 0)
        client: Any = producer._client
        with monkeypatch.context() as patch:

            async def refused(*_: object, **__: object) -> asyncio.Future[None]:
                future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                future.set_exception(error())
                return future

            patch.setattr(client, "send", refused)
            with pytest.raises(SendUncertain, match=rf"{topic} may or may not be stored"):
                await producer.send(topic, "k", b"{}", 0)
        assert await producer.send(topic, "k", b"{}", 0) == (0, 1)


async def test_a_gap_in_the_sequence_is_uncertain(names: Names) -> None:
    topic = await command_topic(names)
    async with producing(names) as producer:
        await producer.send(topic, "k", b"{}", 0)
        sequences = producer._client._txn_manager._sequence_numbers
        sequences[next(iter(sequences))] += 5
        with pytest.raises(SendUncertain, match="OutOfOrderSequenceNumber"):
            await producer.send(topic, "k", b"{}", 0)
        assert await producer.send(topic, "k", b"{}", 0) == (0, 1)


async def test_a_producer_that_was_stopped_sends_nothing(names: Names) -> None:
    topic = await command_topic(names)
    async with producing(names) as producer:
        pass
    with pytest.raises(KafkaUnavailable, match="stopped"):
        await producer.send(topic, "k", b"{}", 0)


@pytest.mark.parametrize("leader", [None, -1])
async def test_a_record_waits_an_hour_while_its_partition_has_no_leader(
    names: Names, leader: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await command_topic(names)
    async with producing(names) as producer:
        await producer.send(topic, "k", b"{}", 0)
        client: Any = producer._client
        looked = 0
        looked_often = asyncio.Event()

        def without_leader(_: object) -> int | None:
            nonlocal looked
            looked += 1
            if looked == 3:
                looked_often.set()
            return leader

        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600 * looked)
        async with asyncio.timeout(EVENT_TIMEOUT_SEC):
            with monkeypatch.context() as patch:
                patch.setattr(message_accumulator, "time", clock)
                patch.setattr(client.client.cluster, "leader_for_partition", without_leader)
                sending = asyncio.create_task(producer.send(topic, "k", b"{}", 0))
                await looked_often.wait()
            assert await sending == (0, 1)


@pytest.mark.slow
async def test_records_sent_during_a_restart_are_stored_once(frail: Names, frail_broker: Kafka) -> None:
    topic, count = await command_topic(frail), 60
    async with producing(frail) as producer:
        sends = [asyncio.create_task(producer.send(topic, "k", b"%d" % n, n % 3)) for n in range(count // 2)]
        await sends[0]
        restart = asyncio.create_task(asyncio.to_thread(frail_broker.restart))
        sends += [
            asyncio.create_task(producer.send(topic, "k", b"%d" % n, n % 3)) for n in range(count // 2, count)
        ]
        async with asyncio.timeout(EVENT_TIMEOUT_SEC):
            await asyncio.gather(restart, *sends)
    reading = Reading()
    async with consuming(frail, topic, f"{frail.prefix}.check", reading):
        await reading.until({b"%d" % n for n in range(count)})
    assert len(reading.values) == count
