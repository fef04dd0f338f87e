"""Which events of external workers apply to an attempt, whom they make its owner, and what they do to the lease."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.unit.dispatches import KINDS, LEASE, dispatch, ended, event

from flowkit.bridge.rules.fencing import NodeRun, Verdict, judge, new_lease, renewed

if TYPE_CHECKING:
    from flowkit.adapters.dispatches import Dispatch

RUNNING = ("TASK_ACCEPTED", "TASK_HEARTBEAT", "BATCH_OK", "BATCH_FAILED")


@pytest.mark.parametrize("kind", KINDS)
def test_event_of_an_unknown_attempt_is_unknown(kind: str) -> None:
    """Stale epochs, and other deployments."""
    assert judge(None, event(kind)) is Verdict.UNKNOWN


@pytest.mark.parametrize("kind", KINDS)
def test_first_event_of_any_kind_makes_its_worker_the_owner(kind: str) -> None:
    """Reordered events."""
    assert judge(dispatch(), event(kind)) is Verdict.ACCEPT


@pytest.mark.parametrize("kind", KINDS)
def test_events_of_the_owner_apply(kind: str) -> None:
    assert judge(dispatch(lease=LEASE), event(kind)) is Verdict.APPLY


@pytest.mark.parametrize("kind", KINDS)
def test_events_of_another_worker_change_nothing(kind: str) -> None:
    """H7, H16: an acceptance with a new lease takes the run; what shows a run of an earlier owner stops that worker."""
    record = dispatch(lease=replace(LEASE, worker_id="w2", lease_id="l2"), past_leases=("l1",))
    expected = Verdict.STOP_WORKER if kind in RUNNING else Verdict.IGNORE
    assert judge(record, event(kind, "w1")) is expected


def test_acceptance_with_a_new_lease_takes_the_run() -> None:
    """H7."""
    assert judge(dispatch(lease=LEASE), event("TASK_ACCEPTED", "w2", lease_id="l2")) is Verdict.ACCEPT
    assert judge(dispatch(lease=LEASE), event("TASK_ACCEPTED", "w1", lease_id="l2")) is Verdict.ACCEPT


@pytest.mark.parametrize("kind", ["TASK_ACCEPTED", "TASK_HEARTBEAT"])
def test_redelivered_event_of_an_earlier_lease_does_not_stop_the_same_worker(kind: str) -> None:
    """H7: a restarted worker accepts the same epoch again. A signal would stop its current run, too."""
    record = dispatch(lease=replace(LEASE, lease_id="l2"), past_leases=("l1",))
    assert judge(record, event(kind)) is Verdict.IGNORE


def test_acceptance_after_other_events_of_its_run_names_the_run_only() -> None:
    """Reordered events."""
    assert judge(dispatch(lease=replace(LEASE, lease_id="")), event("TASK_ACCEPTED")) is Verdict.APPLY


@pytest.mark.parametrize("kind", KINDS)
def test_events_after_the_end_change_nothing(kind: str) -> None:
    """H17. Late heartbeats of the worker that ended the run are normal, so it gets no signal."""
    assert judge(ended("w1"), event(kind, "w1")) is Verdict.IGNORE


@pytest.mark.parametrize("kind", RUNNING)
@pytest.mark.parametrize("record", [ended("w2"), ended("")], ids=["other worker", "verdict"])
def test_worker_that_runs_an_ended_attempt_is_stopped(record: Dispatch, kind: str) -> None:
    """H6, H7, H28, H33."""
    assert judge(record, event(kind, "w1")) is Verdict.STOP_WORKER


def test_lease_duration_comes_from_the_message_and_its_begin_from_the_engines_clock() -> None:
    """The worker's clock may be years off."""
    accepted = event("TASK_ACCEPTED", ts_ms=1_000, lease_deadline_ts_ms=21_000)
    lease = new_lease(dispatch(), accepted, received_at=500.0)
    assert (lease.ttl_sec, lease.expires_at, lease.worker_ts_ms) == (20.0, 522.0, 1_000)


@pytest.mark.parametrize("deadline_ms", [0, 1_000, 10**15])
def test_implausible_lease_deadline_means_the_engines_lease_duration(deadline_ms: int) -> None:
    accepted = event("TASK_ACCEPTED", ts_ms=1_000, lease_deadline_ts_ms=deadline_ms)
    record = dispatch()
    assert new_lease(record, accepted, received_at=0.0).ttl_sec == record.attempt.lease_ttl_sec


@pytest.mark.parametrize("kind", KINDS)
def test_every_event_of_the_owner_renews_its_lease(kind: str) -> None:
    """H33."""
    assert renewed(LEASE, event(kind), received_at=200.0).expires_at == 211.0


def test_lease_deadline_never_moves_back() -> None:
    """Delayed and reordered events."""
    beat = event("TASK_HEARTBEAT", ts_ms=500, lease_deadline_ts_ms=1_500)
    later = renewed(LEASE, beat, received_at=50.0)
    assert (later.expires_at, later.worker_ts_ms) == (LEASE.expires_at, LEASE.worker_ts_ms)


def test_batches_of_one_poll_are_written_once() -> None:
    record = dispatch(lease=LEASE)
    run = NodeRun({record.key: record}, at=100.0)
    for _ in range(3):
        run.count(record.key)
    assert (run.take_batches(record.key), run.take_batches(record.key)) == (3, 0)
    assert run.records[record.key].batches == 3
