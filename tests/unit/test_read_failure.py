"""How the workflow reads the error of an attempt, in all its forms."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from temporalio.exceptions import (
    ApplicationError,
    CancelledError,
    TerminatedError,
    TimeoutError,
    TimeoutType,
)
from tests.unit.activity_errors import wrapped
from tests.unit.property_examples import examples

from flowkit.limits import LAST_ERROR_CHARS, REASON_CODE_CHARS
from flowkit.models import AttemptFailure, FailureKind, NodeState, RetryPolicy
from flowkit.workflows.local_attempts import is_reported
from flowkit.workflows.node import read_failure
from flowkit.workflows.retry import decide


def reported(*details: Any, type: str | None = "boom", message: str = "it broke") -> AttemptFailure:
    """Return the failure read from an error with these details."""
    failure = read_failure(wrapped(ApplicationError(message, *details, type=type, non_retryable=True)))
    assert failure is not None
    return failure


def test_failure_of_this_release_round_trips() -> None:
    written = AttemptFailure(
        kind=FailureKind.EPOCH_TAKEN, code="epoch_taken", message="taken", permanent=True, current_epoch=7
    )
    assert reported(asdict(written)) == written


def test_details_without_a_code_get_the_error_type() -> None:
    assert reported({"kind": "yielded"}) == AttemptFailure(
        kind=FailureKind.YIELDED, code="boom", message="it broke"
    )


@pytest.mark.parametrize("kind", ["quota", "", None, 7, ["failure"], {"kind": "loss"}, float("nan")])
def test_unknown_kind_is_an_ordinary_failure(kind: object) -> None:
    detail = {"kind": kind, "code": "rate_limited", "message": "wait"}
    assert reported(detail) == AttemptFailure(kind=FailureKind.FAILURE, code="rate_limited", message="wait")


def test_unknown_keys_are_ignored() -> None:
    detail = {"kind": "loss", "code": "lease_lost", "message": "gone", "retry_after": 3, "": None}
    assert reported(detail) == AttemptFailure(kind=FailureKind.LOSS, code="lease_lost", message="gone")


@pytest.mark.parametrize("value", [7, None, ["x"], {"a": 1}, True, 0.5])
def test_code_or_message_of_the_wrong_type_is_taken_from_the_error(value: object) -> None:
    failure = reported({"kind": "failure", "code": value, "message": value})
    assert (failure.code, failure.message) == ("boom", "it broke")


@pytest.mark.parametrize("value", ["yes", 1, None, [], "false"])
def test_only_the_value_true_makes_a_failure_permanent(value: object) -> None:
    assert not reported({"kind": "failure", "code": "c", "permanent": value}).permanent


def test_invalid_epoch_is_read_as_zero() -> None:
    for value in [-1, True, 1.5, "7", None, 2**31, 10**400, [1]]:
        assert (
            reported({"kind": "epoch_taken", "code": "epoch_taken", "current_epoch": value}).current_epoch
            == 0
        )


def test_long_texts_are_truncated() -> None:
    failure = reported({"kind": "failure", "code": "c" * 5_000, "message": "m" * 50_000})
    assert (len(failure.code), len(failure.message)) == (REASON_CODE_CHARS, LAST_ERROR_CHARS)
    bare = reported(type="t" * 5_000, message="m" * 50_000)
    assert (len(bare.code), len(bare.message)) == (REASON_CODE_CHARS, LAST_ERROR_CHARS)


def test_lone_surrogates_become_encodable_text() -> None:
    failure = reported({"kind": "failure", "code": "c\ud800", "message": "\udfff m"})
    assert f"{failure.code}{failure.message}".encode() == rb"c\ud800\udfff m"


@pytest.mark.parametrize("type", [None, ""])
def test_error_without_a_type_is_unexpected(type: str | None) -> None:
    assert reported(type=type).code == "unexpected_error"


def test_temporal_errors_are_mapped_to_failure_kinds() -> None:
    def read(cause: BaseException) -> tuple[FailureKind, str] | None:
        failure = read_failure(wrapped(cause))
        return None if failure is None else (failure.kind, failure.code)

    timeout = TimeoutError("late", type=TimeoutType.START_TO_CLOSE, last_heartbeat_details=[])
    silent = TimeoutError("silent", type=TimeoutType.HEARTBEAT, last_heartbeat_details=[])
    assert read(CancelledError()) is None
    assert read(timeout) == (FailureKind.FAILURE, "timeout")
    assert read(silent) == (FailureKind.LOSS, "lease_lost")
    assert read(ApplicationError("x", type="WorkerShutdown")) == (FailureKind.HANDOVER, "worker_shutdown")
    assert read(ApplicationError("x", type="NotFoundError")) == (FailureKind.LOSS, "dispatch_lost")
    assert read(TerminatedError("x")) == (FailureKind.FAILURE, "unexpected_error")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["kind", "code", "message", "permanent", "current_epoch", "more"])
KINDS = st.sampled_from([kind.value for kind in FailureKind])


@settings(max_examples=examples(100))
@given(
    details=st.lists(JSON | st.dictionaries(KEYS, JSON | KINDS), max_size=3),
    type=st.none() | st.text(max_size=10),
    message=st.text(st.characters(), max_size=10),
)
def test_any_details_can_be_read_and_decided(details: list[Any], type: str | None, message: str) -> None:
    error = ApplicationError(message, *details, type=type, non_retryable=True)
    is_reported(error)
    failure, state = read_failure(wrapped(error)), NodeState(epoch=3)
    assert failure is not None
    decide(RetryPolicy(), failure, state, 0.5)
    assert failure.code
    (failure.code + failure.message).encode()
    assert 0 <= state.epoch < 2**31
