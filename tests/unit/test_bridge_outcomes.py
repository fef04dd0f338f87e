"""The outcome of an attempt, from the terminal event of its worker or from a verdict of the bridge."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.bridge_records import NOW, event, lease, record

from flowkit.adapters.dispatches import (
    CancelRequest,
    Outcome,
    OutcomeKind,
    from_document,
    outcome_fields,
    to_document,
)
from flowkit.bridge.rules import outcomes
from flowkit.errors import KafkaUnavailable, StoreUnavailable
from flowkit.limits import LAST_ERROR_CHARS, REASON_CODE_CHARS
from flowkit.models import AttemptFailure, FailureKind

CANCELLED = record(cancel=CancelRequest(reason="stop", at=NOW))


def failure_of(outcome: Outcome) -> AttemptFailure:
    """Return the failure of a failed attempt."""
    assert outcome.kind is OutcomeKind.FAILED
    assert outcome.failure is not None
    return outcome.failure


def ended(kind: str, payload: dict[str, Any] | None = None) -> Outcome:
    """Return the outcome of a terminal event of worker w1."""
    return outcomes.outcome_of(record(), event(kind, payload), NOW)


# --- terminal events ----------------------------------------------------------------------------------------------


def test_a_finished_run_keeps_metrics_and_reference() -> None:
    done = ended("TASK_DONE", {"metrics": {"total": 2}, "artifacts_ref": {"path": "s3://x"}})
    assert (done.kind, done.worker_id) == (OutcomeKind.DONE, "w1")
    assert (done.metrics, done.artifacts_ref) == ({"total": 2}, {"path": "s3://x"})
    assert ended("TASK_DONE", {"artifacts_ref": {}}).artifacts_ref is None


@pytest.mark.parametrize("permanent", [True, False])
def test_a_failed_run_keeps_code_and_permanence(permanent: bool) -> None:
    found = ended("TASK_FAILED", {"reason_code": "no_disk", "permanent": permanent, "error": "full"})
    assert failure_of(found) == AttemptFailure(
        kind=FailureKind.FAILURE, code="no_disk", message="full", permanent=permanent
    )


@pytest.mark.parametrize(
    ("payload", "code", "length"),
    [
        ({"reason_code": "", "error": None}, "error", 0),
        ({"reason_code": "c" * 1_000}, "c" * REASON_CODE_CHARS, 0),
        ({"error": "e" * 10_000}, "error", LAST_ERROR_CHARS),
    ],
)
def test_codes_and_texts_of_workers_are_bounded(payload: dict[str, Any], code: str, length: int) -> None:
    found = failure_of(ended("TASK_FAILED", payload))
    assert (found.code, len(found.message)) == (code, length)


@pytest.mark.parametrize("kind", ["TASK_DONE", "TASK_FAILED", "CANCELLED"])
def test_after_a_cancel_request_every_end_is_a_cancel(kind: str) -> None:
    found = outcomes.outcome_of(CANCELLED, event(kind), NOW)
    assert (found.kind, found.failure) == (OutcomeKind.CANCELLED, None)


@pytest.mark.parametrize(
    "payload",
    [{"metrics": {"n": 2**80}}, {"metrics": {"a\x00b": 1}}, {"artifacts_ref": {"n": 2**64}}],
    ids=str,
)
def test_metrics_that_cannot_be_stored_fail_the_attempt(payload: dict[str, Any]) -> None:
    found = failure_of(ended("TASK_DONE", payload))
    assert (found.code, found.permanent, found.kind) == ("bad_metrics", True, FailureKind.FAILURE)


# --- verdicts of the bridge ---------------------------------------------------------------------------------------

FREE, RETRY, LOSS = FailureKind.YIELDED, FailureKind.FAILURE, FailureKind.LOSS
VERDICTS: dict[str, tuple[Outcome, FailureKind, bool]] = {
    "dispatch_lost": (outcomes.dispatch_lost("the command was dropped", NOW), FREE, False),
    "unclaimed_batches": (outcomes.unclaimed(3, "up", NOW, settled=4), FREE, False),
    "lease_lost": (outcomes.lease_lost(record(lease=lease()), NOW), LOSS, False),
    "timeout": (outcomes.timeout(5, NOW), RETRY, False),
    "cancelled_by_worker": (outcomes.not_requested(NOW, "w1"), RETRY, False),
    "batch_uid_clash": (outcomes.uid_clash("b1", ["a", "b"], NOW), RETRY, True),
}


@pytest.mark.parametrize("code", VERDICTS)
def test_a_verdict_has_its_code_and_its_budget(code: str) -> None:
    found, kind, permanent = VERDICTS[code]
    failure = failure_of(found)
    assert (failure.code, failure.kind, failure.permanent) == (code, kind, permanent)
    assert failure.message


def test_a_command_that_is_not_in_its_topic_is_dispatched_again_for_free() -> None:
    found = outcomes.not_in_topic()
    assert (found.code, found.kind) == ("dispatch_lost", FREE)


def test_texts_name_the_worker_the_source_and_the_uid() -> None:
    assert "worker 'w1' sent no event for 60 s" in failure_of(VERDICTS["lease_lost"][0]).message
    assert (
        "without 3 batches, for example of node 'up'" in failure_of(VERDICTS["unclaimed_batches"][0]).message
    )
    assert "batch uid 'b1' occurs in the sources a, b" in failure_of(VERDICTS["batch_uid_clash"][0]).message


def test_an_error_of_mongodb_is_free_and_any_other_permanent_unless_it_is_temporary() -> None:
    assert failure_of(outcomes.outcome_of_error(StoreUnavailable("away"), NOW)).kind is FREE
    assert not failure_of(outcomes.outcome_of_error(KafkaUnavailable("away"), NOW)).permanent


# --- stored outcomes ----------------------------------------------------------------------------------------------

OUTCOMES = [found for found, _, _ in VERDICTS.values()] + [
    ended("TASK_DONE"),
    ended("TASK_FAILED"),
    ended("CANCELLED"),
    outcomes.cancelled(NOW),
]


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_outcome_is_read_as_it_was_stored(outcome: Outcome) -> None:
    held = record(outcome=outcome, lease=lease(), past_leases=("l0",), accepted_at=NOW)
    document = {**to_document(held), "outcome": outcome_fields(outcome)}
    assert from_document(document) == held
