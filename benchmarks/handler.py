"""The handler for FlowKit's side of the benchmark."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from flowkit.worker import Batch, BatchResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.worker.context import RunContext


_logger = logging.getLogger("bench")


class OneBatch(RoleHandler):
    """Produces the same metrics and artifacts as the baseline."""

    role = "bench"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield one batch, or `batches` of the inline input."""
        for number in range(loaded["input_inline"].get("batches", 1)):
            yield Batch(batch_uid=f"b{number}")

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return one number as metrics."""
        return BatchResult(success=True, metrics={"n": 1})


class OneLine(OneBatch):
    """Logs one line for its batch."""

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Log, and return one number as metrics."""
        _logger.info("read %s of %s", batch.batch_uid, ctx.node_id)
        return await super().process_batch(batch, ctx)
