"""DBOS on SQLite or PostgreSQL: a workflow whose nodes are steps, in one process, as the DBOS guide shows.

Run: `python -m benchmarks.peers.dbos_side DATABASE_URL`.
"""

from __future__ import annotations

import sys
import uuid
from typing import Any

import uvloop
from dbos import DBOS

from benchmarks.peers.writes import in_window, serve_samples, writes

_own = writes("peer_dbos")


@DBOS.step()
async def open_run(task: str, nodes: int) -> None:
    """Insert the document of a run."""
    await _own.open_run(task, nodes)


@DBOS.step()
async def node(task: str, index: int) -> None:
    """Make the five writes of a node."""
    await _own.node(task, index)


@DBOS.step()
async def close_run(task: str) -> None:
    """Mark the run as finished."""
    await _own.close_run(task)


@DBOS.workflow()
async def run(task: str, plan: dict[str, Any]) -> None:
    """Run the nodes. Concurrent steps start in a fixed order, as DBOS requires."""
    await open_run(task, plan["nodes"])
    await in_window(plan, lambda index: node(task, index))
    await close_run(task)


async def run_one(plan: dict[str, Any]) -> None:
    """Start a workflow and wait for its end."""
    handle = await DBOS.start_workflow_async(run, f"dbos-{uuid.uuid4()}", plan)
    await handle.get_result()


async def main(url: str) -> None:
    """Serve samples until stdin ends."""
    config: Any = {
        "name": "benchmark",
        "dbos_system_schema": "flowkit_benchmark",
        # DBOS recovers the workflows of its own version when it starts, here none.
        "application_version": str(uuid.uuid4()),
        "system_database_url": url,
        "log_level": "ERROR",
    }
    DBOS(config=config)
    DBOS.launch()
    try:
        await serve_samples(run_one, _own)
    finally:
        DBOS.destroy()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
