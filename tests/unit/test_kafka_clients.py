"""Calls to Kafka end in time, clients close in the background, and unknown offsets are not taken for real ones."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import errors
from aiokafka.structs import OffsetAndMetadata, TopicPartition
from tests.unit.measured import measuring

from flowkit.bridge.kafka import clients
from flowkit.bridge.kafka.offsets import committed_offsets, group_members
from flowkit.bridge.kafka.producer import _read_offset
from flowkit.core.instruments import ERRORS
from flowkit.errors import KafkaUnavailable


class Client:
    """A client that connects and closes when the test wants it."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.error = error
        self.connected = asyncio.Event()
        self.may_connect = asyncio.Event()
        self.may_close = asyncio.Event()
        self.may_close.set()
        self.closed = asyncio.Event()

    async def start(self) -> None:
        """Connect, or fail."""
        if self.error is not None:
            raise self.error
        await self.may_connect.wait()
        self.connected.set()

    async def stop(self) -> None:
        """Close."""
        await self.may_close.wait()
        self.closed.set()


async def bounded(*results: Any, limit: float = 5) -> Any:
    """Make a call with these results, one for each try; the last one repeats."""
    left = list(results)

    async def call() -> Any:
        result = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(result, Exception):
            raise result
        return result

    return await clients.call_with_retries(call, what="reading", address="kafka:9092", limit=limit)


async def test_transient_errors_are_retried() -> None:
    assert await bounded(errors.KafkaConnectionError(), ConnectionRefusedError(), TimeoutError(), 7) == 7


async def test_requests_that_have_failed_are_counted_by_their_reason() -> None:
    with measuring() as measured:
        for error in (ConnectionRefusedError(), errors.GroupAuthorizationFailedError("g")):
            with pytest.raises(KafkaUnavailable):
                await bounded(error, limit=0.2)
        await bounded(ConnectionRefusedError(), 7)
    assert measured.counted(ERRORS) == {
        ("kafka", "ConnectionRefusedError"): 1,
        ("kafka", "GroupAuthorizationFailedError"): 1,
    }


async def test_retries_end_with_the_last_reason() -> None:
    with pytest.raises(KafkaUnavailable, match="reading failed at kafka:9092: the connection is refused"):
        await bounded(ConnectionRefusedError(), limit=0.2)


async def test_a_missing_right_is_reported_at_once() -> None:
    with pytest.raises(KafkaUnavailable, match="grant DESCRIBE and READ on the group"):
        await bounded(errors.GroupAuthorizationFailedError("g"), 7)


async def test_mistakes_of_the_code_are_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        await bounded(ZeroDivisionError(), 7)


async def test_a_client_that_does_not_start_is_closed() -> None:
    client = Client(error=errors.KafkaConnectionError())
    with pytest.raises(errors.KafkaConnectionError):
        await clients.start(client)
    assert client.closed.is_set()


async def test_a_client_that_is_cancelled_while_it_connects_is_closed_afterwards() -> None:
    client = Client()
    starting = asyncio.create_task(clients.start(client))
    await asyncio.wait([starting], timeout=0.01)
    starting.cancel()
    await asyncio.wait([starting])
    assert (starting.cancelled(), client.closed.is_set()) == (True, False)
    client.may_connect.set()
    await client.closed.wait()
    assert client.connected.is_set()


async def test_a_client_that_cannot_close_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "CLOSE_TIMEOUT_SEC", 0.01)
    client = Client()
    client.may_close.clear()
    await clients.close(client)
    assert not client.closed.is_set()
    client.may_close.set()
    await client.closed.wait()


@pytest.mark.parametrize(
    ("before", "after"), [(logging.NOTSET, logging.CRITICAL), (logging.INFO, logging.INFO)]
)
async def test_aiokafka_is_silent_unless_the_application_has_set_its_level(
    before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("aiokafka")
    monkeypatch.setattr(logger, "level", before)
    client = Client()
    client.may_connect.set()
    await clients.start(client)
    assert logger.level == after


class Admin:
    """An admin client with fixed responses."""

    def __init__(self, *, offsets: dict[int, int] | None = None, group: Any = None) -> None:
        self.offsets = offsets or {}
        self.group = group

    async def list_consumer_group_offsets(self, _: str, *, partitions: object) -> dict[Any, Any]:
        """Return offsets of the topic `t`."""
        return {TopicPartition("t", number): OffsetAndMetadata(at, "") for number, at in self.offsets.items()}

    async def describe_consumer_groups(self, _: object) -> list[Any]:
        """Return one group."""
        return [SimpleNamespace(groups=[self.group])]


async def test_a_group_whose_offsets_are_loading_is_not_taken_for_one_without_offsets() -> None:
    assert await committed_offsets(Admin(offsets={0: -1, 1: 5}), "g", "t", [0, 1]) == {0: None, 1: 5}
    with pytest.raises(errors.GroupLoadInProgressError) as caught:
        await committed_offsets(Admin(offsets={}), "g", "t", [0, 1])
    assert clients.is_transient(caught.value)
    assert await committed_offsets(Admin(), "g", "t", []) == {}


async def test_members_without_an_assignment_have_no_partitions() -> None:
    group = (0, "g", "PreparingRebalance", "consumer", "", [("m1", "c", "h", b"", b"")])
    assert await group_members(Admin(group=group), "g") == {"m1": frozenset()}
    with pytest.raises(errors.NotCoordinatorForGroupError):
        await group_members(Admin(group=(16, "g", "", "", "", [])), "g")


@pytest.mark.parametrize(
    ("offset", "log_start", "expected"), [(7, 0, 7), (-1, -1, -1), (0, -1, -1), (-1, None, -1), (3, None, 3)]
)
def test_a_duplicate_without_a_known_offset_is_marked(
    offset: int, log_start: int | None, expected: int
) -> None:
    assert _read_offset(SimpleNamespace(offset=offset, log_start_offset=log_start)) == expected
