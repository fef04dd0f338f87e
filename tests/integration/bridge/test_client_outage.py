"""What each client of the bridge does in an outage of Kafka, which they share: an outage costs seconds of a
processor."""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.bridge.kafka.offsets import Offsets
from flowkit.bridge.kafka.producer import Producer
from flowkit.bridge.kafka.topics import worker_group
from flowkit.errors import KafkaUnavailable, SendUncertain
from tests.integration.bridge.clients import Reading, command_topic, consuming, producing
from tests.integration.bridge.conftest import Names
from tests.integration.bridge.test_consumer import committed_all, numbers, send_all
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from flowkit.local import Kafka

    Part = Callable[[Names, asyncio.Barrier, pytest.LogCaptureFixture], Coroutine[Any, Any, None]]

pytestmark = [pytest.mark.server, pytest.mark.slow]


async def test_every_client_survives_an_outage(
    frail_broker: Kafka, frail: Names, caplog: pytest.LogCaptureFixture
) -> None:
    """Each part prepares, waits for the outage, acts in it, waits for its end, and checks what it finds."""
    caplog.set_level(logging.INFO, "flowkit.bridge")
    parts: tuple[Part, ...] = (
        offsets_end_their_calls_within_seconds,
        producer_that_starts_during_an_outage_sends_after_it,
        stopping_drops_what_was_not_sent,
        consumer_loses_nothing,
        consumer_that_starts_during_an_outage_reads_after_it,
    )
    phase = asyncio.Barrier(len(parts) + 1)
    async with asyncio.TaskGroup() as together:
        for part in parts:
            together.create_task(part(Names(frail.bootstrap), phase, caplog))
        await phase.wait()
        await asyncio.to_thread(frail_broker.kill)
        await phase.wait()
        await phase.wait()
        await asyncio.to_thread(frail_broker.start)
        await phase.wait()


async def begin(phase: asyncio.Barrier) -> None:
    """Wait until all parts are prepared and the outage has begun."""
    await phase.wait()
    await phase.wait()


async def end(phase: asyncio.Barrier) -> None:
    """Wait until all parts have acted in the outage and it is over."""
    await phase.wait()
    await phase.wait()


async def offsets_end_their_calls_within_seconds(
    names: Names, phase: asyncio.Barrier, caplog: pytest.LogCaptureFixture
) -> None:
    topic, group = await command_topic(names), worker_group(names.role())
    offsets = Offsets(names.connection)
    before = await offsets.read_ends(topic)
    await begin(phase)
    for call in (
        lambda: offsets.read_ends(topic),
        lambda: offsets.read_committed(group, topic),
        lambda: offsets.read_members(group),
    ):
        async with asyncio.timeout(EVENT_TIMEOUT_SEC):
            with pytest.raises(KafkaUnavailable, match=names.bootstrap):
                await call()
    await end(phase)
    assert await offsets.read_ends(topic) == before
    assert await offsets.read_committed(group, topic) == {0: None, 1: None, 2: None}
    await offsets.close()


async def producer_that_starts_during_an_outage_sends_after_it(
    names: Names, phase: asyncio.Barrier, caplog: pytest.LogCaptureFixture
) -> None:
    topic = await command_topic(names)
    await begin(phase)
    producer = Producer(names.connection)
    sending = asyncio.create_task(producer.send(topic, "k", b"{}", 0))
    await eventually(lambda: has("the producer cannot connect" in caplog.text))
    await end(phase)
    async with asyncio.timeout(EVENT_TIMEOUT_SEC):
        assert await sending == (0, 0)
    assert caplog.text.count("the producer cannot connect") == 1
    await producer.stop()


async def stopping_drops_what_was_not_sent(
    names: Names, phase: asyncio.Barrier, caplog: pytest.LogCaptureFixture
) -> None:
    topic = await command_topic(names)
    producer = Producer(names.connection)
    assert await producer.send(topic, "k", b"{}", 0) == (0, 0)
    await begin(phase)
    sending = asyncio.create_task(producer.send(topic, "k", b"{}", 0))
    async with asyncio.timeout(EVENT_TIMEOUT_SEC):
        await asyncio.wait([sending], timeout=0.5)
        await producer.stop()
        with pytest.raises((SendUncertain, KafkaUnavailable)):
            await sending
    await end(phase)
    offsets = Offsets(names.connection)
    assert (await offsets.read_ends(topic))[0] == 1
    await offsets.close()


async def consumer_loses_nothing(
    names: Names, phase: asyncio.Barrier, caplog: pytest.LogCaptureFixture
) -> None:
    topic, group, reading = await command_topic(names), f"{names.prefix}.g", Reading()
    async with producing(names) as producer, consuming(names, topic, group, reading) as consumer:
        await send_all(producer, topic, numbers(0, 30))
        await reading.until(set(numbers(0, 10)))
        await begin(phase)
        await eventually(lambda: has(not consumer.connected))
        await end(phase)
        await send_all(producer, topic, numbers(30, 60))
        await reading.until(set(numbers(0, 60)))
        assert await committed_all(names, topic, group)
        await eventually(lambda: has(consumer.connected))
    assert_each_change_is_logged_once(caplog, group, ["connected", "lost", "connected"])


async def consumer_that_starts_during_an_outage_reads_after_it(
    names: Names, phase: asyncio.Barrier, caplog: pytest.LogCaptureFixture
) -> None:
    topic, group, reading = await command_topic(names), f"{names.prefix}.g", Reading()
    await begin(phase)
    async with consuming(names, topic, group, reading) as consumer:
        await eventually(lambda: has(consumer.health.last_error is not None))
        await end(phase)
        async with producing(names) as producer:
            await send_all(producer, topic, numbers(0, 3))
        await reading.until(set(numbers(0, 3)))
    assert_each_change_is_logged_once(caplog, group, ["lost", "connected"])


def assert_each_change_is_logged_once(
    caplog: pytest.LogCaptureFixture, group: str, expected: list[str]
) -> None:
    """Check the changes of a connection. While a broker starts on a busy machine, a consumer may lose it again."""
    texts = {"lost": f"{group} lost Kafka", "connected": f"{group} is connected to Kafka"}
    logged = [name for each in caplog.messages for name, text in texts.items() if text in each]
    assert logged[: len(expected)] == expected
    assert all(before != after for before, after in pairwise(logged)), logged
    assert logged[-1] == expected[-1]


async def has(value: bool) -> bool:
    """Return a value that is looked up now."""
    return value
