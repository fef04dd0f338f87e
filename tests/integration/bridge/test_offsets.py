"""Offsets, members and records are read as they are, and an outage ends every call within seconds."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from aiokafka import TopicPartition

from flowkit.bridge.kafka.offsets import Offsets
from flowkit.bridge.kafka.topics import worker_group
from flowkit.errors import KafkaUnavailable
from tests.integration.bridge.clients import command_topic, producing, worker
from tests.integration.harness import EVENT_TIMEOUT_SEC

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.bridge.conftest import Names

pytestmark = pytest.mark.server


@pytest.fixture
async def offsets(names: Names) -> AsyncIterator[Offsets]:
    """Offsets of the shared broker."""
    made = Offsets(names.connection)
    yield made
    await made.close()


def envelope(dedup_id: str) -> bytes:
    """Return the value of a record with a dedup id."""
    return json.dumps({"v": 1, "dedup_id": dedup_id, "payload": {}}).encode()


async def test_offsets_of_a_group_follow_its_commits(names: Names, offsets: Offsets) -> None:
    topic, group = await command_topic(names), worker_group(names.role())
    assert await offsets.read_committed(group, topic) == {0: None, 1: None, 2: None}
    assert await offsets.read_members(group) == {}
    async with producing(names) as producer:
        for _ in range(3):
            await producer.send(topic, None, b"{}", 1)
    ends = await offsets.read_ends(topic)
    assert (ends, await offsets.read_begins(topic)) == ({0: 0, 1: 3, 2: 0}, {0: 0, 1: 0, 2: 0})
    assert not await offsets.has_caught_up(group, topic, ends)
    assert await offsets.has_caught_up(group, topic, {0: 0, 1: 0, 2: 0})
    assert await offsets.read_lag(group, topic) == 3
    async with worker(names, topic) as consumer:
        await consumer.commit({TopicPartition(topic, 1): 3})
        assert await offsets.read_committed(group, topic) == {0: None, 1: 3, 2: None}
        assert (await offsets.read_lag(group, topic), await offsets.has_caught_up(group, topic, ends)) == (
            0,
            True,
        )


async def test_members_are_listed_with_their_partitions(names: Names, offsets: Offsets) -> None:
    topic, group = await command_topic(names), worker_group(names.role())
    async with worker(names, topic) as one, worker(names, topic) as two:
        async with asyncio.timeout(EVENT_TIMEOUT_SEC):
            while len(one.assignment()) == 3:
                await one.getmany(timeout_ms=100)
        members = await offsets.read_members(group)
        assert len(members) == 2
        owned = {frozenset(map(tuple, each.assignment())) for each in (one, two)}
        assert set(members.values()) == owned
        assert set.union(*map(set, owned)) == {(topic, number) for number in range(3)}


async def test_a_record_is_found_by_its_dedup_id(names: Names, offsets: Offsets) -> None:
    topic = await command_topic(names)
    malformed = [
        b"not json about d1",
        b"[1]",
        b'"d1"',
        b"\xff\xfe d1",
        b"[" * 100_000 + b"d1",
        b'{"x": "d1"}',
    ]
    async with producing(names) as producer:
        for value in [*malformed, envelope("d0"), envelope("d1"), envelope("d1")]:
            await producer.send(topic, None, value, 2)
    assert await offsets.find(topic, 2, 0, "d1") == 7
    assert await offsets.find(topic, 2, 8, "d1") == 8
    assert await offsets.find(topic, 2, 9, "d1") is None
    assert await offsets.find(topic, 2, 0, "d7") is None
    assert await offsets.find(topic, 0, 0, "d1") is None


async def test_a_search_beyond_the_end_finds_nothing(names: Names, offsets: Offsets) -> None:
    topic = await command_topic(names)
    assert await offsets.find(topic, 0, 1_000, "d1") is None
    with pytest.raises(KafkaUnavailable, match="no partition 3"):
        await offsets.find(topic, 3, 0, "d1")


async def test_a_missing_topic_is_named(names: Names, offsets: Offsets) -> None:
    for call in (offsets.read_ends("no-such-topic"), offsets.read_committed("g", "no-such-topic")):
        with pytest.raises(KafkaUnavailable, match="no topic no-such-topic"):
            await call
