"""Which events apply to an attempt (H7, H9, H15 to H17), and what the bridge counts while it applies them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.bridge_records import NODE, NOW, NOW_MS, PAYLOADS, TASK, event, lease, record
from tests.unit.property_examples import examples

from flowkit.adapters.dispatches import (
    Dispatch,
    DispatchState,
    Outcome,
    OutcomeKind,
    WorkerLease,
    key_of,
)
from flowkit.bridge.rules.fencing import (
    TERMINAL,
    PolledNode,
    Verdict,
    judge,
    lease_id_of,
    new_lease,
    record_key,
)

LEASED = ["TASK_ACCEPTED", "TASK_HEARTBEAT", "TASK_RESUMED"]
TERMINALS = ["CANCELLED", "TASK_DONE", "TASK_FAILED"]
RUNNING = sorted(PAYLOADS.keys() - set(TERMINALS))
ENDED = [DispatchState.FINISHING, DispatchState.ENDED, DispatchState.REPORTED]


def from_worker(worker_id: str, kind: str, lease_id: str = "l2", role: str = "indexer") -> object:
    """Return the verdict on an event for an attempt that worker w1 runs with lease l1."""
    payload = {"worker_id": worker_id, **({"lease_id": lease_id} if kind in LEASED else {})}
    return judge(record(lease=lease()), event(kind, payload, role=role))


# --- verdicts -----------------------------------------------------------------------------------------------------


def test_an_attempt_without_a_record_is_unknown() -> None:
    for kind in PAYLOADS:
        assert judge(None, event(kind)) is Verdict.UNKNOWN


def test_the_first_event_of_any_kind_makes_its_worker_the_owner() -> None:
    for kind in PAYLOADS:
        assert judge(record(), event(kind)) is Verdict.ACCEPT


def test_events_of_the_owner_apply_on_the_topic_of_its_role() -> None:
    for kind in PAYLOADS:
        assert from_worker("w1", kind, "l1") is Verdict.APPLY


@pytest.mark.parametrize("held", [record(), record(lease=lease())], ids=["not accepted", "accepted"])
def test_events_on_the_topic_of_another_role_change_nothing(held: Dispatch) -> None:
    """A worker of another role could otherwise take over or end the run."""
    for kind in sorted(PAYLOADS.keys() - {"TASK_HEARTBEAT"}):
        assert judge(held, event(kind, role="parser", step_type="parser")) is Verdict.IGNORE
        assert judge(held, event(kind, {"worker_id": "w2"}, role="parser")) is Verdict.IGNORE


def test_a_heartbeat_on_the_topic_of_another_role_renews_only_the_lease_that_it_names() -> None:
    """H15."""
    beat, unnamed = event("TASK_HEARTBEAT", role="parser"), record(lease=lease(lease_id=""))
    assert from_worker("w1", "TASK_HEARTBEAT", "l1", "parser") is Verdict.APPLY
    assert from_worker("w1", "TASK_HEARTBEAT", "l2", "parser") is Verdict.IGNORE
    assert from_worker("w2", "TASK_HEARTBEAT", "l1", "parser") is Verdict.STOP_WORKER
    assert from_worker("w1", "TASK_HEARTBEAT", "", "parser") is Verdict.IGNORE
    assert from_worker("w1", "TASK_HEARTBEAT", "") is Verdict.APPLY, "on the topic of its own role"
    assert [judge(held, beat) for held in (record(), unnamed)] == [Verdict.IGNORE] * 2


@pytest.mark.parametrize("kind", ["TASK_HEARTBEAT", "TASK_RESUMED"])
def test_a_heartbeat_of_the_owner_with_an_unknown_lease_changes_nothing(kind: str) -> None:
    assert from_worker("w1", kind, "l2") is Verdict.IGNORE


def test_an_acceptance_with_the_lease_of_another_worker_does_not_take_the_run() -> None:
    assert from_worker("w2", "TASK_ACCEPTED", "l1") is Verdict.STOP_WORKER


def test_a_second_acceptance_takes_the_run() -> None:
    assert from_worker("w2", "TASK_ACCEPTED") is Verdict.ACCEPT
    assert from_worker("w1", "TASK_ACCEPTED") is Verdict.ACCEPT


def test_a_redelivered_acceptance_does_not_take_the_run_back() -> None:
    taken = record(lease=lease("w2", "l2"), past_leases=("l1",))
    assert judge(taken, event("TASK_ACCEPTED")) is Verdict.STOP_WORKER
    assert from_worker("w1", "TASK_ACCEPTED", "l1") is Verdict.APPLY


@pytest.mark.parametrize("kind", ["TASK_ACCEPTED", "TASK_HEARTBEAT"])
def test_a_redelivered_event_of_an_earlier_lease_does_not_stop_the_same_worker(kind: str) -> None:
    """H7: a restarted worker accepts the same epoch again. A signal would stop its current run, too."""
    restarted = record(lease=lease("w1", "l2"), past_leases=("l1",))
    assert judge(restarted, event(kind)) is Verdict.IGNORE


def test_an_acceptance_after_other_events_of_its_run_names_the_lease() -> None:
    first = event("BATCH_OK")
    held = record(lease=new_lease(record(), first, NOW))
    assert lease_id_of(first) == ""
    assert judge(held, event("TASK_ACCEPTED")) is Verdict.APPLY


@pytest.mark.parametrize("kind", sorted(set(RUNNING) - {"TASK_ACCEPTED"}))
def test_another_worker_that_still_runs_the_attempt_is_stopped(kind: str) -> None:
    """H33: it may send no heartbeats, but batches."""
    assert from_worker("w2", kind) is Verdict.STOP_WORKER


@pytest.mark.parametrize("kind", TERMINALS)
def test_the_end_of_another_workers_run_is_ignored(kind: str) -> None:
    assert from_worker("w2", kind) is Verdict.IGNORE


@pytest.mark.parametrize("state", ENDED)
def test_late_events_of_the_worker_that_ended_the_attempt_are_ignored(state: DispatchState) -> None:
    for kind in PAYLOADS:
        outcome = Outcome(kind=OutcomeKind.DONE, at=NOW, worker_id="w1")
        assert judge(record(lease=lease(), state=state, outcome=outcome), event(kind)) is Verdict.IGNORE


@pytest.mark.parametrize("ended_by", ["", "w2"], ids=["a bridge", "another worker"])
def test_a_worker_that_still_runs_an_ended_attempt_is_stopped(ended_by: str) -> None:
    """H6, H7, H28, H33."""
    outcome = Outcome(kind=OutcomeKind.FAILED, at=NOW, worker_id=ended_by)
    ended = record(lease=lease(), state=DispatchState.ENDED, outcome=outcome)
    for kind in PAYLOADS:
        expected = Verdict.STOP_WORKER if kind in RUNNING else Verdict.IGNORE
        assert judge(ended, event(kind)) is expected


def test_terminal_events_are_those_that_end_a_run() -> None:
    assert {str(kind) for kind in TERMINAL} == set(TERMINALS)


# --- any order of events ------------------------------------------------------------------------------------------

EVENTS = st.tuples(
    st.sampled_from(sorted(PAYLOADS)),
    st.sampled_from(["w1", "w2"]),
    st.sampled_from(["l1", "l2", "l3"]),
)


def applied(held: Dispatch, kind: str, worker: str, lease_id: str) -> tuple[Dispatch, Verdict]:
    """Return the record after an event, as the bridge stores it, and the verdict."""
    given_event = event(kind, {"worker_id": worker, **({"lease_id": lease_id} if kind in LEASED else {})})
    verdict = judge(held, given_event)
    if verdict is Verdict.ACCEPT:
        past = (*held.past_leases, *([held.lease.lease_id] if held.lease else []))
        held = replace(held, lease=new_lease(held, given_event, NOW), past_leases=past)
    if verdict in (Verdict.ACCEPT, Verdict.APPLY) and given_event.event.kind in TERMINAL:
        outcome = Outcome(kind=OutcomeKind.DONE, at=NOW, worker_id=given_event.worker_id)
        held = replace(held, state=DispatchState.ENDED, outcome=outcome)
    return held, verdict


@given(given_events=st.lists(EVENTS, max_size=12))
@settings(max_examples=examples(80))
def test_nothing_applies_after_the_end_and_no_lease_returns(
    given_events: list[tuple[str, str, str]],
) -> None:
    held, leases = record(), list[str]()
    for kind, worker, lease_id in given_events:
        ended, before = held.state is DispatchState.ENDED, held.lease
        held, verdict = applied(held, kind, worker, lease_id)
        assert not (ended and verdict in (Verdict.ACCEPT, Verdict.APPLY))
        if verdict is Verdict.ACCEPT and held.lease is not None and held.lease.lease_id:
            assert held.lease.lease_id not in leases
        if before is not None:
            leases.append(before.lease_id)


# --- records during one poll --------------------------------------------------------------------------------------


def test_the_key_of_an_event_is_the_key_of_its_record() -> None:
    assert record_key(event()) == key_of(TASK, NODE, 1) == record().key
    assert record_key(event(attempt_epoch=2)) != record().key


def lease_after(run: PolledNode) -> WorkerLease:
    """Return the current lease of the record."""
    found = run.record_of(event())
    assert found is not None
    assert found.lease is not None
    return found.lease


def test_batches_of_one_poll_are_written_once_with_their_number() -> None:
    held = record(lease=lease())
    run = PolledNode({held.key: held}, NOW)
    run.count(held.key)
    run.count(held.key)
    assert run.due_renewals() == [held.key]
    assert [run.take_batches(held.key), run.take_batches(held.key)] == [2, 0]
    assert run.due_renewals() == []
    assert run.records[held.key].batches == 2


@pytest.mark.parametrize(("after_sec", "is_due"), [(0, False), (6, False), (6.1, True), (60, True)])
def test_lease_is_written_once_it_was_extended_by_a_tenth(after_sec: float, is_due: bool) -> None:
    held = record(lease=lease())
    run = PolledNode({held.key: held}, NOW + after_sec)
    run.renew(event("TASK_HEARTBEAT"))
    assert lease_after(run).expires_at == pytest.approx(NOW + 66 + after_sec)
    assert (run.due_renewals() == [held.key]) is is_due


def test_lease_is_written_although_the_bridge_that_stored_its_deadline_has_a_clock_ahead() -> None:
    held = record(lease=lease(expires_at=NOW + 3_600))
    run = PolledNode({held.key: held}, NOW + 7)
    run.renew(event("TASK_HEARTBEAT", ts_ms=NOW_MS + 7_000))
    assert run.due_renewals() == [held.key]


def test_new_lease_is_not_written_again() -> None:
    held = record()
    run = PolledNode({held.key: held}, NOW)
    run.accepted(replace(held, lease=new_lease(held, event("TASK_ACCEPTED"), NOW)))
    run.renew(event("TASK_HEARTBEAT"))
    assert run.due_renewals() == []


@pytest.mark.parametrize("state", ENDED)
def test_ended_attempt_renews_nothing(state: DispatchState) -> None:
    held = record(lease=lease(), state=state)
    run = PolledNode({held.key: held}, NOW + 60)
    run.renew(event("TASK_HEARTBEAT"))
    assert run.due_renewals() == []


def test_events_without_a_record_or_a_lease_renew_nothing() -> None:
    run = PolledNode({record().key: record()}, NOW)
    run.renew(event())
    run.renew(event(attempt_epoch=2))
    assert run.record_of(event(attempt_epoch=2)) is None
    assert run.due_renewals() == []
