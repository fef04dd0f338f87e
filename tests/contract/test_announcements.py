"""What the registry shows of external workers, whose announcements anyone may have written."""

from __future__ import annotations

from typing import Any

import pytest
from tests.contract.bridge_side import BridgeSide, kafka_record
from tests.contract.builders import documents_of
from tests.contract.poison import SNAPSHOT, nested, text
from tests.unit.bridge_records import message

from flowkit.limits import ANNOUNCEMENT_BYTES

CAPABILITIES = {"roles": ["indexer"]}


async def announce(side: BridgeSide, **fields: Any) -> dict[str, Any]:
    """Announce a worker that has started, and return its row."""
    online = {
        "type": "indexer",
        "version": "2",
        "capacity": {"tasks": 1},
        "capabilities": CAPABILITIES,
        **fields,
    }
    sent = message("WORKER_ONLINE", online, task_id="*", node_id="*", step_type="*", attempt_epoch=0)
    await side.handle(kafka_record(side.topics.announce, text(sent)))
    [row] = await documents_of(side.db.worker_registry)
    return row


async def test_capabilities_and_capacity_of_a_worker_are_shown(db: Any) -> None:
    row = await announce(await BridgeSide.create(db))
    assert (row["capabilities"], row["capacity"], row["type"]) == (CAPABILITIES, {"tasks": 1}, "indexer")


@pytest.mark.parametrize(
    "fields",
    [
        {"capabilities": {"text": "x" * ANNOUNCEMENT_BYTES}},
        {"capacity": {"text": "x" * ANNOUNCEMENT_BYTES}},
        {"capabilities": nested(150)},
        {"capabilities": {"n": 2**70}},
    ],
    ids=["large capabilities", "large capacity", "deep", "integer"],
)
async def test_worker_whose_capabilities_cannot_be_stored_is_online_and_its_earlier_runs_are_lost(
    db: Any, fields: dict[str, Any]
) -> None:
    """H9: it has restarted, so it does not continue its run."""
    side = await BridgeSide.create(db)
    await side.open("n")
    row = await announce(side, **fields)
    assert (row["status"], row["type"], row["version"]) == ("online", "indexer", "2")
    assert row.keys().isdisjoint({"capabilities", "capacity"})
    lease = (await side.dispatch("n")).lease
    assert lease is not None
    assert lease.ended


@pytest.mark.parametrize(
    ("changes", "renews"), [({}, True), ({"worker_id": "w2"}, False), ({"lease_id": "l2"}, False)]
)
async def test_reply_renews_only_the_lease_of_the_owner(
    db: Any, changes: dict[str, str], renews: bool
) -> None:
    side = await BridgeSide.create(db)
    held = await side.open("n")
    reported = {**SNAPSHOT["lease"], **changes}
    reply = message("", {**SNAPSHOT, "lease": reported}, node_id="n", msg_type="reply")
    await side.handle(kafka_record(side.topics.reply, text(reply)))
    after = (await side.dispatch("n")).lease
    assert after is not None
    assert held.lease is not None
    assert (after.expires_at > held.lease.expires_at) is renews


async def test_checkpoint_of_a_run_is_not_stored(db: Any) -> None:
    run = {"task_id": "t", "node_id": "n", "step_type": "indexer", "attempt_epoch": 1, "lease_id": "l1"}
    resume = {**run, "cancel_token": "c", "started_at_ms": 1, "checkpoint": {"secret": "x"}}
    assert "secret" not in str(await announce(await BridgeSide.create(db), resume=resume))
