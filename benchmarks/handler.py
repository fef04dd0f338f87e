"""The handler that FlowKit's side of the benchmark runs: small batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.worker import Batch, BatchResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.worker.context import RunContext


class OneBatch(RoleHandler):
    """Writes what the baseline writes."""

    role = "bench"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """One batch, or as many as the node asks for."""
        for number in range(loaded["input_inline"].get("batches", 1)):
            yield Batch(batch_uid=f"b{number}")

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """One number."""
        return BatchResult(success=True, metrics={"n": 1})
