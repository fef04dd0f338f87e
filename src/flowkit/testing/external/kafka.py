"""The Kafka clients of a worker, with the settings of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.errors import KafkaError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)


class _Listener:
    """Reports the partitions that a consumer receives."""

    def __init__(self, assigned: Callable[[str], None]) -> None:
        self._assigned = assigned

    async def on_partitions_revoked(self, revoked: Any) -> None:
        """Do nothing: the worker keeps its run during a rebalance."""

    async def on_partitions_assigned(self, assigned: Any) -> None:
        """Report the partitions."""
        self._assigned(", ".join(f"{each.topic}/{each.partition}" for each in sorted(assigned)))


ConsumerRebalanceListener.register(_Listener)


async def open_producer(bootstrap: str, options: Mapping[str, Any]) -> Any:
    """Return a started producer that waits for all replicas and sends each record once."""
    producer: Any = AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True, **options)
    try:
        await producer.start()
    except BaseException:
        await producer.stop()
        raise
    return producer


class Consumer:
    """A consumer of one topic in a group. Its offsets are committed explicitly."""

    def __init__(
        self,
        topic: str,
        group: str,
        bootstrap: str,
        options: Mapping[str, Any],
        assigned: Callable[[str], None],
    ) -> None:
        self.topic = topic
        self._client: Any = AIOKafkaConsumer(
            bootstrap_servers=bootstrap,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="latest",
            **options,
        )
        self._client.subscribe([topic], listener=_Listener(assigned))
        self._commit_failed = False

    async def start(self) -> None:
        """Connect, and wait until the group has assigned partitions, possibly none."""
        await self._client.start()

    async def next(self) -> Any:
        """Return the next record."""
        return await self._client.getone()

    async def commit(self) -> None:
        """Commit the positions of all assigned partitions. The first failure is logged."""
        try:
            await self._client.commit()
        except KafkaError as error:
            if not self._commit_failed:
                logger.warning("Cannot commit the offsets of %s: %s", self.topic, error)
            self._commit_failed = True

    def pause(self) -> None:
        """Stop reading until `resume` or the next rebalance."""
        self._client.pause(*self._client.assignment())

    def resume(self) -> None:
        """Read again."""
        self._client.resume(*self._client.paused())

    @property
    def paused(self) -> bool:
        """Whether any partition is paused."""
        return bool(self._client.paused())

    def partitions(self) -> list[int]:
        """Return the numbers of the assigned partitions."""
        return sorted(each.partition for each in self._client.assignment())

    async def ready(self) -> None:
        """Wait until every assigned partition has a position, so that no later record is skipped."""
        for partition in self._client.assignment():
            await self._client.position(partition)

    async def stop(self) -> None:
        """Leave the group and disconnect."""
        try:
            await self._client.stop()
        except asyncio.CancelledError:
            # While the broker is unreachable, aiokafka passes on the cancellation of its own fetches.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            await self._disconnect()

    async def _disconnect(self) -> None:
        """Do what remains of aiokafka's stop after its fetches."""
        fetches = list(self._client._fetcher._pending_tasks)
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)
        await self._client._client.close()

    async def drop(self) -> None:
        """Disconnect without leaving the group, as after a crash: the broker waits for the session timeout."""
        # A client without a generation has no group to leave.
        if self._client._coordinator is not None:
            self._client._coordinator.reset_generation()
        await self.stop()


async def drop_producer(producer: Any) -> None:
    """Disconnect a producer without sending what it still holds, as after a crash."""
    producer._closed = True
    # aiokafka leaks a connection whose opening is cancelled; it opens connections while it holds this lock.
    async with producer.client._get_conn_lock:
        # A sender whose task has not run yet passes its cancellation on to its caller.
        with contextlib.suppress(asyncio.CancelledError):
            await producer._sender.close()
        await producer.client.close()
