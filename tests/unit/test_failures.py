"""Errors on their way to Temporal: every text can be encoded, and every error keeps its kind."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.api.failure.v1 import Failure
from temporalio.converter import FailureConverter, PayloadConverter

from flowkit.attempt.failures import failed_attempt, failure, from_error, refusal
from flowkit.core.user_code import error_text
from flowkit.errors import AdapterError, EpochTaken, Fenced, FlowKitError, StoreRefused, StoreUnavailable
from flowkit.limits import LAST_ERROR_CHARS, REASON_CODE_CHARS
from flowkit.models import AttemptFailure, FailureKind
from flowkit.text import clean

TEXTS = st.text(st.characters(exclude_categories=[]), max_size=300)
"""Any Python text, including unpaired surrogates."""


def sent(error: BaseException) -> bytes:
    """Return an error as Temporal's library sends it."""
    record = Failure()
    FailureConverter.default.to_failure(error, PayloadConverter.default, record)
    return record.SerializeToString()


@given(TEXTS)
def test_cleaned_text_can_be_encoded_and_is_otherwise_unchanged(text: str) -> None:
    cleaned = clean(text)
    cleaned.encode("utf-8")
    assert clean(cleaned) == cleaned
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert cleaned == text


def test_lone_surrogate_stays_legible() -> None:
    assert clean("half \ud83d here") == "half \\ud83d here"


@given(TEXTS, TEXTS, st.booleans())
def test_every_failure_of_a_handler_can_be_sent(code: str, message: str, permanent: bool) -> None:
    error = failed_attempt(failure(code, message, permanent=permanent))
    assert sent(error)
    assert len(error.type or "") <= REASON_CODE_CHARS
    assert len(error.message) <= max(LAST_ERROR_CHARS, REASON_CODE_CHARS)
    assert error.details[0]["permanent"] is permanent
    json.dumps(error.details[0]).encode()


@given(TEXTS)
def test_every_engine_rejection_can_be_sent(text: str) -> None:
    assert sent(refusal(StoreRefused(text)))
    assert sent(failed_attempt(AttemptFailure(kind=FailureKind.LOSS, code=text, message=text)))
    assert sent(failed_attempt(from_error(AdapterError(text))))
    assert clean(error_text(ValueError(text))) == error_text(ValueError(text))


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (StoreUnavailable(), FailureKind.YIELDED, "mongo_unavailable"),
        (StoreRefused(), FailureKind.FAILURE, "mongo_refused"),
        (EpochTaken(3), FailureKind.EPOCH_TAKEN, "epoch_taken"),
        (Fenced(), FailureKind.FENCED, "fenced"),
        (AdapterError("no"), FailureKind.FAILURE, "adapter_error"),
    ],
)
def test_each_flowkit_error_has_its_failure_kind(error: FlowKitError, kind: FailureKind, code: str) -> None:
    reported = from_error(error)
    assert (reported.kind, reported.code) == (kind, code)
