"""Variables: rules that the graph sets, handlers apply, and a person can change at any time.

An order over the limit waits for approval. The limit and the carriers are variables of the task,
which its first node sets. `approve` reads them and, if necessary, waits for the variable
`approved`. `ship` reads the carrier. In between, `vars.incr` counts the approved orders, exactly
once even if a process crashes.

In the folder `examples`, run each command in its own terminal:

    flowkit up variables:Approve variables:Ship
    python variables.py

A small order passes, a large one waits until the program approves it. To approve it yourself, you
would run in a third terminal: `flowkit vars TASK --set approved=true`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from deployment import coordinator, run, wait_until
from flowkit.worker import Batch, BatchResult, RoleHandler, RunContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit import Coordinator

SMALL = [{"item": "tea, 500 g", "price": 14.90}]
LARGE = [{"item": "espresso machine", "price": 489.00}, {"item": "grinder", "price": 159.00}]
RULES = {"limit": 250, "carrier": {"small": "bicycle", "large": "insured van"}}


class Approve(RoleHandler):
    """Approves an order within the limit, and waits for a person to approve any other order."""

    role = "approve"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        yield Batch(batch_uid="order", payload=loaded["input_inline"])

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        total = sum(line["price"] for line in batch.payload["lines"])
        needs_approval = total > await ctx.vars.get("limit")
        while needs_approval and not await ctx.vars.get("approved"):
            await ctx.cancellable(asyncio.sleep(0.5))
        approved_by = "a person" if needs_approval else "the rules"
        return BatchResult(success=True, metrics={"total": total, "approved_by": approved_by})


class Ship(RoleHandler):
    """Chooses the carrier of the approved order."""

    role = "ship"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        rules, order = await ctx.vars(), batch.payload["meta"]
        carrier = rules["carrier"]["large" if order["total"] > rules["limit"] else "small"]
        return BatchResult(success=True, metrics={**order, "carrier": carrier})


def graph(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the graph that processes an order."""
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
    """Return a node that a worker runs."""
    return {"node_id": role, "type": role, "depends_on": parents, "io": {"input_inline": inline}}


def function(node_id: str, parents: list[str], name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a node that the engine runs."""
    io = {"fn": name, "fn_args": arguments}
    return {"node_id": node_id, "type": "coordinator_fn", "depends_on": parents, "io": io}


async def main() -> None:
    """Process two orders, of which the second one needs approval."""
    tasks = coordinator()
    small = await tasks.create_task(params={}, graph=graph(SMALL))
    await show(tasks, small, "small order")
    large = await tasks.create_task(params={}, graph=graph(LARGE))
    approving = {"id": large, "graph.nodes": {"$elemMatch": {"node_id": "approve", "status": "running"}}}
    await wait_until(lambda: tasks.db.tasks.find_one(approving))
    print(f"large order: waits for `flowkit vars {large} --set approved=true`")
    await tasks.adapters["vars.set"](large, kv={"approved": True})
    await show(tasks, large, "large order")


async def show(tasks: Coordinator, task_id: str, name: str) -> None:
    """Print how FlowKit processed an order."""
    await tasks.result(task_id, timeout=60)
    shipped = await tasks.db.artifacts.find_one({"task_id": task_id, "node_id": "ship", "status": "partial"})
    order = shipped["meta"]
    print(f"{name}: {order['total']:.2f}, approved by {order['approved_by']}, ships by {order['carrier']}")
    print(f"  variables: {await tasks.vars(task_id)}")


if __name__ == "__main__":
    run(main())
