"""A bridge supervises its attempts although Temporal, Kafka or MongoDB are away, and whatever the clocks of
bridges are."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.bridges import Context, Parts, context_of
from tests.contract.builders import AT
from tests.contract.test_dispatch_renewals import LEASE, accepted
from tests.unit.event_loop import let_other_tasks_run, until
from tests.unit.measured import measuring

from flowkit.adapters.dispatches import DispatchStore
from flowkit.bridge.commands import CommandWatch
from flowkit.bridge.supervisor import AttemptSupervisor
from flowkit.core.instruments import LATE_HEARTBEATS
from flowkit.errors import KafkaUnavailable, StoreRefused
from flowkit.graph.input_adapters import PullArgs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowkit.adapters.dispatches import Dispatch
    from flowkit.errors import FlowKitError

MANY = 30
"""More attempts than heartbeats or checks run at once."""

HOUR = 3600.0


class Temporal:
    """Answers no heartbeat before the test lets it."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.heartbeats = 0

    def get_async_activity_handle(self, **_: Any) -> Temporal:
        """Return the handle of an activity."""
        return self

    async def heartbeat(self, *_: Any, **__: Any) -> None:
        """Wait."""
        self.heartbeats += 1
        await self.answers.wait()


class Kafka:
    """The status topic of a role, and its setting: all of its events are processed."""

    def __init__(self) -> None:
        self.available = True
        self.reachable = asyncio.Event()
        self.reachable.set()
        self.calls = 0

    def status(self, role: str) -> str:
        """Return the name of the topic."""
        return role

    async def read_ends(self, _: str) -> dict[int, int]:
        """Return the end of the only partition."""
        await self._called()
        return {0: 7}

    async def has_caught_up(self, *_: Any) -> bool:
        """Return that the bridges have processed all events."""
        await self._called()
        return True

    async def _called(self) -> None:
        self.calls += 1
        await self.reachable.wait()
        if not self.available:
            raise KafkaUnavailable


class Inputs:
    """The inputs of pulling nodes, some of which cannot be read."""

    def __init__(self, errors: Mapping[str, Exception]) -> None:
        self._errors = errors

    async def advance(self, record: Dispatch) -> None:
        """Raise the error of the record's node, if it has one."""
        if error := self._errors.get(record.attempt.node_id):
            raise error

    async def waits_in_vain(self, _: Dispatch) -> bool:
        """Return that a source runs."""
        return False


class Bridge:
    """A supervisor with real stores, and a clock of its own."""

    def __init__(self, db: Any, errors: Mapping[str, Exception] | None = None) -> None:
        self.store, self.kafka, self.temporal, self.parts = DispatchStore(db), Kafka(), Temporal(), Parts()
        self.context: Context = context_of(db, self.temporal, AT)
        kafka: Any = self.kafka
        self.context.topics = self.context.offsets = kafka
        others: dict[str, Any] = {
            "delivery": self.parts,
            "signals": self.parts,
            "inputs": Inputs(errors or {}),
        }
        self.supervisor = AttemptSupervisor(self.context, commands=CommandWatch(self.context), **others)

    async def supervise(self, *node_ids: str, **fields: Any) -> list[Dispatch]:
        """Store attempts that a worker has accepted, and supervise them."""
        records = [await accepted(self.store, node_id, **fields) for node_id in node_ids]
        for record in records:
            self.supervisor.watch(record)
        return records

    async def states(self, records: list[Dispatch]) -> list[tuple[str, str | None]]:
        """Return the state and the reason code of each of the records."""
        found = await self.store.find_all([record.key for record in records])
        outcomes = [found[record.key] for record in records]
        return [
            (each.state, each.outcome.failure.code if each.outcome and each.outcome.failure else None)
            for each in outcomes
        ]


@pytest.fixture
async def bridge(db: Any) -> Bridge:
    """A bridge on an empty database."""
    return Bridge(db)


def names(count: int = MANY) -> list[str]:
    """Return the ids of nodes."""
    return [f"n{number}" for number in range(count)]


# --- heartbeats ---------------------------------------------------------------------------------------------------


async def test_one_heartbeat_of_each_attempt_waits_while_temporal_does_not_answer(bridge: Bridge) -> None:
    await bridge.supervise(*names())
    for _ in range(50):
        bridge.context.at += 2.0
        await bridge.supervisor.send_heartbeats()
        await let_other_tasks_run()
    assert bridge.supervisor.sending == MANY
    bridge.temporal.answers.set()
    await until(lambda: bridge.supervisor.sending == 0)
    assert bridge.temporal.heartbeats == MANY
    bridge.context.at += 2.0
    await bridge.supervisor.send_heartbeats()
    await until(lambda: bridge.temporal.heartbeats == 2 * MANY)


async def test_heartbeats_that_are_late_by_more_than_their_interval_are_counted(bridge: Bridge) -> None:
    bridge.temporal.answers.set()
    with measuring() as measured:
        await bridge.supervise(*names())
        for passed_sec in (1.5, 2.0, 1.4, 60.0):
            bridge.context.at += passed_sec
            await bridge.supervisor.send_heartbeats()
            await until(lambda: bridge.supervisor.sending == 0)
    assert measured.counted(LATE_HEARTBEATS) == {("crawler",): MANY}


async def test_heartbeats_do_not_wait_for_checks(bridge: Bridge) -> None:
    bridge.temporal.answers.set()
    await bridge.supervise(*names())
    bridge.kafka.reachable.clear()
    bridge.context.at += HOUR
    checks = asyncio.create_task(bridge.supervisor.tick())
    await until(lambda: bridge.kafka.calls > 0)
    await bridge.supervisor.send_heartbeats()
    await until(lambda: bridge.temporal.heartbeats == MANY)
    assert not checks.done()
    bridge.kafka.reachable.set()
    await checks


# --- Kafka --------------------------------------------------------------------------------------------------------


async def test_checks_ask_kafka_once_while_it_is_away_and_once_for_each_role(bridge: Bridge) -> None:
    records = await bridge.supervise(*names())
    bridge.context.at += HOUR
    bridge.kafka.available = False
    await bridge.supervisor.tick()
    assert bridge.kafka.calls == 1
    bridge.kafka.available = True
    await bridge.supervisor.tick()
    assert bridge.kafka.calls == 2
    await bridge.supervisor.tick()
    assert bridge.kafka.calls == 3
    assert await bridge.states(records) == [("ended", "lease_lost")] * MANY


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "state"),
    [(RuntimeError("boom"), ("open", None)), (StoreRefused("too large"), ("ended", "mongo_refused"))],
    ids=["unexpected", "permanent"],
)
async def test_error_of_one_attempt_does_not_affect_the_others(
    db: Any, error: FlowKitError, state: tuple[str, str | None]
) -> None:
    bridge = Bridge(db, {"bad": error})
    pulls = {"pull": PullArgs(from_nodes=("u",))}
    (bad,) = await bridge.supervise("bad", **pulls)
    limited = replace(bad.attempt, node_id="good", timeout_sec=3.0)
    (good,) = await bridge.supervise("good", attempt=limited, **pulls)
    bridge.context.at += LEASE.ttl_sec - 1
    await bridge.supervisor.tick()
    assert await bridge.states([bad, good]) == [state, ("ended", "timeout")]


# --- clocks -------------------------------------------------------------------------------------------------------


async def test_run_outlives_the_deadline_that_a_bridge_with_another_clock_has_stored(bridge: Bridge) -> None:
    records = await bridge.supervise("a")
    bridge.context.ahead = HOUR
    for _ in range(3):
        await bridge.supervisor.tick()
    assert (bridge.kafka.calls, await bridge.states(records)) == (0, [("open", None)])


async def test_silence_counts_from_the_last_event_that_the_bridge_has_seen(bridge: Bridge) -> None:
    (record,) = await bridge.supervise("a")
    bridge.context.at += LEASE.ttl_sec
    # Another bridge, whose clock is behind, has received an event: the stored deadline does not increase.
    heard = replace(LEASE, worker_ts_ms=LEASE.worker_ts_ms + 5_000)
    await bridge.store.renew([(replace(record, lease=heard), 0)], bridge.context.at)
    for _ in range(3):
        await bridge.supervisor.tick()
        bridge.context.at += 1
    assert await bridge.states([record]) == [("open", None)]
    bridge.context.at += LEASE.ttl_sec
    for _ in range(2):
        await bridge.supervisor.tick()
    assert await bridge.states([record]) == [("ended", "lease_lost")]


async def test_lease_whose_worker_has_stopped_ends_at_once(bridge: Bridge) -> None:
    (record,) = await bridge.supervise("a")
    assert await bridge.store.expire(record.key, LEASE.lease_id, LEASE.worker_ts_ms, AT)
    for _ in range(2):
        await bridge.supervisor.tick()
    assert await bridge.states([record]) == [("ended", "lease_lost")]


# --- abandoned attempts -------------------------------------------------------------------------------------------


async def test_abandoned_attempts_are_found_in_parts(bridge: Bridge) -> None:
    records = [await accepted(bridge.store, name) for name in names(5)]
    keys = [""]
    for count in (2, 2, 1):
        found = await bridge.store.find_unchanged(AT + 1, ["crawler"], after=keys[-1], limit=2)
        assert len(found) == count
        keys += [record.key for record in found]
    assert keys[1:] == sorted(record.key for record in records)
