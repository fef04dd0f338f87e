"""What a role handler is made of (spec: RoleHandler). Documented paths re-export these names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.activities.context import RunContext


class Batch(BaseModel):
    """One portion of a node's input. Without a `batch_uid` its payload's hash is used."""

    batch_uid: str | None = None
    payload: dict[str, Any] = Field(default_factory=dict)


class BatchResult(BaseModel):
    """What became of a batch. `metrics` are stored and become the artifact's `meta`, which other nodes pull."""

    success: bool
    metrics: dict[str, Any] = Field(default_factory=dict)
    artifacts_ref: dict[str, Any] | None = None
    reason_code: str | None = None
    """Of a failure; `error` when absent."""
    permanent: bool = False
    """Of a failure: a retry would not help."""
    error: str | None = None


class FinalizeResult(BaseModel):
    """What a node says at its end; `metrics` become the meta of its complete marker."""

    metrics: dict[str, Any] = Field(default_factory=dict)
    artifacts_ref: dict[str, Any] | None = None


class RoleHandler:
    """Runs the nodes of one role; one instance serves many runs, so keep nothing of a run in it.

    Order of calls: `init`, `load_input`, `iter_batches` (unless an adapter delivers the batches), `process_batch` for
    each batch, `finalize`. Any exception is given to `classify_error`.
    """

    role: str = ""

    async def init(self, info: dict[str, Any]) -> None:
        """First call of a run; `info` holds `task_id`, `node_id`, `attempt_epoch`, `worker_id`, `role`."""

    async def load_input(self, input_ref: dict[str, Any] | None, input_inline: dict[str, Any] | None) -> Any:
        """Prepare the node's input; may propose `input_adapter` and `input_args` when the node names none."""
        return {"input_ref": input_ref or {}, "input_inline": input_inline or {}}

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """The batches of a node that does not pull. Their uids must be the same in every attempt."""
        yield Batch(payload=loaded or {})

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Do the work of one batch."""
        return BatchResult(success=True, metrics={"processed": 1})

    async def finalize(self, ctx: RunContext) -> FinalizeResult | None:
        """Last call, also after no batches at all. Do not rely on `ctx.kv` here: an attempt may have begun late."""
        return FinalizeResult()

    def classify_error(self, exc: BaseException) -> tuple[str, bool]:
        """(reason code, permanent) of an exception that one of the above raised."""
        if isinstance(exc, (TypeError, ValueError, KeyError)):
            return "bad_input", True
        return "unexpected_error", False
