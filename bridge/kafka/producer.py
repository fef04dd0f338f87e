"""The idempotent Kafka producer of the bridge."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Any

from flowkit.bridge.kafka import clients
from flowkit.errors import CommandTooLarge, KafkaUnavailable, SendUncertain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.bridge.kafka.clients import KafkaConnection

_logger = logging.getLogger("flowkit.bridge")

CONNECT_TIMEOUT_SEC = 10.0
RECONNECT_PAUSE_SEC = 0.5
MAX_REQUEST_BYTES = 1 << 20
"""Largest record that the producer sends; the default limit of brokers is about the same."""
NO_OFFSET = -1
_TRIES = 3


class Producer:
    """Sends records one by one, each exactly once as long as one underlying client lives.

    While Kafka is away, sends wait; the caller limits the wait. Cancelling a send does not withdraw the record.
    """

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._client: Any = None
        self._connecting = asyncio.Lock()
        self._stopped = False

    async def stop(self) -> None:
        """Wait a few seconds for pending sends, then close. Sends that are still pending raise SendUncertain."""
        self._stopped = True
        client, self._client = self._client, None
        if client is not None:
            await _close(client)

    async def send(
        self,
        topic: str,
        key: str | bytes | None,
        value: bytes,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> tuple[int, int]:
        """Send a record and return its partition and offset once all in-sync replicas have it.

        The offset is -1 if Kafka had already stored the record but no longer knows where. Raise CommandTooLarge,
        or KafkaUnavailable, if the record was not sent, and SendUncertain if that is unknown.
        """
        client, sent = await self._enqueue(topic, key, value, partition, headers)
        try:
            stored = await sent
        except clients.kafka_errors() as error:
            await self._replace(client)
            raise self._send_error(topic, value, error) from error
        return stored.partition, _read_offset(stored)

    async def _enqueue(
        self,
        topic: str,
        key: str | bytes | None,
        value: bytes,
        partition: int | None,
        headers: Sequence[tuple[str, bytes]],
    ) -> tuple[Any, asyncio.Future[Any]]:
        """Hand the record to a client, and to another one if the first can no longer send."""
        failed: Exception | None = None
        for _ in range(_TRIES):
            client = await self._open_client()
            await self._check_partition(client, topic, partition)
            encoded = key.encode() if isinstance(key, str) else key
            try:
                sent = await client.send(topic, value, key=encoded, partition=partition, headers=[*headers])
                return client, sent
            except clients.kafka_errors() as error:
                failed = error
                if _is_too_large(error) or _is_about_topic(error):
                    break
                await self._replace(client)
        assert failed is not None
        if _is_too_large(failed):
            raise _too_large_error(topic, value) from failed
        raise self._unavailable_error(topic, failed) from failed

    async def _check_partition(self, client: Any, topic: str, partition: int | None) -> None:
        """Raise KafkaUnavailable for a partition that the client does not know, maybe because it is too new."""
        if partition is None:
            return
        try:
            known = await client.partitions_for(topic)
        except clients.kafka_errors() as error:
            raise self._unavailable_error(topic, error) from error
        if partition not in known:
            await client.client.force_metadata_update()
            raise KafkaUnavailable(
                f"Kafka at {self._connection.bootstrap} has no partition {partition} of the topic {topic}; "
                f"it has {len(known)} partitions"
            )

    async def _open_client(self) -> Any:
        """Return the client; connect until that succeeds."""
        async with self._connecting:
            reported = False
            while self._client is None:
                if self._stopped:
                    raise KafkaUnavailable("the producer is stopped; start the bridge again")
                try:
                    async with asyncio.timeout(CONNECT_TIMEOUT_SEC):
                        self._client = await self._connect()
                except clients.connect_errors() as error:
                    clients.count_error(error)
                    if not reported:
                        reported = True
                        _logger.warning(
                            "the producer cannot connect to Kafka and keeps trying: %s", clients.reason(error)
                        )
                    await asyncio.sleep(RECONNECT_PAUSE_SEC)
            if reported:
                _logger.info("the producer is connected to Kafka again")
            return self._client

    async def _connect(self) -> Any:
        from aiokafka import AIOKafkaProducer

        client = AIOKafkaProducer(
            **self._connection.options(),
            enable_idempotence=True,
            acks="all",
            linger_ms=0,
            max_request_size=MAX_REQUEST_BYTES,
            request_timeout_ms=int(CONNECT_TIMEOUT_SEC * 1000),
        )
        _never_expire_records(client)
        return await clients.start(client)

    async def _replace(self, client: Any) -> None:
        """Close a client whose sequence of records is broken. The next send opens another one."""
        if self._client is client:
            self._client = None
            await _close(client)

    def _send_error(self, topic: str, value: bytes, error: Exception) -> Exception:
        if _is_too_large(error):
            return _too_large_error(topic, value)
        if _is_about_topic(error):
            return self._unavailable_error(topic, error)
        clients.count_error(error)
        return SendUncertain(
            f"a record for the topic {topic} may or may not be stored in Kafka at "
            f"{self._connection.bootstrap}: {clients.reason(error)}; look for it in the topic before sending "
            "it again"
        )

    def _unavailable_error(self, topic: str, error: Exception) -> KafkaUnavailable:
        if type(error).__name__ == "UnknownTopicOrPartitionError":
            clients.count_error(error)
            return KafkaUnavailable(
                f"Kafka at {self._connection.bootstrap} has no topic {topic}; create it, or set "
                "kafka_create_topics"
            )
        return clients.unavailable(f"sending to the topic {topic}", self._connection.bootstrap, error)


def _read_offset(stored: Any) -> int:
    """Return the offset, or -1: for a duplicate that Kafka no longer remembers, both numbers are negative or wrong."""
    unknown = stored.log_start_offset is not None and stored.log_start_offset < 0
    return NO_OFFSET if unknown or stored.offset < 0 else int(stored.offset)


def _is_too_large(error: Exception) -> bool:
    return type(error).__name__ in ("MessageSizeTooLargeError", "RecordListTooLargeError")


def _is_about_topic(error: Exception) -> bool:
    """Return whether Kafka refused the topic, so that the record is certainly not stored."""
    return type(error).__name__ in (
        "UnknownTopicOrPartitionError",
        "TopicAuthorizationFailedError",
        "InvalidTopicError",
    )


def _too_large_error(topic: str, value: bytes) -> CommandTooLarge:
    return CommandTooLarge(
        f"a record for the topic {topic} has {len(value)} bytes; the bridge sends at most {MAX_REQUEST_BYTES}, and "
        "the topic may allow less (max.message.bytes); pass a reference instead of data"
    )


def _never_expire_records(client: Any) -> None:
    """Let records wait however long their partition has no leader, as it has none while a broker restarts.

    aiokafka drops such records after the request timeout, also when the producer is idempotent and they may be stored
    already. It offers no setting for this.
    """
    client._message_accumulator._batch_ttl = math.inf


async def _close(client: Any) -> None:
    """Close a client. Its unsent records are dropped after a few seconds, and their sends fail."""
    from aiokafka.errors import ProducerClosed

    await clients.close(client)
    # While Kafka is away, aiokafka waits for pending records for ever, and offers no other way to drop them.
    client._message_accumulator.fail_all(ProducerClosed("the producer was closed before Kafka confirmed"))
