"""Reads offsets, group members and single records; every call of `Offsets` ends within a few seconds."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any, TypeVar

from flowkit.bridge.kafka import clients
from flowkit.errors import KafkaUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from flowkit.bridge.kafka.clients import KafkaConnection
    from flowkit.bridge.kafka.record_reader import RecordReader

T = TypeVar("T")

PARTITIONS_TTL_SEC = 30.0
"""How long the list of a topic's partitions is reused."""

FIND_IDLE_SEC = 5.0
"""How long `find` waits for the next records before it reports that Kafka does not respond."""

_FIND_BYTES = 4 << 20
_NO_OFFSET = -1


class Offsets:
    """One admin client and one consumer without a group; both reconnect after an outage.

    Every method raises KafkaUnavailable if Kafka does not respond in time or refuses the call.
    """

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._admin: Any = None
        self._consumer: Any = None
        self._connecting = asyncio.Lock()
        self._partitions: dict[str, tuple[float, tuple[int, ...]]] = {}

    async def close(self) -> None:
        """Close the clients. A later call opens new ones."""
        opened, self._admin, self._consumer = (self._admin, self._consumer), None, None
        await asyncio.gather(*(clients.close(client) for client in opened if client is not None))

    async def read_committed(self, group: str, topic: str) -> dict[int, int | None]:
        """Return the committed offset of each partition; None where the group has none."""
        partitions = await self.list_partitions(topic)

        async def read() -> dict[int, int | None]:
            return await committed_offsets(await self._open_admin(), group, topic, partitions)

        return await self._call(read, f"reading the offsets of the group {group}")

    async def read_ends(self, topic: str) -> dict[int, int]:
        """Return, for each partition, the offset that its next record will get."""
        partitions = await self.list_partitions(topic)
        return await self._call(
            lambda: self._read_edges("end_offsets", topic, partitions), f"reading {topic}"
        )

    async def read_begins(self, topic: str) -> dict[int, int]:
        """Return, for each partition, the offset of its oldest record that still exists."""
        partitions = await self.list_partitions(topic)
        return await self._call(
            lambda: self._read_edges("beginning_offsets", topic, partitions), f"reading {topic}"
        )

    async def read_members(self, group: str) -> dict[str, frozenset[tuple[str, int]]]:
        """Return the assigned (topic, partition) pairs of each member; empty if the group has no members."""

        async def read() -> dict[str, frozenset[tuple[str, int]]]:
            return await group_members(await self._open_admin(), group)

        return await self._call(read, f"reading the members of the group {group}")

    async def has_caught_up(self, group: str, topic: str, ends: Mapping[int, int]) -> bool:
        """Return whether the group has committed at least these offsets; without an offset, it is at the beginning."""
        committed = await self.read_committed(group, topic)
        behind = {number: end for number, end in ends.items() if (committed.get(number) or 0) < end}
        if not behind:
            return True
        begins = await self.read_begins(topic)
        return all(
            _position(committed.get(number), begins.get(number, 0)) >= end for number, end in behind.items()
        )

    async def read_lag(self, group: str, topic: str) -> int:
        """Return the number of records that the group has not committed, over all partitions."""
        committed, begins, ends = (
            await self.read_committed(group, topic),
            await self.read_begins(topic),
            await self.read_ends(topic),
        )
        return sum(
            max(0, end - _position(committed.get(number), begins.get(number, 0)))
            for number, end in ends.items()
        )

    async def find(self, topic: str, partition: int, start: int, dedup_id: str) -> int | None:
        """Return the offset of the first record from `start` on that has this `dedup_id`, or None.

        It reads up to the end of the partition as of now.
        """
        await self._check_partition(topic, partition)
        what, address = f"searching {topic}", self._connection.bootstrap
        search = _RecordSearch(self._connection, topic, partition)
        try:
            offsets = await clients.call_with_retries(lambda: search.open(start), what=what, address=address)
            return await search.run(offsets, dedup_id)
        except clients.kafka_errors() as error:
            raise clients.unavailable(what, address, error) from error
        finally:
            await search.close()

    async def _check_partition(self, topic: str, partition: int) -> None:
        """Raise KafkaUnavailable for a partition that does not exist; the known partitions may be outdated."""
        if partition in await self.list_partitions(topic):
            return
        self._partitions.pop(topic, None)
        if partition not in await self.list_partitions(topic):
            raise KafkaUnavailable(
                f"Kafka at {self._connection.bootstrap} has no partition {partition} of the topic {topic}; "
                "if the topic was created again, give it as many partitions as before"
            )

    async def list_partitions(self, topic: str) -> tuple[int, ...]:
        """Return the partitions of a topic, at most half a minute old. Raise KafkaUnavailable if it has none."""
        read_at, known = self._partitions.get(topic, (0.0, ()))
        if known and time.monotonic() - read_at < PARTITIONS_TTL_SEC:
            return known
        topic_info = await self._call(lambda: self._describe(topic), f"reading {topic}")
        if not topic_info:
            raise KafkaUnavailable(
                f"Kafka at {self._connection.bootstrap} has no topic {topic}, or its ACLs hide it; "
                "create the topic, or grant DESCRIBE on it"
            )
        self._partitions[topic] = (time.monotonic(), topic_info)
        return topic_info

    async def _call(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        try:
            return await clients.call_with_retries(call, what=what, address=self._connection.bootstrap)
        except KafkaUnavailable:
            await self.close()
            raise

    async def _read_edges(self, method: str, topic: str, partitions: tuple[int, ...]) -> dict[int, int]:
        from aiokafka import TopicPartition

        consumer = await self._open_consumer()
        found = await getattr(consumer, method)([TopicPartition(topic, number) for number in partitions])
        return {each.partition: offset for each, offset in found.items()}

    async def _describe(self, topic: str) -> tuple[int, ...]:
        """Return the partitions of a topic. The request names no topic, because a broker may create a named one."""
        topics = await (await self._open_admin()).describe_topics()
        found = [each["partitions"] for each in topics if each["topic"] == topic]
        return tuple(sorted(each["partition"] for partitions in found for each in partitions))

    async def _open_admin(self) -> Any:
        from aiokafka.admin import AIOKafkaAdminClient

        async with self._connecting:
            if self._admin is None:
                self._admin = await clients.start(AIOKafkaAdminClient(**_client_options(self._connection)))
            return self._admin

    async def _open_consumer(self) -> Any:
        from aiokafka import AIOKafkaConsumer

        async with self._connecting:
            if self._consumer is None:
                self._consumer = await clients.start(AIOKafkaConsumer(**_client_options(self._connection)))
            return self._consumer


def _client_options(connection: KafkaConnection) -> dict[str, Any]:
    return {**connection.options(), "request_timeout_ms": int(clients.REQUEST_TIMEOUT_SEC * 1000)}


def _position(committed: int | None, begin: int) -> int:
    """Return where a group continues to read; a group without an offset begins with the oldest record."""
    return begin if committed is None else max(committed, begin)


class _RecordSearch:
    """A search for one record, with a consumer of its own."""

    def __init__(self, connection: KafkaConnection, topic: str, partition: int) -> None:
        self._connection = connection
        self._topic = topic
        self._partition = partition
        self._consumer: Any = None
        self._reader: RecordReader
        self._where: Any = None

    async def open(self, start: int) -> range:
        """Connect, and return the offsets from `start` to the end as of now."""
        from aiokafka import AIOKafkaConsumer, TopicPartition

        from flowkit.bridge.kafka.record_reader import RecordReader

        where = TopicPartition(self._topic, self._partition)
        if self._consumer is None:
            options = {**_client_options(self._connection), "auto_offset_reset": "earliest"}
            options |= dict.fromkeys(("max_partition_fetch_bytes", "fetch_max_bytes"), _FIND_BYTES)
            self._reader = RecordReader(AIOKafkaConsumer(**options))
            self._consumer = await self._reader.start()
            self._consumer.assign([where])
        end = (await self._consumer.end_offsets([where]))[where]
        begin = (await self._consumer.beginning_offsets([where]))[where]
        self._where = where
        return range(max(start, begin), end)

    async def close(self) -> None:
        """Close the consumer."""
        if self._consumer is not None:
            await clients.close(self._consumer)

    async def run(self, offsets: range, dedup_id: str) -> int | None:
        """Return the offset of the first record that has this `dedup_id`, or None. Raise TimeoutError."""
        if not offsets:
            return None
        self._consumer.seek(self._where, offsets.start)
        heard_at = time.monotonic()
        while await self._consumer.position(self._where) < offsets.stop:
            batches = await self._reader.read(timeout_ms=1_000)
            if records := batches.get(self._where):
                heard_at = time.monotonic()
                found = (each.offset for each in records if has_dedup_id(each.value, dedup_id))
                if (offset := next(found, None)) is not None:
                    return int(offset) if offset < offsets.stop else None
            elif time.monotonic() - heard_at > FIND_IDLE_SEC:
                raise TimeoutError
        return None


def has_dedup_id(value: bytes | None, dedup_id: str) -> bool:
    """Return whether the value of a record is a JSON object with this `dedup_id`; a malformed value has none."""
    if value is None or dedup_id.encode() not in value:
        return False
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("dedup_id") == dedup_id


async def committed_offsets(
    admin: Any, group: str, topic: str, partitions: Iterable[int]
) -> dict[int, int | None]:
    """Return the committed offset of each partition; None where the group has none.

    Raise an aiokafka error, which may be transient.
    """
    from aiokafka import TopicPartition
    from aiokafka.errors import GroupLoadInProgressError

    wanted = [TopicPartition(topic, number) for number in partitions]
    if not wanted:
        return {}
    committed = await admin.list_consumer_group_offsets(group, partitions=wanted)
    # aiokafka ignores errors that concern the whole group; Kafka then returns no partitions. Absent partitions must
    # not look like partitions without an offset.
    if any(each not in committed for each in wanted):
        raise GroupLoadInProgressError(f"the offsets of the group {group} are not available")
    return {
        each.partition: None if committed[each].offset == _NO_OFFSET else committed[each].offset
        for each in wanted
    }


async def group_members(admin: Any, group: str) -> dict[str, frozenset[tuple[str, int]]]:
    """Return the (topic, partition) pairs of each member. Raise an aiokafka error, which may be transient.

    While a group rebalances, its members have no partitions.
    """
    from aiokafka import errors

    (response,) = await admin.describe_consumer_groups([group])
    ((code, _, _, _, _, members, *_),) = response.groups
    if (error := errors.for_code(code)) not in (errors.NoError, errors.GroupIdNotFound):
        raise error(group)
    return {member[0]: _assignment(member[4]) for member in members}


def _assignment(encoded: bytes) -> frozenset[tuple[str, int]]:
    """Decode the assignment of a member; a member that the group has not assigned anything yet has no bytes."""
    from aiokafka.coordinator.protocol import ConsumerProtocol

    if not encoded:
        return frozenset()
    decoded = ConsumerProtocol.ASSIGNMENT.decode(encoded)
    return frozenset((each.topic, each.partition) for each in decoded.partitions())
