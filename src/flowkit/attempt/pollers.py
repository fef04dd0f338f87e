"""The processes that poll a task queue, as Temporal reports them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest

from flowkit.adapters.worker_registry import BRIDGE_PREFIX

if TYPE_CHECKING:
    from temporalio.client import Client

_RECENT_SEC = 70.0
"""Pollers with an earlier last poll have stopped: a poll takes about a minute, and Temporal lists them for longer."""

_RPC_TIMEOUT = timedelta(seconds=10)


async def recent_pollers(client: Client, task_queue: str, *, workflows: bool = False) -> set[str]:
    """Return the identities of the processes that have polled a task queue within 70 seconds.

    They are those that poll for activities, or for workflow tasks with `workflows`. Raise RPCError if Temporal does
    not respond.
    """
    kind = TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW if workflows else TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
    request = DescribeTaskQueueRequest(
        namespace=client.namespace, task_queue=TaskQueue(name=task_queue), task_queue_type=kind
    )
    described = await client.workflow_service.describe_task_queue(request, timeout=_RPC_TIMEOUT)
    since = time.time() - _RECENT_SEC
    return {
        poller.identity
        for poller in described.pollers
        if poller.last_access_time.ToNanoseconds() / 1e9 >= since
    }


async def native_pollers(client: Client, task_queue: str) -> list[str]:
    """Return the identities of workers, other than bridges, that have polled a task queue within 70 seconds."""
    return sorted(p for p in await recent_pollers(client, task_queue) if not p.startswith(BRIDGE_PREFIX))
