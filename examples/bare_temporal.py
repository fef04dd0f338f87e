"""Start a task with Temporal alone: a task is a workflow, so any Temporal client can start it.

The graph counts the words of three proverbs. Only the handler uses FlowKit, and it could be in
another file, on another machine. The code that starts the task imports nothing of FlowKit.

In the folder `examples`, run each command in its own terminal:

    flowkit up bare_temporal:Words
    python bare_temporal.py

The same with Temporal's command line:

    sh bare_temporal.sh

Both print the result of the workflow and its response to the query `status`. An invalid graph fails
the workflow at once, with a message that names the problem.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from typing import TYPE_CHECKING, Any

from temporalio.client import Client

from flowkit.worker import Batch, BatchResult, RoleHandler, RunContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Words(RoleHandler):
    """Counts the words of each text."""

    role = "words"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        for number, text in enumerate(loaded["input_inline"]["texts"]):
            yield Batch(batch_uid=f"text-{number}", payload={"text": text})

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        return BatchResult(success=True, metrics={"words": len(batch.payload["text"].split())})


PROVERBS = ["Many hands make light work.", "A stitch in time saves nine.", "Still waters run deep."]
TASK = {
    "params": {"pipeline_name": "proverbs"},
    "graph": {
        "nodes": [
            {"node_id": "words", "type": "words", "io": {"input_inline": {"texts": PROVERBS}}},
            {
                "node_id": "sum",
                "type": "coordinator_fn",
                "depends_on": ["words"],
                "io": {"fn": "metrics.aggregate", "fn_args": {"node_id": "words"}},
            },
        ]
    },
}


async def main() -> None:
    """Start the workflow `Task` on the engine's queue and print its result."""
    client = await Client.connect(os.environ.get("TEMPORAL_ADDRESS", "localhost:7233"))
    task = await client.start_workflow(
        "Task", TASK, id=f"proverbs-{uuid.uuid4()}", task_queue=os.environ.get("FLOWKIT_QUEUE", "flowkit")
    )
    print(f"workflow {task.id} started")
    print(f"result: {await task.result()}")
    for node in (await task.query("status"))["nodes"]:
        print(f"  {node['node_id']:<6} {node['type']:<15} {node['status']}")


if __name__ == "__main__":
    asyncio.run(main())
    # Threads of Temporal's client can outlive Python, which then aborts (a known bug of the SDK).
    sys.stdout.flush()
    os._exit(0)
