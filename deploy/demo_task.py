"""Run one task of the demo on existing servers, engines and workers, and print the ranking.

Reads TEMPORAL_ADDRESS, MONGO_URL, MONGO_DATABASE and FLOWKIT_QUEUE like the `flowkit` command. The folder to read
(the first argument, or else the standard library of this Python) must exist where the workers run.
"""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from motor.motor_asyncio import AsyncIOMotorClient
from rich.console import Console
from temporalio.client import WorkflowFailureError

from code_index.errors import DemoError
from code_index.flow import Params, flow
from code_index.report import ranking_table, summary
from code_index.result import load_result
from flowkit import Coordinator, CoordinatorConfig
from flowkit.connection import connect
from flowkit.errors import FlowKitError

console = Console(highlight=False, soft_wrap=True)


async def run(source: Path) -> None:
    """Start the task, wait for its end and print its result."""
    mongo: AsyncIOMotorClient[dict[str, Any]] = AsyncIOMotorClient(
        os.environ.get("MONGO_URL", "mongodb://localhost:27017"), tz_aware=True
    )
    db = mongo[os.environ.get("MONGO_DATABASE", "flowkit")]
    cfg = CoordinatorConfig(queue=os.environ.get("FLOWKIT_QUEUE", "flowkit"))
    client = await connect()
    coordinator = Coordinator(db=db, cfg=cfg, client=client)
    task_id = await flow.submit(coordinator, Params(source=source))
    console.print(f"task {task_id} runs", markup=False)
    await client.get_workflow_handle(task_id).result()
    result = await load_result(db, task_id)
    console.print(ranking_table(result), "")
    for line in summary(result):
        console.print(line, markup=False)


def main() -> None:
    """Run the task; an expected error prints one line and exits with code 1."""
    source = Path(sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("stdlib"))
    problem = ""
    try:
        asyncio.run(run(source))
    except (DemoError, FlowKitError) as error:
        problem = str(error)
    except WorkflowFailureError as error:
        problem = str(error.cause)
    if problem:
        console.print(f"demo_task: {problem}", markup=False)
    sys.stdout.flush()
    # Not sys.exit: a running thread of Temporal's client may abort the interpreter while it shuts down.
    os._exit(1 if problem else 0)


if __name__ == "__main__":
    main()
