"""What a handler receives and returns for a batch: Batch, BatchResult, FinalizeResult, and the error BatchFailure.

Public modules re-export them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, Field

from flowkit import reason_codes


class Batch(BaseModel):
    """One portion of a node's input. If `batch_uid` is None, FlowKit uses a hash of the payload.

    The uids of one attempt must differ; see `RoleHandler.allow_duplicate_uids`.
    """

    batch_uid: str | None = None
    payload: dict[str, Any] = Field(default_factory=dict)


class BatchResult(BaseModel):
    """The result of a batch. FlowKit stores `metrics` as the `meta` of the batch's artifact, which other nodes pull."""

    success: bool
    metrics: dict[str, Any] = Field(default_factory=dict)
    artifacts_ref: dict[str, Any] | None = None
    reason_code: str | None = None
    """The reason code of a failure; `error` if None."""
    permanent: bool = False
    """Whether a retry of the failure would not help."""
    error: str | None = None

    if TYPE_CHECKING:
        # As for any model that can change. `@role` tells it from results that FlowKit stores by this (`Stored`).
        __hash__: ClassVar[None]


class FinalizeResult(BaseModel):
    """The final result of a node. FlowKit stores `metrics` as the `meta` of the node's complete marker."""

    metrics: dict[str, Any] = Field(default_factory=dict)
    artifacts_ref: dict[str, Any] | None = None
    vars: Any = None
    """`{"incr": {path: number}}` adds to variables of the task, once for the node, in the write that ends it.

    If this is not possible, the node fails as `bad_vars`, without a retry.
    """


class BatchFailure(Exception):
    """Raise this in a hook to fail with a reason code: `BatchFailure("no page", reason_code="no_pages")`.

    In `process` and `process_batch`, it fails the batch; in other hooks, the attempt. FlowKit does not pass it to
    `classify_error`.
    """

    def __init__(
        self, message: str, *, reason_code: str = reason_codes.ERROR, permanent: bool = False
    ) -> None:
        super().__init__(message)
        self.reason_code = reason_code
        self.permanent = permanent
        """Whether a retry would not help."""
