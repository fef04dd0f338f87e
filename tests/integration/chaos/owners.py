"""Checks from the topics alone that no two workers run one node to the end, and that all dispatches have ended."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowkit.config import CoordinatorConfig
from tests.integration.chaos.plans import EXTERNAL_ROLES
from tests.integration.harness import eventually

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from tests.integration.chaos.cluster import Cluster

Message = dict[str, Any]
Attempt = tuple[str, str, int]
DiedAfter = Callable[[str, float], bool]
"""Whether the process of a worker ended after a time in seconds since the epoch, by the clock of the worker."""

_SHOWN = (
    *("task_id", "node_id", "attempt_epoch", "state", "outcome.kind"),
    *("owner", "run_id", "lease", "cancel", "offset", "created_at", "updated_at"),
)
"""Fields of a dispatch record that say who should have closed it."""

TERMINAL = {"TASK_DONE", "TASK_FAILED", "CANCELLED"}


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """One TASK_ACCEPTED event."""

    attempt: Attempt
    worker_id: str
    lease_id: str
    ts_ms: int


async def read_topics(bootstrap: str, names: Sequence[str]) -> list[Message]:
    """Return all messages of these topics, in the order of each partition, without records that are none."""
    from aiokafka import AIOKafkaConsumer

    messages: list[Message] = []
    async with AIOKafkaConsumer(
        *names, bootstrap_servers=bootstrap, auto_offset_reset="earliest"
    ) as consumer:
        ends = await consumer.end_offsets(consumer.assignment())
        assert ends, f"topics {names} have no partitions"
        while any([await consumer.position(place) < end for place, end in ends.items()]):
            for records in (await consumer.getmany(timeout_ms=500)).values():
                values = [record.value for record in records if record.value.startswith(b"{")]
                messages += map(json.loads, values)
    return messages


class Runs:
    """All runs of external workers, as the topics show them."""

    def __init__(self, events: Sequence[Message], signals: Sequence[Message]) -> None:
        self.accepted: dict[tuple[str, str], dict[str, Acceptance]] = defaultdict(dict)
        """Acceptances by node and lease id, in the order of the status topic."""
        self._ended: set[tuple[Attempt, str]] = set()
        self._cancelled = {(_attempt(each), each["target_worker_id"]) for each in signals}
        for event in events:
            payload, attempt = event["payload"], _attempt(event)
            if payload["kind"] in TERMINAL:
                self._ended.add((attempt, payload["worker_id"]))
            elif payload["kind"] == "TASK_ACCEPTED":
                self._add(attempt, payload, event["ts_ms"])

    def _add(self, attempt: Attempt, payload: Message, ts_ms: int) -> None:
        made = Acceptance(
            attempt=attempt, worker_id=payload["worker_id"], lease_id=payload["lease_id"], ts_ms=ts_ms
        )
        self.accepted[attempt[:2]].setdefault(made.lease_id, made)

    @property
    def taken_over(self) -> int:
        """Number of acceptances that another one of the same epoch followed."""
        epochs = [{each.attempt for each in runs.values()} for runs in self.accepted.values()]
        return sum(map(len, self.accepted.values())) - sum(map(len, epochs))

    def unstopped(self, died_after: DiedAfter) -> Iterator[Acceptance]:
        """Yield the runs that neither ended, nor were cancelled, nor died, although another run of the node began."""
        for runs in self.accepted.values():
            newest = max(run.attempt[2] for run in runs.values())
            last = [run for run in runs.values() if run.attempt[2] == newest][-1]
            for run in runs.values():
                if run is not last and not self._stopped(run, died_after):
                    yield run

    def _stopped(self, run: Acceptance, died_after: DiedAfter) -> bool:
        own = {(run.attempt, run.worker_id), (run.attempt, None)}
        signalled = bool(own & self._cancelled)
        ended = (run.attempt, run.worker_id) in self._ended
        return ended or signalled or died_after(run.worker_id, run.ts_ms / 1000)


def _attempt(message: Message) -> Attempt:
    return message["task_id"], message["node_id"], message["attempt_epoch"]


async def owner_problems(cluster: Cluster) -> tuple[Runs, list[str]]:
    """Return the runs, and a sentence for each that could go on beside a newer one."""
    names, bootstrap = CoordinatorConfig(), cluster.kafka.bootstrap_servers
    events = await read_topics(bootstrap, [names.topic_status(role) for role in EXTERNAL_ROLES])
    runs = Runs(events, await read_topics(bootstrap, [names.topic_signals]))
    return runs, [
        f"worker {run.worker_id} was not stopped: {run}" for run in runs.unstopped(cluster.died_after)
    ]


async def dispatch_problems(cluster: Cluster) -> list[str]:
    """Wait until no dispatch record is open. Return a sentence for each that remains.

    A bridge that dies after it has delivered an outcome leaves its record `ended`, and the record of an attempt whose
    task ends before another bridge adopts the attempt remains open. Another bridge closes both ten minutes later.
    """
    records, active = cluster.harness.db.dispatches, {"state": {"$in": ["open", "finishing"]}}

    async def left() -> list[Message]:
        found = records.find(active, dict.fromkeys(_SHOWN, 1) | {"_id": 0})
        return [each async for each in found if not is_abandoned(each, cluster.pids)]

    async def closed() -> bool:
        return not await left()

    try:
        await eventually(closed, timeout_sec=20)
    except AssertionError:
        return [f"open dispatch: {each}" for each in await left()]
    return []


def is_abandoned(record: Message, pids: Collection[int]) -> bool:
    """Return whether the bridge that supervised an attempt has died. Its process id is a part of its id."""
    owner = record["owner"]
    return bool(owner) and int(owner.split("-")[-2]) not in pids
