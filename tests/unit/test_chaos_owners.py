"""The checks that no two external workers run one node to the end, and that no dispatch record stays open."""

from __future__ import annotations

from typing import Any

from tests.integration.chaos.owners import Runs, is_abandoned


def test_record_of_an_attempt_is_abandoned_if_its_bridge_has_died() -> None:
    owned = {"owner": "flowkit-bridge-some-host-41-a1b2c3"}
    assert is_abandoned(owned, {7, 42})
    assert not is_abandoned(owned, {7, 41})
    assert not is_abandoned({"owner": ""}, {7})


def event(kind: str, worker: str, epoch: int = 1, **payload: str) -> dict[str, Any]:
    """Return a status event."""
    place = {"task_id": "t", "node_id": "n", "attempt_epoch": epoch, "ts_ms": 1_000}
    return {**place, "payload": {"kind": kind, "worker_id": worker, **payload}}


TAKEN = [
    event("TASK_ACCEPTED", "first", lease_id="1"),
    event("TASK_ACCEPTED", "second", lease_id="2"),
    event("TASK_DONE", "second"),
]


def unstopped(events: list[dict[str, Any]], *signals: dict[str, Any], dead: str = "") -> list[str]:
    """Return the workers that the check reports."""
    return [run.worker_id for run in Runs(events, signals).unstopped(lambda worker, _: worker == dead)]


def test_check_reports_a_worker_that_runs_on_beside_a_newer_owner() -> None:
    assert unstopped(TAKEN) == ["first"]
    redispatched = [TAKEN[0], event("TASK_ACCEPTED", "second", epoch=2, lease_id="2")]
    assert unstopped(redispatched) == ["first"]


def test_check_accepts_workers_that_were_cancelled_or_died_or_finished() -> None:
    signal = {"task_id": "t", "node_id": "n", "attempt_epoch": 1, "target_worker_id": "first"}
    assert unstopped(TAKEN, signal) == []
    assert unstopped(TAKEN, {**signal, "attempt_epoch": 2}) == ["first"]
    assert unstopped(TAKEN, dead="first") == []
    assert unstopped([*TAKEN, event("CANCELLED", "first")]) == []
