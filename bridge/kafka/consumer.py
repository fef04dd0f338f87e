"""A consumer of a stable group that commits records only after they are handled.

It commits in the background while it handles the next records.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from typing import TYPE_CHECKING, Any

from flowkit.attempt.background import LoopHealth, OutageLogger
from flowkit.bridge.kafka import clients
from flowkit.bridge.kafka.clients import UnreadableBatch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from aiokafka import ConsumerRecord, TopicPartition

    from flowkit.bridge.kafka.clients import KafkaConnection
    from flowkit.bridge.kafka.record_reader import RecordReader

    Handle = Callable[[Sequence[ConsumerRecord]], Awaitable[None]]
    Settle = Callable[[], Awaitable[None]]
    Offsets = Mapping[Any, int]

_logger = logging.getLogger("flowkit.bridge")

POLL_MS = 1_000
"""How long a poll waits for records; it returns as soon as there are some."""

PROBE_SEC = 5.0
"""How often a consumer without new records checks that Kafka responds."""

AFTER_ERROR_SEC = 1.0

UNREADABLE_SEC = 5.0
"""How long a consumer waits before it tries again to read a batch that cannot be read."""

RELEASED_SEC = 2 * UNREADABLE_SEC
"""How long it then reads without an error until it counts as reading on."""

RECONNECT_PAUSE_SEC = 0.5

HAND_OVER_SEC = 10.0
"""How long a rebalance waits for records that are being handled, and for their commit."""

LAST_COMMIT_SEC = 2.0
"""How long a stopping consumer waits for its last commit."""

_SESSION_MS, _REBALANCE_MS, _REQUEST_MS = 10_000, 30_000, 40_000
_PARTITION_BYTES, _FETCH_BYTES = 2 << 20, 16 << 20
_METADATA_MS = 30_000

COMMIT_PAUSE_SEC = 0.05
"""How long a commit waits for the offsets of further records, so that many short polls share one commit."""


class RecordConsumer:
    """Reads topics as a member of a consumer group and passes the records to `handle`, in order.

    A record that was handled may be passed again, after an error, a rebalance or a restart; none is skipped.
    `handle` may leave effects for later. `settle` completes them: the consumer calls it before each commit.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        topics: Sequence[str],
        group: str,
        handle: Handle,
        settle: Settle | None = None,
    ) -> None:
        self.health = LoopHealth(name=f"consumer {group}")
        self.connected = False
        self.held: str | None = None
        """What prevents the consumer from reading on; None while it reads. An outage is none of it."""
        self.positions: dict[tuple[str, int], int] = {}
        """The offset after the last handled record, by topic and partition."""
        self._connection = connection
        self._topics = tuple(topics)
        self._group = group
        self._handle = handle
        self._settle = settle
        self._commits: Commits
        self._watch: _RebalanceWatch
        self._held_at = 0.0
        self._probed_at = 0.0
        # A commit can fail while polls still return records, so it does not count as a lost connection.
        self._commit_outage = OutageLogger(f"commit the offsets of the group {group}")

    async def run(self) -> None:
        """Run until cancelled. Outages of Kafka and errors of `handle` are logged, and the work is repeated."""
        self.health.running = True
        try:
            while True:
                await self._connect_and_read()
                await asyncio.sleep(RECONNECT_PAUSE_SEC if self.held is None else UNREADABLE_SEC)
        finally:
            self.health.running = self.connected = False

    async def _connect_and_read(self) -> None:
        from flowkit.bridge.kafka.record_reader import RecordReader

        try:
            reader = RecordReader(self._new_client(), one_by_one=self.held is not None)
            client = await reader.start()
        except clients.connect_errors() as error:
            self._note_outage(error)
            return
        try:
            while True:
                await self._poll(client, reader)
        except UnreadableBatch as error:
            await self._commits.finish(LAST_COMMIT_SEC)
            await self._hold(client, error)
        except clients.kafka_errors() as error:
            self._note_outage(error)
        except asyncio.CancelledError:
            await self._commits.finish(LAST_COMMIT_SEC)
            raise
        finally:
            await self._commits.stop()
            await clients.close(client)

    def _new_client(self) -> Any:
        from aiokafka import AIOKafkaConsumer
        from aiokafka.abc import ConsumerRebalanceListener

        ConsumerRebalanceListener.register(_RebalanceWatch)
        client = AIOKafkaConsumer(
            **self._connection.options(),
            group_id=self._group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=_SESSION_MS,
            rebalance_timeout_ms=_REBALANCE_MS,
            request_timeout_ms=_REQUEST_MS,
            metadata_max_age_ms=_METADATA_MS,
            max_partition_fetch_bytes=_PARTITION_BYTES,
            fetch_max_bytes=_FETCH_BYTES,
        )
        self._commits = Commits(functools.partial(self._commit, client))
        self._watch = _RebalanceWatch(self.positions, self._commits)
        client.subscribe(self._topics, listener=self._watch)
        return client

    async def _poll(self, client: Any, reader: RecordReader) -> None:
        self._commits.check()
        batches = await reader.read(POLL_MS)
        if self.held is not None and time.monotonic() - self._held_at > RELEASED_SEC:
            _logger.info("the consumer %s reads on", self._group)
            self.held = None
        if not batches:
            await self._probe(client)
            return
        self._note_success()
        records = [record for batch in batches.values() for record in batch]
        async with self._watch.handling() as seen:
            what = f"handle {len(records)} records"
            if await self._repeat(lambda: self._handle(records), what, seen):
                ends = {place: batch[-1].offset + 1 for place, batch in batches.items()}
                self.positions |= {(place.topic, place.partition): offset for place, offset in ends.items()}
                self._commits.add(ends)

    async def _hold(self, client: Any, error: UnreadableBatch) -> None:
        """Say which batch cannot be read. The group keeps its position before it, so that no record is lost."""
        places = await _partitions_at(client, error.offset)
        where = ", ".join(f"partition {each.partition} of the topic {each.topic}" for each in places)
        which = "up to it" if error.end is None else f"before offset {error.end}"
        held = (
            f"a batch in Kafka cannot be read ({where or ', '.join(self._topics)}): {error}; to go on without it, "
            f"delete the records {which} with kafka-delete-records"
        )
        if held != self.held:
            _logger.error("the consumer %s is held: %s", self._group, held)
        self.held, self._held_at = held, time.monotonic()
        clients.count_error(error)
        self.health.last_error_at, self.health.last_error = time.time(), held

    async def _probe(self, client: Any) -> None:
        """Find out now and then whether Kafka responds: without records, a poll does not show that it is away."""
        if time.monotonic() - self._probed_at < PROBE_SEC:
            return
        try:
            async with asyncio.timeout(clients.REQUEST_TIMEOUT_SEC):
                await client.end_offsets(list(client.assignment()))
        except clients.kafka_errors() as error:
            self._note_outage(error)
        else:
            self._probed_at = time.monotonic()
            self._note_success()

    async def _repeat(self, call: Callable[[], Awaitable[None]], what: str, seen: int) -> bool:
        """Repeat `call` until it succeeds. Return False if the partitions were revoked meanwhile."""
        while True:
            try:
                await call()
            except (Exception, asyncio.CancelledError) as error:
                if _is_being_cancelled():
                    raise
                self._note_error(error)
                _logger.exception(
                    "the consumer %s cannot %s; it tries again in %g s", self._group, what, AFTER_ERROR_SEC
                )
                await self._watch.pause(AFTER_ERROR_SEC)
            else:
                return True
            if self._watch.revoked or self._watch.revocations != seen:
                return False

    async def _commit(self, client: Any, offsets: Mapping[Any, int]) -> None:
        """Commit handled records. If the group has rebalanced, another member handles them again."""
        from aiokafka.errors import CommitFailedError, IllegalStateError

        if self._settle and not await self._repeat(
            self._settle, "write what it has handled", self._watch.revocations
        ):
            return
        while True:
            try:
                async with asyncio.timeout(clients.REQUEST_TIMEOUT_SEC):
                    await client.commit(dict(offsets))
                self._commit_outage.recovered()
                return
            except (CommitFailedError, IllegalStateError) as error:
                _logger.info(
                    "the group %s rebalanced before it committed its offsets: %s", self._group, error
                )
                return
            except clients.kafka_errors() as error:
                if not clients.is_transient(error):
                    raise
                self._note_error(error)
                self._commit_outage.failed(
                    clients.unavailable("the commit", self._connection.bootstrap, error)
                )
            await asyncio.sleep(RECONNECT_PAUSE_SEC)

    def _note_success(self) -> None:
        if self.held is None:
            self.health.last_ok_at = time.time()
        if not self.connected:
            self.connected = True
            _logger.info("the consumer %s is connected to Kafka", self._group)

    def _note_outage(self, error: Exception) -> None:
        """Record an outage; log it once."""
        if self.connected or self.health.last_error is None:
            _logger.warning(
                "the consumer %s lost Kafka at %s and keeps trying: %s; %s",
                *(self._group, self._connection.bootstrap, clients.reason(error), clients.remedy(error)),
            )
        self.connected = False
        clients.count_error(error)
        self._note_error(error)

    def _note_error(self, error: BaseException) -> None:
        self.health.last_error_at = time.time()
        self.health.last_error = clients.reason(error)


async def _partitions_at(client: Any, offset: int | None) -> list[TopicPartition]:
    """Return the partitions of a client from which it reads this offset next."""
    try:
        async with asyncio.timeout(clients.REQUEST_TIMEOUT_SEC):
            return [each for each in sorted(client.assignment()) if await client.position(each) == offset]
    except clients.kafka_errors():
        return []


def _is_being_cancelled() -> bool:
    """Return whether this task itself is cancelled; code that it calls may raise CancelledError for other reasons."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _RebalanceWatch:
    """Delays rebalances until the records in progress are handled and committed, and counts them."""

    def __init__(self, positions: dict[tuple[str, int], int], commits: Commits) -> None:
        self.revocations = 0
        self._positions = positions
        self._commits = commits
        self._idle = asyncio.Event()
        self._idle.set()
        self._revoked = asyncio.Event()

    @property
    def revoked(self) -> bool:
        """Whether the partitions were revoked, and none are assigned yet."""
        return self._revoked.is_set()

    @contextlib.asynccontextmanager
    async def handling(self) -> AsyncIterator[int]:
        """Mark records as in progress; yield the number of revocations so far."""
        self._idle.clear()
        try:
            yield self.revocations
        finally:
            self._idle.set()

    async def pause(self, seconds: float) -> None:
        """Wait, but not longer than until the partitions are revoked."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._revoked.wait()

    async def on_partitions_revoked(self, _: object) -> None:
        """Wait a while for the records in progress and their commit. Called before the client gives up partitions."""
        self.revocations += 1
        self._revoked.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_SEC):
                await self._idle.wait()
                await self._commits.finish(HAND_OVER_SEC)
        self._positions.clear()

    async def on_partitions_assigned(self, _: object) -> None:
        """Begin anew. Called by the client when it has partitions."""
        self._revoked.clear()


class Commits:
    """The commits of one client: one at a time, each with the latest offsets of all partitions."""

    def __init__(self, commit: Callable[[Offsets], Awaitable[None]]) -> None:
        self._commit = commit
        self._due: dict[Any, int] = {}
        self._running: asyncio.Task[None] | None = None
        self._at_once = asyncio.Event()

    def add(self, offsets: Offsets) -> None:
        """Commit these offsets soon. Call it only after everything before them is handled."""
        self._due |= offsets
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())

    def check(self) -> None:
        """Raise the error of a failed commit, if any."""
        if self._running is not None and self._running.done():
            running, self._running = self._running, None
            running.result()

    async def finish(self, limit: float) -> None:
        """Commit at once what is due. Return when that is done or has failed, or after `limit` seconds."""
        self._at_once.set()
        try:
            if self._running is not None:
                await asyncio.wait([self._running], timeout=limit)
        finally:
            self._at_once.clear()

    async def stop(self) -> None:
        """Drop what is not committed yet."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        while self._due:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COMMIT_PAUSE_SEC):
                    await self._at_once.wait()
            offsets, self._due = self._due, {}
            await self._commit(offsets)
