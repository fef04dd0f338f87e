"""Handlers of the random tasks for external workers and for the native worker beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowkit.worker import FinalizeResult
from tests.integration.chaos.external.plans import NATIVE_ROLE, external_node_plan
from tests.integration.chaos.handlers import Planned, touch
from tests.integration.chaos.plans import EXTERNAL_FINAL

if TYPE_CHECKING:
    from flowkit.worker.context import RunContext

__all__ = ["EXTERNAL", "NATIVE", "touch"]


class ExternalPlanned(Planned):
    """A handler that follows the plan of its node. It does not read what the node has stored."""

    async def finalize(self, ctx: RunContext) -> FinalizeResult | None:
        """Return fixed metrics, or fail as planned."""
        await self._end(ctx)
        return FinalizeResult(metrics=dict(EXTERNAL_FINAL))


EXTERNAL = ExternalPlanned("external", plan_of=external_node_plan)
NATIVE = Planned(NATIVE_ROLE, plan_of=external_node_plan)
