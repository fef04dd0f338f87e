"""Finds native workers that poll the task queue of an external role. A role is either native or external."""

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

IDENTITY_PREFIX = BRIDGE_PREFIX
_RECENT_SEC = 70.0
"""Pollers with an earlier last poll have stopped: a poll takes about a minute, and Temporal lists them for longer."""

_RPC_TIMEOUT = timedelta(seconds=10)


async def native_pollers(client: Client, task_queue: str) -> list[str]:
    """Return the identities of workers, other than bridges, that have polled a task queue within 70 seconds."""
    described = await client.workflow_service.describe_task_queue(
        DescribeTaskQueueRequest(
            namespace=client.namespace,
            task_queue=TaskQueue(name=task_queue),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
        ),
        timeout=_RPC_TIMEOUT,
    )
    since = time.time() - _RECENT_SEC
    recent = [
        poller for poller in described.pollers if poller.last_access_time.ToNanoseconds() / 1e9 >= since
    ]
    return sorted({p.identity for p in recent if not p.identity.startswith(IDENTITY_PREFIX)})
