"""Events that a program sends in the name of a worker, or to another role's topic, change nothing.

The protocol cannot distinguish some forgeries from what workers do: events of the owner on its own topic, an acceptance
by another worker there, and the announcement of another worker. ACLs prevent these (docs/external-workers.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.bridge_side import ROLES, BridgeSide
from tests.contract.builders import documents_of
from tests.unit.bridge_records import PAYLOADS

from flowkit.adapters.dispatches import DispatchState, Outcome, OutcomeKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokafka import ConsumerRecord

Forgeries = dict[str, tuple[str, dict[str, Any], dict[str, Any]]]
OTHER = {"indexer": "parser", "parser": "indexer"}
NODES = {"accepted": "held", "not accepted": "queued", "ended": "ended"}
SENDERS: dict[str, dict[str, Any]] = {
    "no worker": {"worker_id": None},
    "empty worker": {"worker_id": ""},
    "another worker": {"worker_id": "forger"},
}


def forgeries(kind: str) -> Forgeries:
    """Return the node, the payload and the envelope of each forgery with this kind of event."""
    on_other: Forgeries = {
        f"{name} attempt, topic of another role": (node, {}, {"other": True}) for name, node in NODES.items()
    }
    by_others: Forgeries = {
        f"accepted attempt, {name}": ("held", payload, {})
        for name, payload in SENDERS.items()
        if name != "another worker" or kind != "TASK_ACCEPTED"
    }
    if kind == "TASK_HEARTBEAT":
        del on_other["accepted attempt, topic of another role"]
        stolen = {"lease_id": "forged", "worker_id": "w1"}
        on_other["topic of another role, unknown lease"] = ("held", stolen, {"other": True})
        by_others["unknown lease"] = ("held", stolen, {})
    if kind == "TASK_ACCEPTED":
        by_others["lease of the owner"] = ("held", {"worker_id": "forger", "lease_id": "l1"}, {})
    return {
        **on_other,
        **by_others,
        "another epoch": ("held", {}, {"attempt_epoch": 2}),
    }


def forged(side: BridgeSide, role: str) -> Iterator[tuple[str, ConsumerRecord[bytes, bytes]]]:
    """Yield the name and the record of each forged event about the attempts of a role."""
    for kind in PAYLOADS:
        for name, (node, payload, envelope) in forgeries(kind).items():
            changes = {key: value for key, value in envelope.items() if key != "other"}
            sender = OTHER[role] if "other" in envelope else role
            yield (
                f"{role}: {kind}, {name}",
                side.event(kind, f"{node} {role}", payload, role=sender, **changes),
            )


async def opened(side: BridgeSide) -> None:
    """Open an attempt of each role that is accepted, one that is not, and one that has ended."""
    for role in ROLES:
        await side.open(f"held {role}", role=role)
        await side.open(f"queued {role}", role=role, accepted=False)
        outcome = Outcome(kind=OutcomeKind.DONE, at=1.0, worker_id="w1")
        await side.open(f"ended {role}", role=role, state=DispatchState.REPORTED, outcome=outcome)


async def everything(side: BridgeSide) -> dict[str, list[dict[str, Any]]]:
    """Return the content of every collection except the log."""
    names = ("dispatches", "artifacts", "metrics_raw", "tasks", "stream_progress", "worker_registry")
    return {name: await documents_of(side.db[name]) for name in names}


@pytest.fixture
async def side(db: Any) -> BridgeSide:
    """A bridge on the test's database, with open attempts."""
    made = await BridgeSide.create(db)
    await opened(made)
    return made


async def test_forged_events_change_nothing(side: BridgeSide) -> None:
    events = [each for role in ROLES for each in forged(side, role)]
    assert len({name for name, _ in events}) == len(events) >= 110
    before = await everything(side)
    for name, event in events:
        await side.handle(event)
        assert await everything(side) == before, name
    assert side.delivered == []
    assert {signal.target_worker_id for signal in side.signals} <= {"forger"}


async def test_forged_events_in_one_poll_change_nothing_but_real_ones_apply(side: BridgeSide) -> None:
    """Also after the bridge has learned the owner from events of its own."""
    events = [event for role in ROLES for _, event in forged(side, role)]
    real = [side.event("TASK_DONE", f"held {role}", role=role) for role in ROLES]
    await side.handle(*events, *real, *events)
    assert await side.codes([f"held {role}" for role in ROLES]) == {f"held {role}": "done" for role in ROLES}
    assert [each.outcome.worker_id for each in side.delivered if each.outcome] == ["w1", "w1"]
    for role in ROLES:
        queued = await side.dispatch(f"queued {role}")
        assert queued == side.opened[f"queued {role}"]


@pytest.mark.parametrize("role", ROLES)
async def test_heartbeat_of_the_owner_on_another_topic_renews_its_lease(side: BridgeSide, role: str) -> None:
    """H15: a worker of several roles sends it there."""
    before = side.opened[f"held {role}"]
    await side.handle(side.event("TASK_HEARTBEAT", f"held {role}", role=OTHER[role]))
    after = await side.dispatch(f"held {role}")
    assert before.lease is not None
    assert after.lease is not None
    assert after.lease.expires_at > before.lease.expires_at
    assert replace(after, lease=before.lease) == before


async def test_events_of_attempts_that_nobody_dispatched_are_not_logged(side: BridgeSide) -> None:
    """`flowkit purge` finds rows by their task, so it would never delete those of unknown tasks."""
    forged_events = [event for role in ROLES for name, event in forged(side, role) if "topic of" in name]
    unknown = [side.event(kind, "unknown", dedup_id=kind) for kind in PAYLOADS]
    known = side.event("BATCH_OK", "held indexer")
    await side.handle(*forged_events, *unknown, known)
    rows = await documents_of(side.db.worker_events)
    assert [(row["node_id"], row["payload"]["kind"]) for row in rows] == [("held indexer", "BATCH_OK")]
