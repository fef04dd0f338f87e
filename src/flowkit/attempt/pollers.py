"""The processes that poll a task queue, as Temporal reports them."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest

from flowkit.adapters.worker_registry import BRIDGE_PREFIX
from flowkit.graph.submission import external_problem
from flowkit.limits import EXTERNAL_NODES
from flowkit.models import COORDINATOR_FN
from flowkit.models.temporal_names import role_queue

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from temporalio.client import Client

_RECENT_SEC = 70.0
"""Pollers with an earlier last poll have stopped: a poll takes about a minute, and Temporal lists them for longer."""

_RPC_TIMEOUT = timedelta(seconds=10)
_CONCURRENT_QUEUES = 20


async def recent_pollers(client: Client, task_queue: str, *, workflows: bool = False) -> set[str]:
    """Return the identities of the processes that have polled a task queue within 70 seconds, as `poll_times` does."""
    return {*await poll_times(client, task_queue, workflows=workflows)}


async def poll_times(client: Client, task_queue: str, *, workflows: bool = False) -> dict[str, float]:
    """Return when the processes that have polled a task queue within 70 seconds last did, by identity.

    They are those that poll for activities, or for workflow tasks with `workflows`. Raise RPCError if Temporal does
    not respond.
    """
    kind = TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW if workflows else TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
    request = DescribeTaskQueueRequest(
        namespace=client.namespace, task_queue=TaskQueue(name=task_queue), task_queue_type=kind
    )
    described = await client.workflow_service.describe_task_queue(request, timeout=_RPC_TIMEOUT)
    since = time.time() - _RECENT_SEC
    polled = {each.identity: each.last_access_time.ToNanoseconds() / 1e9 for each in described.pollers}
    return {identity: at for identity, at in polled.items() if at >= since}


async def native_pollers(client: Client, task_queue: str) -> list[str]:
    """Return the identities of workers, other than bridges, that have polled a task queue within 70 seconds."""
    return sorted(p for p in await recent_pollers(client, task_queue) if not p.startswith(BRIDGE_PREFIX))


async def bridged_problems(client: Client, queue: str, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the problem of a graph with more than EXTERNAL_NODES nodes and a role that a bridge serves now.

    Return `[]` if there is none. Raise RPCError if Temporal does not respond.
    """
    if len(nodes) <= EXTERNAL_NODES:
        return []
    checks = asyncio.Semaphore(_CONCURRENT_QUEUES)

    async def is_bridged(role: str) -> bool:
        async with checks:
            pollers = await recent_pollers(client, role_queue(queue, role))
        return any(poller.startswith(BRIDGE_PREFIX) for poller in pollers)

    roles = sorted({node["type"] for node in nodes} - {COORDINATOR_FN})
    bridged = zip(roles, await asyncio.gather(*map(is_bridged, roles)), strict=True)
    problem = external_problem(nodes, {role for role, found in bridged if found})
    return [problem] if problem else []
