"""Variables: rules that a graph sets, a handler follows, and a person may change while the task runs.

An order over the limit waits until somebody approves it. The limit and the carrier are variables of the task, set by its
first node; `approve` reads them, and waits for the variable `approved` where it must; `ship` reads the carrier. Between
them `vars.incr` counts, exactly once whatever dies.

In the folder `examples`, each in a terminal of its own:

    flowkit up variables:Approve variables:Ship
    python variables.py

You will see a small order pass and a large one wait. The program approves it after a look; you could do it in a third
terminal: `flowkit vars TASK --set approved=true`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from deployment import coordinator, run, until
from flowkit.worker.handlers.base import Batch, BatchResult, RoleHandler, RunContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit import Coordinator

SMALL = [{"item": "tea, 500 g", "price": 14.90}]
LARGE = [{"item": "espresso machine", "price": 489.00}, {"item": "grinder", "price": 159.00}]
RULES = {"limit": 250, "carrier": {"cheap": "bicycle", "dear": "insured van"}}


class Approve(RoleHandler):
    """Lets an order pass that is within the limit, and waits for a person otherwise."""

    role = "approve"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        yield Batch(batch_uid="order", payload=loaded["input_inline"])

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        total = sum(line["price"] for line in batch.payload["lines"])
        asks = total > (await ctx.vars())["limit"]
        while asks and not (await ctx.vars()).get("approved"):
            await ctx.cancellable(asyncio.sleep(0.5))
        return BatchResult(success=True, metrics={"total": total, "by": "a person" if asks else "the limit"})


class Ship(RoleHandler):
    """Chooses the carrier; its batch is the one that `approve` let pass."""

    role = "ship"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        rules, order = await ctx.vars(), batch.payload["meta"]
        carrier = rules["carrier"]["dear" if order["total"] > rules["limit"] else "cheap"]
        return BatchResult(success=True, metrics={**order, "carrier": carrier})


def graph(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The way of an order."""
    pull = {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": ["approve"]}}
    return {
        "name": "order",
        "nodes": [
            function("rules", [], "vars.set", {"kv": RULES}),
            node("approve", ["rules"], {"lines": lines}),
            function("count", ["approve"], "vars.incr", {"key": "orders.approved"}),
            node("ship", ["count"], pull),
        ],
    }


def node(role: str, parents: list[str], inline: dict[str, Any]) -> dict[str, Any]:
    """A node that a worker runs."""
    return {"node_id": role, "type": role, "depends_on": parents, "io": {"input_inline": inline}}


def function(node_id: str, parents: list[str], name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A node that the engine runs."""
    io = {"fn": name, "fn_args": arguments}
    return {"node_id": node_id, "type": "coordinator_fn", "depends_on": parents, "io": io}


async def main() -> None:
    """Two orders, of which the second one needs somebody."""
    tasks = coordinator()
    small = await tasks.create_task(params={}, graph=graph(SMALL))
    await show(tasks, small, "small order")
    large = await tasks.create_task(params={}, graph=graph(LARGE))
    approving = {"id": large, "graph.nodes": {"$elemMatch": {"node_id": "approve", "status": "running"}}}
    await until(lambda: tasks.db.tasks.find_one(approving))
    print(f"large order: waits; `flowkit vars {large} --set approved=true` would let it pass")
    await tasks.adapters["vars.set"](large, kv={"approved": True})
    await show(tasks, large, "large order")


async def show(tasks: Coordinator, task_id: str, what: str) -> None:
    """How an order went."""
    await tasks.result(task_id, timeout=60)
    shipped = await tasks.db.artifacts.find_one({"task_id": task_id, "node_id": "ship", "status": "partial"})
    order = shipped["meta"]
    print(f"{what}: {order['total']:.2f}, approved by {order['by']}, goes by {order['carrier']}")
    print(f"  variables: {await tasks.vars(task_id)}")


if __name__ == "__main__":
    run(main())
