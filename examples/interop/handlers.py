"""Handlers for `make interop`. They use the documented API of workers only, so any version of the SDK can run them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from flowkit.worker.handlers.base import Batch, BatchResult, FinalizeResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BROKEN_BATCH = 2
"""The batch at which the first attempt of an extractor fails."""


class Extractor(RoleHandler):
    """Returns `batches` batches of `size` consecutive numbers. With `flaky`, its first attempt fails at batch 2."""

    role = "extractor"

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        """Return the inline input of the node."""
        return input_inline or {}

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield the batches, with uids that are the same in every attempt."""
        size = loaded.get("size", 1)
        for number in range(loaded.get("batches", 1)):
            items = list(range(number * size, (number + 1) * size))
            payload = {"number": number, "items": items, "flaky": loaded.get("flaky", False)}
            yield Batch(batch_uid=f"part-{number}", payload=payload)

    async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
        """Return the numbers as metrics, from which other nodes pull."""
        given = batch.payload
        if given["flaky"] and given["number"] == BROKEN_BATCH and ctx.attempt_epoch == 1:
            return BatchResult(
                success=False, reason_code="flaky", permanent=False, error="the first attempt fails"
            )
        return BatchResult(success=True, metrics={"items": given["items"], "count": len(given["items"])})


class Collector(RoleHandler):
    """Pulls chunks of numbers from other nodes, and returns their sum."""

    role = "collector"

    async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
        """Return the sum of one chunk."""
        items = batch.payload["items"]
        return BatchResult(success=True, metrics={"sum": sum(items), "count": len(items)})

    async def finalize(self, ctx: Any) -> FinalizeResult:
        """Return final metrics."""
        return FinalizeResult(metrics={"collected": True})


class Sleeper(RoleHandler):
    """Sleeps in the attempts up to the epoch `until_epoch`, for at most an hour. A cancel ends the sleep."""

    role = "sleeper"

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        """Return the inline input of the node."""
        return input_inline or {}

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield one batch."""
        yield Batch(batch_uid="slept", payload=loaded)

    async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
        """Sleep, unless this is a later attempt."""
        if ctx.attempt_epoch <= batch.payload["until_epoch"]:
            await ctx.cancellable(asyncio.sleep(3600))
        return BatchResult(success=True, metrics={"epoch": ctx.attempt_epoch})


HANDLERS = {handler.role: handler for handler in (Extractor, Collector, Sleeper)}
