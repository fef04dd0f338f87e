"""The handlers of the streaming cases. Two worker processes serve their roles (see `streaming.commands`)."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from flowkit.worker import Batch, BatchResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.worker.context import RunContext

STAGE_SEC = 0.005
"""How long a stage waits in each batch."""


class Ticker(RoleHandler):
    """Yields `batches` batches, `gap_sec` apart, and returns when the handler was called for each of them."""

    role = "ticker"

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        """Return the inline input."""
        return input_inline or {}

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield numbered batches."""
        for number in range(loaded.get("batches", 1)):
            yield Batch(batch_uid=f"b{number}")
            await asyncio.sleep(loaded.get("gap_sec", 0.0))

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the time of the call as metrics, in milliseconds since the Unix epoch."""
        return BatchResult(success=True, metrics={"called_ms": time.time() * 1000})


class Near(Ticker):
    """Runs in the process of the ticker."""

    role = "near"


class Far(Ticker):
    """Runs in another process than the ticker."""

    role = "far"


class Stage(Ticker):
    """Waits 5 ms in each batch, as a call to a service does."""

    role = "stage"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait, then return metrics."""
        await asyncio.sleep(STAGE_SEC)
        return await super().process_batch(batch, ctx)


class FarStage(Stage):
    """Runs in another process than the other stages."""

    role = "far_stage"


class LastStage(Stage):
    """Runs in the process of the first stage."""

    role = "last_stage"
