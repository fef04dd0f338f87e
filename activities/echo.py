"""The built-in handler of the role `echo` (spec: EchoHandler), for trying out FlowKit without writing a handler."""

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
    """Processes a batch in about a quarter of a second and returns the number of steps as a metric."""

    role = "echo"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Run five short steps and check for a cancel before each one."""
        for _ in range(_STEPS):
            await ctx.raise_if_cancelled()
            await ctx.cancellable(asyncio.sleep(_STEP_SEC))
        return BatchResult(success=True, metrics={"echoed": _STEPS})
