"""What every peer shares: the MongoDB writes of one node, and the loop that runs the samples that the
benchmark requests.

The writes are those of the hand-written workflow (`benchmarks.baseline`): one document for each run, and
five writes for each node.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

from motor.motor_asyncio import AsyncIOMotorClient

from benchmarks.baseline import Activities, create_indexes
from benchmarks.peers.plan import Plan
from benchmarks.served import serve

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

WINDOW = 100
"""Largest number of nodes of one run in flight, as in the other sides."""


def writes(database: str) -> Activities:
    """Return the writes of a run and of its nodes, in a database of their own."""
    return Activities(AsyncIOMotorClient(os.environ["MONGO_URL"])[database])


async def in_window(plan: dict[str, Any], node: Callable[[int], Awaitable[None]]) -> None:
    """Run the nodes of one run: in a chain, or concurrently within the window."""
    if not plan["wide"]:
        for index in range(plan["nodes"]):
            await node(index)
        return
    gate = asyncio.Semaphore(WINDOW)

    async def gated(index: int) -> None:
        async with gate:
            await node(index)

    await asyncio.gather(*(gated(index) for index in range(plan["nodes"])))


async def serve_samples(run: Callable[[dict[str, Any]], Awaitable[None]], own: Activities) -> None:
    """Run one sample for each request, which is a `Plan`."""
    await create_indexes(own.db)

    async def sample(request: dict[str, Any]) -> float:
        plan = Plan(**request)
        run_plan = {"nodes": plan.nodes, "wide": plan.wide}
        began = time.perf_counter()
        for _ in range(plan.repeats):
            await asyncio.gather(*(run(run_plan) for _ in range(plan.tasks)))
        return time.perf_counter() - began

    await serve(sample)
