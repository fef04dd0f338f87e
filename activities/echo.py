"""The built-in handler of the role `echo` (spec: EchoHandler): something to run before one's own exists."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from flowkit.activities.handlers import BatchResult, RoleHandler

if TYPE_CHECKING:
    from flowkit.activities.context import RunContext
    from flowkit.activities.handlers import Batch

_STEPS = 5
_STEP_SEC = 0.05


class EchoHandler(RoleHandler):
    """Takes about a quarter of a second for a batch and answers how many steps that took."""

    role = "echo"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Five short steps; each looks whether the run is to stop."""
        for _ in range(_STEPS):
            await ctx.raise_if_cancelled()
            await ctx.cancellable(asyncio.sleep(_STEP_SEC))
        return BatchResult(success=True, metrics={"echoed": _STEPS})
