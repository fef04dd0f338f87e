"""Typed handlers of the random tasks. They do what the plan of their node says, and store what `Planned` stores.

Their contract contains `VERSION`, so that each start of a process announces another one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from flowkit.worker import Batch, BatchFailure, RoleHandler, RunContext, role
from tests.integration.chaos.handlers import block, error_of, misbehave
from tests.integration.chaos.plans import (
    COLLECTOR,
    COUNTER,
    CRUNCHER,
    FEEDER,
    FINAL,
    LISTER,
    MEASURER,
    PRINTER,
)
from tests.integration.chaos.tasks import node_plan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.chaos.plans import NodePlan

VERSION_NAME = "CHAOS_VERSION"
"""Environment variable with the version of the typed handlers of a process."""
VERSION = os.environ.get(VERSION_NAME, "")
VERSION_KEY = "x-version"
"""The key of a JSON Schema that contains the version."""
PACE = 1.0
"""Factor for all pauses."""
BEHAVES = False
"""Whether handlers leave their process alone."""


CONFIG = ConfigDict(json_schema_extra={VERSION_KEY: VERSION})


class Stored(BaseModel):
    """What any node has stored for a batch, as far as others read it."""

    items: list[int]
    written_by: dict[str, Any] = {}


class Kept(Stored):
    """What a node keeps of what others have stored."""

    model_config = CONFIG

    n: int = 1
    total: int = 0


class Counted(BaseModel):
    """The result of a batch."""

    model_config = CONFIG

    items: list[int]
    n: int = 1
    total: int = 0
    origin: str = ""
    written_by: dict[str, Any] = {}
    mark: str = ""
    read: dict[str, Any] | None = None


class Made(Counted):
    """An item of a source."""

    uid: str


class Given(BaseModel):
    """The input of a source."""

    node: str
    mark: str = ""


class Totals(BaseModel):
    """The final result of a node."""

    all_batches: int = 0
    all_items: int = 0


def counted(items: list[int], ctx: RunContext, source: str | None = None) -> dict[str, Any]:
    """Return the fields of a result that copies these items, of a node or of this one."""
    writer = {"task": ctx.task_id, "node": ctx.node_id, "epoch": ctx.attempt_epoch}
    return {"items": items, "total": sum(items), "origin": source or ctx.node_id, "written_by": writer}


def copied(item: Stored, ctx: RunContext) -> Counted:
    """Return the result of a batch."""
    mark, source = (ctx.input_inline or {}).get("mark", ""), ctx.batch.payload.get("from_node")
    return Counted(mark=mark, read=item.written_by or None, **counted(item.items, ctx, source))


def fail_as_planned(plan: NodePlan, at: int, attempt: int) -> None:
    """Raise the planned failure, if it is due."""
    failure = plan.failure
    if failure is None or failure.at != at or not failure.applies_to(attempt):
        return
    if failure.raises:
        raise error_of(failure)
    raise BatchFailure("planned", reason_code=failure.code, permanent=failure.permanent)


async def begin(plan: NodePlan, at: int, ctx: RunContext) -> None:
    """Do what a batch does before its result."""
    if at == 0 and ctx.attempt_epoch == 1 and not BEHAVES:
        misbehave(plan.mischief)
    await ctx.clock.sleep_ms(plan.pause * PACE * 1000)
    fail_as_planned(plan, at, ctx.attempt_epoch)


async def begin_batch(ctx: RunContext) -> None:
    """Do what a batch does before its result, or fail it if it is to be set aside."""
    plan, seen = node_plan(ctx.node_id), ctx.kv.get("seen", 0)
    ctx.kv["seen"] = seen + 1
    await begin(plan, seen, ctx)
    if ctx.batch.batch_uid in plan.aside:
        raise BatchFailure("planned", reason_code="bad_batch", permanent=True)


async def end(results: AsyncIterator[Counted | Kept], ctx: RunContext) -> Totals:
    """Sum over all results of the node, or fail as planned. An outage of MongoDB costs no retry."""
    plan, totals = node_plan(ctx.node_id), Totals()
    await ctx.clock.sleep_ms(plan.pause * PACE * 1000)
    fail_as_planned(plan, FINAL, ctx.attempt_epoch)
    async for each in results:
        totals.all_batches += 1
        totals.all_items += sum(each.items)
    return totals


async def make(node: str, mark: str, ctx: RunContext) -> AsyncIterator[Made]:
    """Yield the batches of the plan as items."""
    plan = node_plan(node)
    for at, batch in enumerate(plan.batches):
        await begin(plan, at, ctx)
        yield Made(uid=batch.uid, mark=mark, **counted(list(batch.items), ctx))


class Lister(RoleHandler[Given, Made]):
    """A source as a class, whose uids come from a field."""

    role = LISTER
    key = "uid"
    handler_version = VERSION

    def produce(self, given: Given, ctx: RunContext) -> AsyncIterator[Made]:
        """Yield the batches of the plan."""
        return make(given.node, given.mark, ctx)

    async def finalize(self, ctx: RunContext) -> Totals:
        """Sum over the results."""
        return await end(self.results(ctx), ctx)


@role(FEEDER, key=lambda item: item.uid, finalize=end, handler_version=VERSION)
async def feeder(node: str, ctx: RunContext, mark: str = "") -> AsyncIterator[Made]:
    """Yield the batches of the plan: a source as a function, whose uids come from another one."""
    async for each in make(node, mark, ctx):
        yield each


@role(PRINTER, key="uid", finalize=end, inline=True, handler_version=VERSION)
async def printer(node: str, ctx: RunContext, mark: str = "") -> AsyncIterator[Made]:
    """Yield the batches of the plan: a source that the engines run themselves."""
    async for each in make(node, mark, ctx):
        yield each


class Counter(RoleHandler[Stored, Counted]):
    """Processes what it pulls, or its own batches, which may be set aside."""

    role = COUNTER
    handler_version = VERSION

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        """Return the inline input, which names the node unless it pulls."""
        return input_inline

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield the batches of the plan."""
        for batch in node_plan(loaded["node"]).batches:
            yield Batch(batch_uid=batch.uid, payload={"items": list(batch.items)})

    async def process(self, item: Stored, ctx: RunContext) -> Counted:
        """Copy the items of the batch, or fail as planned."""
        await begin_batch(ctx)
        return copied(item, ctx)

    async def finalize(self, ctx: RunContext) -> Totals:
        """Sum over the results."""
        return await end(self.results(ctx), ctx)


class Cruncher(RoleHandler[Stored, Counted]):
    """Processes what it pulls in a separate process."""

    role = CRUNCHER
    handler_version = VERSION

    def process(self, item: Stored, ctx: RunContext) -> Counted:
        """Copy the items of the batch."""
        if not BEHAVES:
            block(node_plan(ctx.node_id).pause * PACE)
        return copied(item, ctx)

    async def finalize(self, ctx: RunContext) -> Totals:
        """Sum over the results."""
        return await end(self.results(ctx), ctx)


@role(MEASURER, finalize=end, handler_version=VERSION)
async def measurer(items: list[int], ctx: RunContext, *, node: str = "", mark: str = "") -> Counted:
    """Process a chunk, or an item of a map: a function with parameters."""
    await begin_batch(ctx)
    return Counted(mark=mark, **counted(items, ctx, ctx.batch.payload.get("from_node")))


@role(COLLECTOR, collects=True, handler_version=VERSION)
async def collector(items: AsyncIterator[Kept], ctx: RunContext, *, mark: str = "") -> Totals:
    """Sum over all batches, which FlowKit stores as they are."""
    return await end(items, ctx)


LISTED, COUNTS, CRUNCHES = Lister(), Counter(), Cruncher()
OF_WORKERS: dict[str, RoleHandler[Any, Any]] = {
    "LISTED": LISTED,
    "feeder": feeder,
    "printer": printer,
    "COUNTS": COUNTS,
    "measurer": measurer,
    "collector": collector,
}
"""The handlers of the workers, by their names in this module."""
OF_PROCESSES: dict[str, RoleHandler[Any, Any]] = {"CRUNCHES": CRUNCHES}
"""The handlers of the workers that run batches in separate processes."""
TYPED = (*OF_WORKERS.values(), *OF_PROCESSES.values())
