"""Health check of a container: do processes poll its task queues?

`healthcheck.py engine flowkit` looks for a poller on this host, because engines use the host as part of their identity.
`healthcheck.py worker flowkit.indexer flowkit.enricher` waits until each queue has had a poller. After that it only
checks whether Temporal responds, because a busy worker does not poll and is still healthy. If FLOWKIT_HEALTH_FILE is set,
as it is for the process itself, the check first reads the health that the process reports. On failure it prints one line
and exits with code 1.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest

from flowkit.connection import connect
from flowkit.errors import FlowKitError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from temporalio.api.taskqueue.v1 import PollerInfo
    from temporalio.client import Client

RECENT_SECONDS = 90.0
"""An idle poller polls at least once a minute."""

POLLED = Path("/tmp/flowkit-polled")
"""Created after the first successful check of a worker; the folder is empty when the container starts."""


FRESH_SECONDS = 30.0
"""A process writes its health file every five seconds."""


def own_problem(file: Path) -> str:
    """Return the problem that the process reports in its health file, or an empty string."""
    try:
        health = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"the health file {file} cannot be read: {error}"
    age = time.time() - health["at"]
    if age > FRESH_SECONDS:
        return f"the health file {file} was written {age:.0f} seconds ago: the process hangs or has ended"
    if health["ok"]:
        return ""
    ended = [loop["name"] for loop in health["loops"] if not loop["running"]]
    return f"not running: {', '.join(ended)}" if health["running"] else f"not running: {health['error']}"


async def unpolled_queues(process: str, queues: Sequence[str]) -> list[str]:
    """Return the queues that no process polls as expected."""
    client = await connect()
    return [queue for queue in queues if not await _is_polled(client, process, queue)]


async def _is_polled(client: Client, process: str, queue: str) -> bool:
    engine = process == "engine"
    request = DescribeTaskQueueRequest(
        namespace=client.namespace,
        task_queue=TaskQueue(name=queue),
        task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW
        if engine
        else TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
    )
    pollers = (await client.workflow_service.describe_task_queue(request)).pollers
    return any(map(_is_own_engine, pollers)) if engine else bool(pollers)


def _is_own_engine(poller: PollerInfo) -> bool:
    recent = poller.last_access_time.ToSeconds() > time.time() - RECENT_SECONDS
    return recent and poller.identity.endswith(f"@{socket.gethostname()}")


def problem(process: str, queues: Sequence[str]) -> str:
    """Return what is wrong, or an empty string."""
    file = os.environ.get("FLOWKIT_HEALTH_FILE")
    if file and (found := own_problem(Path(file))):
        return found
    expected = [] if process == "worker" and POLLED.exists() else queues
    try:
        unpolled = asyncio.run(unpolled_queues(process, expected))
    except FlowKitError as error:
        return str(error)
    if process == "worker" and not unpolled:
        POLLED.touch()
    return f"not polled: {', '.join(unpolled)}" if unpolled else ""


def main() -> None:
    """Check the process and the queues on the command line."""
    process, *queues = sys.argv[1:] or [""]
    if process not in {"engine", "worker"} or not queues:
        sys.exit("usage: healthcheck.py engine|worker QUEUE...")
    found = problem(process, queues)
    sys.stdout.write(found and f"{found}\n")
    sys.stdout.flush()
    # Not sys.exit: a running thread of Temporal's client may abort the interpreter while it shuts down.
    os._exit(1 if found else 0)


if __name__ == "__main__":
    main()
