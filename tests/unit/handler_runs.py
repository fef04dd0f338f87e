"""Tasks that run in this process, for tests of handlers and functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.testing import run_graph

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flowkit.testing import GraphRun
    from flowkit.worker import RoleHandler


def node(node_id: str, role: str, *parents: str, **fields: Any) -> dict[str, Any]:
    """Return a node; `inline` becomes its inline input."""
    inline = fields.pop("inline", None)
    io = {"io": {"input_inline": inline}} if inline is not None else {}
    return {"node_id": node_id, "type": role, "depends_on": list(parents), **io, **fields}


def call(
    node_id: str, fn: str, *parents: str, args: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Return a node that calls a coordinator function."""
    io = {"fn": fn, "fn_args": dict(args or {})}
    return {"node_id": node_id, "type": "coordinator_fn", "depends_on": list(parents), "io": io, **more}


async def finished(handlers: Sequence[RoleHandler], *nodes: dict[str, Any]) -> GraphRun:
    """Run nodes until their task finishes."""
    run = await run_graph({"nodes": list(nodes)}, *handlers)
    assert run.status == "finished", run.reason
    return run


async def outcomes(
    handlers: Sequence[RoleHandler], *nodes: dict[str, Any], **functions: Any
) -> dict[str, tuple[str, int, str]]:
    """Return status, epoch and last error of each node of a task that continues after failures, and fails."""
    graph = {"nodes": list(nodes), "on_node_failure": "continue"}
    run = await run_graph(graph, *handlers, functions=functions)
    assert run.status == "failed"
    return {name: (found.status, found.attempts, found.error or "") for name, found in run.nodes.items()}


async def artifacts(run: GraphRun, **query: Any) -> list[dict[str, Any]]:
    """Return the artifacts of a task, oldest first."""
    return [found async for found in run.db.artifacts.find({"task_id": run.task_id, **query}).sort("_id", 1)]


async def rows(run: GraphRun, node_id: str) -> list[dict[str, Any]]:
    """Return the node's metrics rows, without the final one."""
    query = {"task_id": run.task_id, "node_id": node_id, "batch_uid": {"$ne": "__final__"}}
    return [row async for row in run.db.metrics_raw.find(query)]


async def stored_node(run: GraphRun, node_id: str) -> dict[str, Any]:
    """Return a node's entry in its task document."""
    found: Any = await run.db.tasks.find_one({"id": run.task_id})
    return dict(next(each for each in found["graph"]["nodes"] if each["node_id"] == node_id))
