"""The processes that poll a task queue, as Temporal reports them: who they are, and which roles no worker
has ever polled."""

from __future__ import annotations

import asyncio
import difflib
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest

from flowkit.adapters.worker_registry import BRIDGE_PREFIX, WorkerRegistry
from flowkit.graph.submission import external_problem, may_not_be_external
from flowkit.models import ENGINE_TYPES
from flowkit.models.temporal_names import role_queue

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from typing import Any

    from temporalio.client import Client

    from flowkit.adapters.mongo import Database

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


async def backlog_ages(client: Client, queues: Collection[str]) -> dict[str, float]:
    """Return for how many seconds the oldest activity of each task queue has waited for a worker, if one waits.

    Temporal's numbers are a few seconds old. Activities of workflows that have ended count until a worker polls for
    them. Raise RPCError if Temporal does not respond.
    """
    checks = asyncio.Semaphore(_CONCURRENT_QUEUES)

    async def find(queue: str) -> float:
        request = DescribeTaskQueueRequest(
            namespace=client.namespace,
            task_queue=TaskQueue(name=queue),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
            report_stats=True,
        )
        async with checks:
            described = await client.workflow_service.describe_task_queue(request, timeout=_RPC_TIMEOUT)
        return described.stats.approximate_backlog_age.ToNanoseconds() / 1e9

    ages = await asyncio.gather(*map(find, queues))
    return {queue: age for queue, age in zip(queues, ages, strict=True) if age > 0}


async def native_pollers(client: Client, task_queue: str) -> list[str]:
    """Return the identities of workers, other than bridges, that have polled a task queue within 70 seconds."""
    return sorted(p for p in await recent_pollers(client, task_queue) if not p.startswith(BRIDGE_PREFIX))


async def bridged_problems(client: Client, queue: str, graph: Mapping[str, Any]) -> list[str]:
    """Return the problem of a graph with a role that a bridge serves now, although the graph may have no such role.

    Return `[]` if there is none. Raise RPCError if Temporal does not respond.
    """
    if not may_not_be_external(graph):
        return []
    roles = {node["type"] for node in graph["nodes"]} - ENGINE_TYPES
    polled = await pollers_by_role(client, queue, roles)
    bridged = {
        role for role, found in polled.items() if any(each.startswith(BRIDGE_PREFIX) for each in found)
    }
    problem = external_problem(graph, bridged)
    return [problem] if problem else []


async def pollers_by_role(client: Client, queue: str, roles: Iterable[str]) -> dict[str, set[str]]:
    """Return the recent pollers of each role's task queue. Raise RPCError if Temporal does not respond."""
    checks = asyncio.Semaphore(_CONCURRENT_QUEUES)

    async def find(role: str) -> set[str]:
        async with checks:
            return await recent_pollers(client, role_queue(queue, role))

    ordered = sorted(roles)
    return dict(zip(ordered, await asyncio.gather(*map(find, ordered)), strict=True))


async def never_polled_roles(
    client: Client, db: Database, queue: str, roles: Collection[str]
) -> dict[str, list[str]]:
    """Return those of the roles that no process has ever polled, each with similar roles that are polled now.

    Raise StoreUnavailable if MongoDB does not respond, and RPCError if Temporal does not.
    """
    idle = [role for role, found in (await pollers_by_role(client, queue, roles)).items() if not found]
    if not idle:
        return {}
    ever, online = await WorkerRegistry(db).find_roles()
    similar = {role: difflib.get_close_matches(role, online) for role in idle if role not in ever}
    named = {each for found in similar.values() for each in found}
    polled = {role for role, found in (await pollers_by_role(client, queue, named)).items() if found}
    return {role: [each for each in found if each in polled] for role, found in similar.items()}
