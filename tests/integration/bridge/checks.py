"""What tests of hazards check: the outcome of each attempt, and the batches of a node."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from aiokafka import AIOKafkaConsumer, TopicPartition

from flowkit.bridge.kafka.offsets import Offsets
from flowkit.bridge.status import StatusEvents
from tests.integration.harness import eventually

if TYPE_CHECKING:
    import threading

    import pytest

    from flowkit.testing.external.journal import Entry
    from tests.integration.bridge.external_tasks import ExternalTasks

NO_RETRY = {"max": 0}
"""A retry policy under which every failure that uses a retry ends the task."""


async def outcomes(external: ExternalTasks, task_id: str, node_id: str = "n") -> list[str]:
    """Return how each attempt of a node ended, by epoch: the code of its failure, or else the kind of its end."""
    records = [each for each in await external.dispatches(task_id) if each["node_id"] == node_id]
    assert [each["attempt_epoch"] for each in records] == [*range(1, len(records) + 1)]
    return [_outcome(each) for each in records]


def _outcome(record: dict[str, Any]) -> str:
    outcome = record["outcome"] or {}
    failure = outcome.get("failure") or {}
    return str(failure.get("code") or outcome.get("kind") or record["state"])


async def batch_uids(external: ExternalTasks, task_id: str, node_id: str = "n") -> list[str]:
    """Return the uids of a node's metrics rows, in order; a row that exists twice occurs twice."""
    return sorted(row["batch_uid"] for row in await external.rows(task_id, node_id))


async def check_finished(
    external: ExternalTasks, task_id: str, expected: list[str], uids: tuple[str, ...] = ("b0", "b1")
) -> None:
    """Check that a task finishes, how the attempts of its node `n` ended, and that each batch counts once."""
    assert (await external.result(task_id)).status == "finished"
    records = await external.dispatches(task_id)
    assert await outcomes(external, task_id) == expected, records
    assert await batch_uids(external, task_id) == [*uids], records
    assert records[-1]["batches"] == len(uids), records


async def until_owner(
    external: ExternalTasks, task_id: str, worker_id: str, epoch: int = 1
) -> dict[str, Any]:
    """Wait until a worker owns the run of node `n`, and return the dispatch record."""

    async def look() -> dict[str, Any] | None:
        record = await external.dispatch(task_id, "n", epoch)
        return record if (record["lease"] or {}).get("worker_id") == worker_id else None

    return await eventually(look)


async def until_sent(external: ExternalTasks, task_id: str) -> None:
    """Wait until the command of node `n` is in its topic."""

    async def look() -> bool:
        return (await external.dispatch(task_id, "n"))["offset"] is not None

    await eventually(look)


async def until_processed(external: ExternalTasks, role: str = "") -> None:
    """Wait until the bridges have processed all events that are in the status topic of a role now."""
    group, topic = external.bridge.context.status_group(role or external.role), status_topic(external, role)
    offsets = Offsets(external.names.connection)
    try:
        ends = await offsets.read_ends(topic)

        async def look() -> bool:
            return await offsets.has_caught_up(group, topic, ends)

        await eventually(look)
    finally:
        await offsets.close()


def delay_events(monkeypatch: pytest.MonkeyPatch, until: threading.Event) -> None:
    """Let the bridge, which runs in another thread, fail to process status events until the test allows it."""
    handle = StatusEvents.handle

    async def delayed(self: StatusEvents, records: Any) -> None:
        if not until.is_set():
            raise ConnectionError("the test delays status events")
        await handle(self, records)

    monkeypatch.setattr(StatusEvents, "handle", delayed)


def status_topic(external: ExternalTasks, role: str = "") -> str:
    """Return the status topic of a role."""
    return str(external.topics["topic_status_fmt"]).format(type=role or external.role)


def forged(entry: Entry, kind: str, *, later_ms: int = 0, **payload: Any) -> bytes:
    """Return an event of another kind with the ids of a sent one, later by the worker's clock."""
    fields = {"kind": kind, "worker_id": entry.payload["worker_id"], **payload}
    message = {**entry.message, "ts_ms": entry.message["ts_ms"] + later_ms, "payload": fields}
    return json.dumps({**message, "dedup_id": f"forged-{kind}-{later_ms}"}).encode()


async def records_of(external: ExternalTasks, topic: str) -> list[bytes | None]:
    """Return the values of all records that are in a topic now."""
    offsets = Offsets(external.names.connection)
    numbers = await offsets.list_partitions(topic)
    await offsets.close()
    consumer = AIOKafkaConsumer(bootstrap_servers=external.names.bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        places = [TopicPartition(topic, number) for number in numbers]
        consumer.assign(places)
        ends = await consumer.end_offsets(places)
        found: list[bytes | None] = []
        while len(found) < sum(ends.values()):
            batches = await consumer.getmany(timeout_ms=500)
            found += [record.value for batch in batches.values() for record in batch]
        return found
    finally:
        await consumer.stop()
