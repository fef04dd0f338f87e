"""Workers that are silent, stop, or restart: when their runs are lost, and when they are not."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.bridge.commands import CommandWatch
from flowkit.testing import Misbehavior
from flowkit.testing.external.handlers import scripted
from tests.integration.bridge.checks import (
    NO_RETRY,
    check_finished,
    delay_events,
    forged,
    outcomes,
    status_topic,
    until_processed,
)
from tests.integration.bridge.gates import Gate
from tests.integration.harness import eventually, node

if TYPE_CHECKING:
    from flowkit.testing.external.journal import Entry
    from tests.integration.bridge.external_tasks import ExternalTasks

pytestmark = pytest.mark.server

SLOW = {"batches": 4, "pause_ms": 700}
"""A node that takes several lease times of one second."""

SLOW_UIDS = tuple(f"n-{number}" for number in range(4))

LONG_LEASE = {"lease_ttl_sec": 120.0}
SHORT_LEASE = {"lease_ttl_sec": 1.0}


async def started(external: ExternalTasks, **fields: Any) -> str:
    """Start a task of one external node `n`, which may not use a retry."""
    return await external.create(node("n", external.role, retry_policy=NO_RETRY, **fields))


async def test_run_of_a_worker_that_goes_offline_is_lost_at_once(external: ExternalTasks) -> None:
    """H14: the worker sends no terminal event, and its lease would last two minutes."""
    await external.served_engine()
    leaving = await external.external(Gate().handler, **LONG_LEASE)
    task_id = await started(external)
    await leaving.wait_for("BATCH_OK")
    await leaving.stop()
    await external.external(_opened())
    await check_finished(external, task_id, ["lease_lost", "done"])


async def test_run_of_a_restarted_worker_is_lost_at_once(external: ExternalTasks) -> None:
    """H9: the worker announces the old run and reports it as running, but does not continue it."""
    await external.served_engine()
    gate = Gate()
    worker = await external.external(gate.handler, **LONG_LEASE)
    task_id = await started(external)
    await worker.wait_for("BATCH_OK")
    await worker.restart()
    online = [entry for entry in worker.sent if entry.kind == "WORKER_ONLINE" and entry.payload.get("resume")]
    assert online[0].payload["resume"]["task_id"] == task_id
    gate.open()
    await check_finished(external, task_id, ["lease_lost", "done"])


async def test_run_of_a_restarted_worker_continues_if_a_heartbeat_arrives(
    external: ExternalTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H9."""
    await external.served_engine()
    worker = await external.external(Gate().handler, **LONG_LEASE)
    task_id = await started(external)
    accepted = await worker.wait_for("TASK_ACCEPTED")
    await worker.wait_for("BATCH_OK")
    await until_processed(external)
    verdicts = asyncio.Event()
    _delay_verdicts(monkeypatch, verdicts)
    await worker.restart()
    await _until_expired(external, task_id)
    lease = {"lease_id": accepted.payload["lease_id"], "lease_deadline_ts_ms": 2**52}
    beat = forged(accepted, "TASK_HEARTBEAT", later_ms=60_000, **lease)
    await worker.send_raw(accepted.topic, beat, accepted.key)
    await until_processed(external)
    verdicts.set()
    await worker.wait_for("WORKER_ONLINE", count=len(_announced(worker.sent)) + 3)
    assert await outcomes(external, task_id) == ["open"]
    done = forged(accepted, "TASK_DONE", later_ms=60_001)
    await worker.send_raw(accepted.topic, done, accepted.key)
    await check_finished(external, task_id, ["done"], uids=("b0",))


def _delay_verdicts(monkeypatch: pytest.MonkeyPatch, until: asyncio.Event) -> None:
    """Let the bridge, which runs in another thread, give no verdict about a lease before `until` is set."""
    processed = CommandWatch.status_processed

    async def delayed(self: CommandWatch, role: str, ends: dict[int, int]) -> bool:
        return until.is_set() and await processed(self, role, ends)

    monkeypatch.setattr(CommandWatch, "status_processed", delayed)


def _announced(sent: list[Entry]) -> list[Entry]:
    return [entry for entry in sent if entry.kind == "WORKER_ONLINE"]


async def _until_expired(external: ExternalTasks, task_id: str) -> None:
    async def look() -> bool:
        return bool((await external.dispatch(task_id, "n"))["lease"]["ended"])

    await eventually(look)


def _opened() -> Any:
    gate = Gate()
    gate.open()
    return gate.handler


async def test_silent_worker_keeps_its_run_as_long_as_batches_arrive(external: ExternalTasks) -> None:
    """H33."""
    await external.served_engine()
    silent = Misbehavior(silence=True)
    worker = await external.external(scripted, misbehavior=silent, **SHORT_LEASE)
    task_id = await started(external, inline=SLOW)
    await check_finished(external, task_id, ["done"], uids=SLOW_UIDS)
    assert not worker.sent_for("n", "TASK_HEARTBEAT")


async def test_silent_run_is_lost_and_its_worker_is_stopped(external: ExternalTasks) -> None:
    """H33, H8: queries are weak evidence; a worker that only reports `running` keeps its run no longer than that."""
    await external.served_engine()
    silent = await external.external(Gate().handler, misbehavior=Misbehavior(silence=True), **SHORT_LEASE)
    task_id = await started(external)
    await silent.wait_for("BATCH_OK")
    await external.external(_opened())
    assert (await silent.wait_for("cancel_requested", epoch=1)).reason == "stale_epoch"
    silent.misbehavior.reset()
    await silent.stop()
    assert (await external.result(task_id)).status == "finished"
    first, *others = await outcomes(external, task_id)
    assert (first, others[-1]) == ("lease_lost", "done")
    assert not silent.sent_for("n", "TASK_DONE")


async def test_run_without_a_terminal_event_is_lost(external: ExternalTasks) -> None:
    """H34: the worker is free again."""
    await external.served_engine()
    worker = await external.external(_opened(), misbehavior=Misbehavior(no_terminal=True), **SHORT_LEASE)
    task_id = await started(external)
    await worker.wait_for("suppressed", epoch=1)
    worker.misbehavior.reset()
    await check_finished(external, task_id, ["lease_lost", "done"])


async def test_heartbeats_on_the_topic_of_another_role_renew_the_lease(external: ExternalTasks) -> None:
    """H15."""
    await external.served_engine()
    gate = Gate()
    elsewhere = Misbehavior(heartbeats_on=external.other_role)
    worker = await external.external(gate.handler, gate.handler, misbehavior=elsewhere, **SHORT_LEASE)
    task_id = await started(external)
    await worker.wait_for("TASK_HEARTBEAT", count=12)
    assert await outcomes(external, task_id) == ["open"]
    gate.open()
    await check_finished(external, task_id, ["done"])
    topics = {entry.topic for entry in worker.sent_for("n", "TASK_HEARTBEAT")}
    assert topics == {status_topic(external, external.other_role)}


async def test_replies_of_other_workers_neither_renew_nor_end_a_lease(external: ExternalTasks) -> None:
    """H8: the worker that gets the queries reports `idle`, and that the node is complete."""
    await external.served_engine()
    worker = await external.external(Gate().handler, **SHORT_LEASE)
    task_id = await started(external)
    await worker.wait_for("BATCH_OK")
    reply = forged(worker.sent_for("n")[0], "none")
    await worker.kill()
    other = await external.external(_opened())
    for payload in (_snapshot("idle"), _snapshot("running", lease_id="of another run")):
        await other.send_raw(external.topics["topic_reply"], _replied(reply, payload), task_id)
    await check_finished(external, task_id, ["lease_lost", "done"])


def _snapshot(state: str, lease_id: str = "") -> dict[str, Any]:
    lease = {"worker_id": "other", "lease_id": lease_id, "deadline_ts_ms": 2**52} if lease_id else None
    return {
        "reply": "TASK_SNAPSHOT",
        "worker_id": "other" if lease else None,
        "run_state": state,
        "attempt_epoch": 1,
        "lease": lease,
        "progress": None,
        "artifacts": {"complete": True},
    }


def _replied(event: bytes, payload: dict[str, Any]) -> bytes:
    return json.dumps({**json.loads(event), "msg_type": "reply", "payload": payload}).encode()


async def test_offline_worker_loses_a_run_whose_acceptance_is_processed_later(
    external: ExternalTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H14, delayed events: announcements and status events have topics of their own, so their order may differ."""
    await external.served_engine()
    processing = threading.Event()
    delay_events(monkeypatch, processing)
    leaving = await external.external(Gate().handler, **LONG_LEASE)
    task_id = await started(external)
    await leaving.wait_for("BATCH_OK")
    await leaving.stop()

    async def offline() -> bool:
        return await external.db.worker_registry.find_one({"status": "offline"}) is not None

    await eventually(offline)
    processing.set()
    await external.external(_opened())
    await check_finished(external, task_id, ["lease_lost", "done"])
