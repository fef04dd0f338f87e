"""Checks what the methods of a handler return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit import reason_codes
from flowkit.activities.handlers import BatchResult, FinalizeResult
from flowkit.attempt.failures import failure
from flowkit.hashing import stable_hash

if TYPE_CHECKING:
    from flowkit.activities.handlers import Batch
    from flowkit.models import AttemptFailure


def payload_uid(batch: Batch) -> str:
    """Return the uid for a batch that has none: a hash of its payload. Raise TypeError if JSON cannot hold it."""
    try:
        return stable_hash({"payload": batch.payload})
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"a batch without batch_uid needs a payload that is valid JSON: {error}") from None


def as_result(given: Any) -> BatchResult:
    """Return `given`, the result of `process_batch`. Raise TypeError if it is not a BatchResult."""
    if isinstance(given, BatchResult):
        return given
    raise TypeError(
        f"process_batch must return BatchResult(success=..., metrics={{...}}), not {type(given).__name__}"
    )


def as_final(given: Any) -> FinalizeResult:
    """Return `given`, the result of `finalize`, or an empty result for None. Raise TypeError for anything else."""
    if given is None:
        return FinalizeResult()
    if isinstance(given, FinalizeResult):
        return given
    raise TypeError(
        f"finalize must return FinalizeResult(metrics={{...}}) or None, not {type(given).__name__}"
    )


def unsuccessful(result: BatchResult) -> AttemptFailure:
    """Return the failure that a result with `success=False` reports."""
    code = result.reason_code or reason_codes.ERROR
    return failure(code, result.error or "", permanent=result.permanent)
