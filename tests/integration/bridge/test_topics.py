"""Topics are created once, and workers that join later still read the first commands."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from flowkit.bridge.kafka.offsets import Offsets
from flowkit.bridge.kafka.topics import Provisioner, Topics, worker_group
from flowkit.errors import KafkaUnavailable
from tests.integration.bridge.clients import command_topic, producing, worker
from tests.integration.harness import EVENT_TIMEOUT_SEC

if TYPE_CHECKING:
    from tests.integration.bridge.conftest import Names

pytestmark = pytest.mark.server


async def test_bridges_that_start_together_create_each_topic_once(names: Names) -> None:
    cfg, roles = names.config(), ["a", "b"]
    await asyncio.gather(*(Provisioner(names.connection, cfg).ensure(roles) for _ in range(4)))
    offsets, topics = Offsets(names.connection), Topics.of(cfg)
    counts = {topic: len(await offsets.list_partitions(topic)) for topic in topics.all(roles)}
    assert counts[topics.cmd("a")] == counts[topics.status("b")] == 3
    assert {counts[each] for each in (topics.announce, topics.query, topics.reply, topics.signals)} == {1}
    await offsets.close()


async def test_an_existing_topic_keeps_its_partitions(names: Names) -> None:
    topic = await command_topic(names)
    assert topic == await command_topic(names, kafka_cmd_partitions=9)
    offsets = Offsets(names.connection)
    assert await offsets.list_partitions(topic) == (0, 1, 2)
    await offsets.close()


async def test_without_permission_to_create_topics_the_missing_ones_are_named(names: Names) -> None:
    cfg = names.config(kafka_create_topics=False)
    with pytest.raises(KafkaUnavailable, match=rf"no topics .*{names.prefix}-announce.*kafka_create_topics"):
        await Provisioner(names.connection, cfg).ensure([])
    await Provisioner(names.connection, names.config()).ensure([])
    await Provisioner(names.connection, cfg).ensure([])


async def test_too_many_replicas_are_reported_with_the_setting(names: Names) -> None:
    cfg = names.config(kafka_replication_factor=7)
    with pytest.raises(KafkaUnavailable, match=r"kafka_replication_factor \(7\)"):
        await Provisioner(names.connection, cfg).ensure([])


async def test_a_worker_that_joins_later_reads_the_first_command(names: Names) -> None:
    cfg, role = names.config(), names.role()
    provisioner, topic = Provisioner(names.connection, cfg), Topics.of(cfg).cmd(role)
    await provisioner.ensure([role])
    async with producing(names) as producer:
        await producer.send(topic, "k", b"{}", 1)
    seeded = await provisioner.seed(role)
    assert (seeded.committed, seeded.had_members) == ({0: 0, 1: 0, 2: 0}, False)
    async with worker(names, topic) as consumer, asyncio.timeout(EVENT_TIMEOUT_SEC):
        assert (await consumer.getone()).offset == 0


async def test_an_older_topic_is_seeded_at_its_end_and_only_once(names: Names) -> None:
    topic, role = await command_topic(names), names.role()
    async with producing(names) as producer:
        await producer.send(topic, "k", b"{}", 1)
        provisioner = Provisioner(names.connection, names.config())
        await provisioner.ensure([role])
        assert (await provisioner.seed(role)).committed == {0: 0, 1: 1, 2: 0}
        await producer.send(topic, "k", b"{}", 1)
    assert (await provisioner.seed(role)).committed == {}


async def test_a_group_with_members_keeps_its_offsets(names: Names) -> None:
    topic, role = await command_topic(names), names.role()
    async with worker(names, topic):
        seeded = await Provisioner(names.connection, names.config()).seed(role)
        assert (seeded.committed, seeded.had_members) == ({}, True)
    offsets = Offsets(names.connection)
    assert set((await offsets.read_committed(worker_group(role), topic)).values()) == {None}
    await offsets.close()


async def test_a_partition_with_an_offset_is_not_seeded(names: Names) -> None:
    topic, role = await command_topic(names), names.role()
    consumer = AIOKafkaConsumer(bootstrap_servers=names.bootstrap, group_id=worker_group(role))
    await consumer.start()
    consumer.assign([TopicPartition(topic, 2)])
    await consumer.commit({TopicPartition(topic, 2): 0})
    await consumer.stop()
    seeded = await Provisioner(names.connection, names.config()).seed(role)
    assert set(seeded.committed) == {0, 1}


async def test_a_missing_topic_is_reported_instead_of_seeded(names: Names) -> None:
    with pytest.raises(KafkaUnavailable, match=f"no topic {names.prefix}-cmd-nothing"):
        await Provisioner(names.connection, names.config()).seed("nothing")
