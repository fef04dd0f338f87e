"""The engine's Temporal worker: the Task workflow, its activities and the coordinator functions."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.service import RPCError
from temporalio.worker import Worker

from flowkit.activities.attempts import Host
from flowkit.activities.functions import FunctionActivities
from flowkit.activities.tasks import TaskActivities
from flowkit.models import Settings
from flowkit.workflows.endings import SEARCH_ATTRIBUTES
from flowkit.workflows.task import Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    from temporalio.client import Client

    from flowkit.activities.functions import Function
    from flowkit.activities.home import HomeLoop
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.store import TaskStore
    from flowkit.config import CoordinatorConfig

_logger = logging.getLogger("flowkit.engine")


def settings_of(
    config: CoordinatorConfig, *, deployment: str, search_attributes: tuple[str, ...]
) -> Settings:
    """The part of an engine's settings that a task keeps."""
    return Settings(
        queue=config.queue,
        lease_ttl_sec=config.lease_ttl_sec,
        cancel_grace_sec=config.cancel_grace_sec,
        function_timeout_sec=config.function_timeout_sec,
        window=config.window,
        hold_starts_events=config.hold_starts_events,
        hold_starts_bytes=config.hold_starts_bytes,
        deployment=deployment,
        search_attributes=search_attributes,
    )


def engine_worker(
    client: Client,
    *,
    config: CoordinatorConfig,
    settings: Settings,
    tasks: TaskStore,
    artifacts: ArtifactStore,
    home: HomeLoop,
    functions: Mapping[str, Function],
    identity: str,
) -> Worker:
    """A Temporal worker that runs tasks; it must be created on the loop that will run it."""
    own = TaskActivities(
        tasks=tasks,
        artifacts=artifacts,
        home=home,
        settings=settings,
        functions=functions,
        max_nodes=config.max_nodes,
    )
    host = Host(tasks=tasks, home=home, worker_id=identity)
    calls = FunctionActivities(host=host, artifacts=artifacts, functions=functions)
    return Worker(
        client,
        task_queue=config.queue,
        workflows=[Task],
        activities=[*own.all, *(calls.of(name) for name in functions)],
        identity=identity,
    )


async def registered_search_attributes(client: Client) -> tuple[str, ...]:
    """Those of our search attributes that the namespace knows; tries to register them first."""
    namespace = client.namespace
    wanted = dict.fromkeys(SEARCH_ATTRIBUTES, IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD)
    try:
        await client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(namespace=namespace, search_attributes=wanted)
        )
    except RPCError as error:
        _logger.info("search attributes were not registered: %s", error.message)
    try:
        known = await client.operator_service.list_search_attributes(
            ListSearchAttributesRequest(namespace=namespace)
        )
    except RPCError as error:
        _logger.info("search attributes stay empty: %s", error.message)
        return ()
    return tuple(name for name in SEARCH_ATTRIBUTES if name in known.custom_attributes)
