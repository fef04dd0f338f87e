"""Prefect with its own server on SQLite: an asynchronous flow whose nodes are tasks, as Prefect's guide shows.

Run: `python -m benchmarks.peers.prefect_side`, with PREFECT_API_URL set to a server.
"""

from __future__ import annotations

import uuid
from typing import Any

import uvloop
from prefect import flow, task

from benchmarks.peers.writes import in_window, serve_samples, writes

_own = writes("peer_prefect")


@task
async def open_run(run_id: str, nodes: int) -> None:
    """Insert the document of a run."""
    await _own.open_run(run_id, nodes)


@task
async def node(run_id: str, index: int) -> None:
    """Make the five writes of a node."""
    await _own.node(run_id, index)


@task
async def close_run(run_id: str) -> None:
    """Mark the run as finished."""
    await _own.close_run(run_id)


@flow
async def run(plan: dict[str, Any]) -> None:
    """Run the nodes."""
    run_id = f"prefect-{uuid.uuid4()}"
    await open_run(run_id, plan["nodes"])
    await in_window(plan, lambda index: node(run_id, index))
    await close_run(run_id)


if __name__ == "__main__":
    uvloop.run(serve_samples(run, _own))
