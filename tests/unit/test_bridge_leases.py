"""Leases of external workers, whose clocks differ, and the decision whether a worker has read a command."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.bridge_records import NOW, NOW_MS, attempt, event, lease, record
from tests.unit.property_examples import examples

from flowkit.bridge.commands import (
    SKIPPED_AFTER_SEC,
    CommandState,
    command_state,
    queue_position,
)
from flowkit.bridge.rules.fencing import document_deadline_ms, new_lease, renewed
from flowkit.bridge.supervisor import Supervised

if TYPE_CHECKING:
    from flowkit.adapters.dispatches import Dispatch

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def beat(ttl_ms: int = 60_000, skew_ms: int = 0) -> dict[str, int]:
    """Return the times of a heartbeat of a worker whose clock differs by `skew_ms`."""
    return {"ts_ms": NOW_MS + skew_ms, "deadline": NOW_MS + skew_ms + ttl_ms}


def granted_sec(ttl_ms: int, skew_ms: int = 0) -> float:
    """Return the number of seconds for which the bridge grants a lease."""
    times = beat(ttl_ms, skew_ms)
    sent = event("TASK_ACCEPTED", {"lease_deadline_ts_ms": times["deadline"]}, ts_ms=times["ts_ms"])
    return new_lease(record(), sent, NOW).expires_at - NOW


# --- leases -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skew_ms", [-HOUR_MS, -1, 0, 1, HOUR_MS, 365 * DAY_MS])
def test_the_clock_of_a_worker_does_not_matter(skew_ms: int) -> None:
    assert granted_sec(60_000, skew_ms) == pytest.approx(66)


@pytest.mark.parametrize(("ttl_ms", "granted"), [(1_000, 1.1), (60_000, 66), (DAY_MS, 26.4 * 3600)])
def test_a_lease_lasts_a_tenth_longer_than_the_worker_says(ttl_ms: int, granted: float) -> None:
    assert granted_sec(ttl_ms) == pytest.approx(granted, rel=1e-6)


@pytest.mark.parametrize("ttl_ms", [-HOUR_MS, 0, 1, 499, DAY_MS + 1, 365 * DAY_MS])
def test_an_implausible_duration_is_replaced_by_the_setting(ttl_ms: int) -> None:
    assert granted_sec(ttl_ms) == pytest.approx(attempt().lease_ttl_sec * 1.1)


def test_a_first_event_without_a_deadline_grants_a_lease_without_an_id() -> None:
    made = new_lease(record(), event("BATCH_OK"), NOW)
    assert (made.worker_id, made.lease_id, made.ttl_sec) == ("w1", "", attempt().lease_ttl_sec)


@pytest.mark.parametrize("kind", ["TASK_HEARTBEAT", "BATCH_OK", "BATCH_FAILED", "TASK_RESUMED"])
def test_every_event_renews_a_lease_for_its_own_duration(kind: str) -> None:
    after = renewed(lease(), event(kind), NOW + 50)
    assert after.expires_at == pytest.approx(NOW + 116)
    assert after.ttl_sec == 60.0


def test_a_deadline_and_the_time_of_the_worker_never_move_back() -> None:
    earlier = event("TASK_HEARTBEAT", {"lease_deadline_ts_ms": NOW_MS - 9_000}, ts_ms=NOW_MS - 10_000)
    after = renewed(lease(), earlier, NOW)
    assert (after.expires_at, after.worker_ts_ms) == (NOW + 66, NOW_MS)


@given(
    ttls=st.lists(st.integers(-DAY_MS, 2 * DAY_MS), min_size=1, max_size=10),
    skew_ms=st.integers(-DAY_MS, DAY_MS),
)
@settings(max_examples=examples(60))
def test_deadlines_are_a_running_maximum(ttls: list[int], skew_ms: int) -> None:
    held = lease()
    for number, ttl_ms in enumerate(ttls):
        times = beat(ttl_ms, skew_ms)
        sent = event(payload={"lease_deadline_ts_ms": times["deadline"]}, ts_ms=times["ts_ms"])
        after = renewed(held, sent, NOW + number)
        assert after.expires_at >= held.expires_at
        assert after.worker_ts_ms >= held.worker_ts_ms
        assert 0.5 <= after.ttl_sec <= 24 * 3600
        held = after


def test_the_document_shows_the_deadline_of_the_worker() -> None:
    assert document_deadline_ms(event("TASK_HEARTBEAT"), lease()) == NOW_MS + 60_000
    assert document_deadline_ms(event("BATCH_OK"), lease()) == NOW_MS + 66_000


# --- commands that no worker has accepted -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("committed", "expected"),
    [(0, CommandState.QUEUED), (10, CommandState.QUEUED), (11, CommandState.READ), (99, CommandState.READ)],
)
def test_a_command_was_read_if_its_group_has_committed_an_offset_behind_it(
    committed: int, expected: CommandState
) -> None:
    for age_sec in (0.0, 1e9):
        assert command_state(record(), committed, members=1, age_sec=age_sec) is expected


@pytest.mark.parametrize(
    ("members", "age_sec", "expected"),
    [
        (0, 1e9, CommandState.QUEUED),
        (1, SKIPPED_AFTER_SEC - 1, CommandState.QUEUED),
        (1, SKIPPED_AFTER_SEC, CommandState.READ),
    ],
)
def test_a_group_with_members_and_no_offset_has_skipped_the_command(
    members: int, age_sec: float, expected: CommandState
) -> None:
    assert command_state(record(), None, members=members, age_sec=age_sec) is expected


@pytest.mark.parametrize(("committed", "ahead"), [(None, 0), (0, 10), (7, 3), (10, 0), (99, 0)])
def test_the_position_in_the_queue_counts_the_commands_ahead(committed: int | None, ahead: int) -> None:
    assert queue_position(record(), committed) == ahead
    assert queue_position(record(offset=None), committed) == 0


# --- what a bridge knows and what it reads ------------------------------------------------------------------------

BEFORE = record()
FIRST = record(lease=lease(lease_id="first"))
SECOND = record(lease=lease(lease_id="second"), past_leases=("first",))


@pytest.mark.parametrize(
    ("known", "read", "kept"),
    [
        (BEFORE, FIRST, FIRST),
        (FIRST, BEFORE, FIRST),
        (FIRST, SECOND, SECOND),
        (SECOND, FIRST, SECOND),
        (SECOND, replace(SECOND, batches=3), replace(SECOND, batches=3)),
    ],
)
def test_record_that_was_read_before_an_acceptance_does_not_replace_the_newer_one(
    known: Dispatch, read: Dispatch, kept: Dispatch
) -> None:
    attempt = Supervised(record=known, heard_at=0.0)
    attempt.update(read, 1.0)
    assert attempt.record == kept
