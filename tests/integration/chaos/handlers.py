"""Handlers and the user function of the random tasks. They do what the plan of their node says."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import ReturnDocument
from pymongo.errors import PyMongoError

from flowkit.coordinator.adapters import AdapterError
from flowkit.errors import StoreUnavailable
from flowkit.worker import Batch, BatchResult, FinalizeResult, RoleHandler
from tests.integration.chaos.plans import (
    BLOCK,
    BLOCKED_SEC,
    DIE,
    EXIT,
    EXTERNAL_FINAL,
    FINAL,
    FORK,
    INLINE_ROLE,
    PANIC,
    ROLES,
)
from tests.integration.chaos.tasks import node_plan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from flowkit.worker.context import RunContext
    from tests.integration.chaos.plans import PlannedFailure


class Panic(BaseException):
    """What a native extension raises that has panicked: no Exception."""


class Planned(RoleHandler):
    """A handler that follows the plan of its node."""

    def __init__(self, role: str, pace: float = 1.0, *, behaves: bool = False) -> None:
        self.role = role
        self.inline = role == INLINE_ROLE
        self._pace = pace
        """Factor for all pauses; 0 disables them."""
        self._behaves = behaves
        """Whether it leaves its process alone."""

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        """Return the inline input, which names the node."""
        return input_inline

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield the batches of the plan."""
        for batch in node_plan(loaded["node"]).batches:
            yield Batch(batch_uid=batch.uid, payload={"items": list(batch.items)})

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Copy the items of the batch, or fail as planned."""
        plan, seen = node_plan(ctx.node_id), ctx.kv.get("seen", 0)
        ctx.kv["seen"] = seen + 1
        if seen == 0 and ctx.attempt_epoch == 1 and not self._behaves:
            misbehave(plan.mischief)
        await self._pause(ctx, plan.pause * self._pace)
        failure = plan.failure
        if failure and failure.at == seen and failure.applies_to(ctx.attempt_epoch):
            if failure.raises:
                raise error_of(failure)
            return BatchResult(
                success=False, reason_code=failure.code, permanent=failure.permanent, error="planned"
            )
        if batch.batch_uid in plan.aside:
            return BatchResult(success=False, reason_code="bad_batch", permanent=True, error="planned")
        if plan.mapped:
            (items,) = batch.payload["items"]
            return BatchResult(success=True, metrics=_metrics(items, None, ctx))
        held = batch.payload["meta" if "meta" in batch.payload else "items"]
        items, read = (held["items"], held.get("written_by")) if isinstance(held, dict) else (held, None)
        made = _metrics(items, batch.payload.get("from_node"), ctx)
        return BatchResult(success=True, metrics=made | ({"read": read} if read else {}))

    async def finalize(self, ctx: RunContext) -> FinalizeResult | None:
        """Sum over all stored batches of the node, or fail as planned."""
        await self._end(ctx)
        metas = await _stored(ctx)
        total = sum(sum(meta["items"]) for meta in metas)
        return FinalizeResult(metrics={"all_batches": len(metas), "all_items": total})

    async def _pause(self, ctx: RunContext, seconds: float) -> None:
        await ctx.clock.sleep_ms(seconds * 1000)

    async def _end(self, ctx: RunContext) -> None:
        """Pause, and fail as planned."""
        plan = node_plan(ctx.node_id)
        await self._pause(ctx, plan.pause * self._pace)
        failure = plan.failure
        if failure and failure.at == FINAL and failure.applies_to(ctx.attempt_epoch):
            raise error_of(failure)


def _metrics(items: list[int], source: str | None, ctx: RunContext) -> dict[str, Any]:
    return {
        "n": 1,
        "total": sum(items),
        "items": items,
        "origin": source or ctx.node_id,
        "written_by": {"task": ctx.task_id, "node": ctx.node_id, "epoch": ctx.attempt_epoch},
        "mark": (ctx.input_inline or {}).get("mark", ""),
    }


def error_of(failure: PlannedFailure) -> BaseException:
    if failure.permanent:
        return ValueError("planned")
    return raised_as(failure.kind) or ConnectionError("planned")


def raised_as(kind: str) -> BaseException | None:
    return {EXIT: SystemExit(3), PANIC: Panic("planned")}.get(kind)


def block(seconds: float) -> None:
    """Keep this thread waiting."""
    time.sleep(seconds)


def misbehave(kind: str) -> None:
    """Block the event loop, fork a child that outlives the batch, or end the process."""
    if kind == BLOCK:
        block(BLOCKED_SEC)
    elif kind == FORK and os.fork() == 0:
        block(BLOCKED_SEC)
        os._exit(0)
    elif kind == DIE:
        os._exit(7)


async def _stored(ctx: RunContext) -> list[dict[str, Any]]:
    """Read the metas of the node's batches. Wait for MongoDB, because an outage here would cost the node a retry."""
    while True:
        try:
            return [partial["meta"] async for partial in ctx.artifacts.partials()]
        except StoreUnavailable:
            await asyncio.sleep(0.2)


class ExternalPlanned(Planned):
    """A handler that follows the plan of its node. It does not read what the node has stored."""

    async def finalize(self, ctx: RunContext) -> FinalizeResult | None:
        """Return fixed metrics, or fail as planned."""
        await self._end(ctx)
        return FinalizeResult(metrics=dict(EXTERNAL_FINAL))

    async def _pause(self, ctx: RunContext, seconds: float) -> None:
        await asyncio.sleep(seconds)


READER, BUILDER, WRITER, STAMPER = (Planned(role) for role in ROLES)
EXTERNAL = ExternalPlanned("external")


def touching(counted: Callable[[str], Awaitable[int]], pace: float = 1.0) -> Callable[..., Awaitable[None]]:
    """Return a user function that counts its calls (at least once each) and then fails as planned."""

    async def touch(
        task_id: str,
        *,
        mark: str,
        times: int | None,
        permanent: bool = False,
        pause: float = 0.0,
        kind: str = "",
    ) -> None:
        calls = await counted(f"{task_id}/{mark}")
        await asyncio.sleep(pause * pace)
        if times is None and permanent:
            raise AdapterError("planned")
        if times is None or calls <= times:
            raise raised_as(kind) or RuntimeError("planned")

    return touch


async def count(touches: Any, key: str) -> int:
    """Count a call and return the number of calls so far. Waits while MongoDB is unavailable."""
    while True:
        try:
            counted = await touches.find_one_and_update(
                {"_id": key}, {"$inc": {"calls": 1}}, upsert=True, return_document=ReturnDocument.AFTER
            )
            return int(counted["calls"])
        except PyMongoError:
            await asyncio.sleep(0.2)


async def _count_in_own_database(key: str) -> int:
    client: Any = AsyncIOMotorClient(os.environ["MONGO_URL"], serverSelectionTimeoutMS=1_000)
    try:
        return await count(client[os.environ["MONGO_DATABASE"]].touches, key)
    finally:
        client.close()


touch = touching(_count_in_own_database)
