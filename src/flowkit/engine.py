"""The engine's side of a Temporal worker: the Task workflow, its activities and the coordinator functions."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from temporalio import activity
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from flowkit.activities.attempts import Host
from flowkit.activities.failures import failed_attempt, handed_over
from flowkit.activities.functions import FunctionActivities, built_in
from flowkit.activities.home import HomeLoop
from flowkit.activities.tasks import TaskActivities
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.store import TaskStore
from flowkit.models import (
    AttemptInput,
    AttemptResult,
    CloseTask,
    Opened,
    OpenTask,
    RecordTask,
    Settings,
)
from flowkit.sweep import Sweep
from flowkit.workflows.endings import SEARCH_ATTRIBUTES
from flowkit.workflows.entrance import OneInput
from flowkit.workflows.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from temporalio.client import Client
    from temporalio.worker import WorkerConfig

    from flowkit.activities.functions import Function
    from flowkit.adapters.mongo import Database
    from flowkit.config import CoordinatorConfig

_logger = logging.getLogger("flowkit.engine")


def settings_of(
    config: CoordinatorConfig,
    *,
    deployment: str,
    search_attributes: tuple[str, ...],
    functions: Mapping[str, Function],
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
        local_functions=built_in(functions),
        qualify_uids=True,
    )


async def prepared_settings(
    client: Client,
    *,
    config: CoordinatorConfig,
    tasks: TaskStore,
    artifacts: ArtifactStore,
    functions: Mapping[str, Function],
) -> Settings:
    """Create the indexes, and ask both servers for what a task's settings hold beside the configuration."""
    await tasks.prepare()
    await artifacts.prepare()
    return settings_of(
        config,
        deployment=await tasks.deployment(),
        search_attributes=await registered_search_attributes(client),
        functions=functions,
    )


def engine_activities(
    *,
    config: CoordinatorConfig,
    settings: Settings,
    tasks: TaskStore,
    artifacts: ArtifactStore,
    home: HomeLoop,
    functions: Mapping[str, Function],
    identity: str,
    by_name: bool = False,
) -> list[Callable[..., Any]]:
    """Everything a worker of the engine's queue answers beside the Task workflow.

    One activity stands for all functions, unless the worker is somebody else's, who may have one of that kind.
    """
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
    return [*own.all, *([calls.of(name) for name in functions] if by_name else [calls.any()])]


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
    """A Temporal worker that runs tasks; it must be created on the loop that will run it.

    Its one workflow is ours: recorded histories replay it in Temporal's sandbox with every run of the tests. Here the
    sandbox would cost a third of the engine's time.
    """
    activities = engine_activities(
        config=config,
        settings=settings,
        tasks=tasks,
        artifacts=artifacts,
        home=home,
        functions=functions,
        identity=identity,
    )
    return Worker(
        client,
        task_queue=config.queue,
        workflows=[Task],
        activities=activities,
        workflow_runner=UnsandboxedWorkflowRunner(),
        interceptors=[OneInput()],
        identity=identity,
    )


class Duty:
    """What a Temporal worker of somebody else's does for FlowKit.

    Its activities are registered when the worker is made, and do their work once `made` has been called: the loop,
    the deployment and the registered search attributes are not known before the worker runs.
    """

    def __init__(self, activities: Sequence[Callable[..., Any]]) -> None:
        self.activities = activities
        self._made: dict[str | None, Callable[..., Any]] = {}

    def configured(self, config: WorkerConfig) -> WorkerConfig:
        """The worker's settings with ours beside."""
        config["activities"] = [*(config.get("activities") or ()), *self.activities]
        return config

    async def start(self, worker: Worker) -> None:
        """Make what the activities need, on the loop that runs the worker."""

    async def stop(self) -> None:
        """Give back what `start` has made."""

    def made(self, activities: Iterable[Callable[..., Any]]) -> None:
        """The activities that do the work, under the same names."""
        self._made = {activity_name(each): each for each in activities}

    def attempt(self, name: str) -> Callable[..., Any]:
        """An activity to register that runs attempts."""

        @activity.defn(name=name)
        async def run_attempt(attempt: AttemptInput) -> AttemptResult:
            if name not in self._made:
                raise failed_attempt(handed_over("the worker could not start"))
            result: AttemptResult = await self._made[name](attempt)
            return result

        return run_attempt


class EngineDuty(Duty):
    """Running tasks: their workflow, its activities, the coordinator functions and the sweep."""

    MARK = "open_task"
    """An activity by which a worker with this duty is known."""

    def __init__(self, db: Database, config: CoordinatorConfig, functions: Mapping[str, Function]) -> None:
        own: list[Callable[..., Any]] = [self.open_task, self.record, self.close_task]
        super().__init__([*own, *map(self.attempt, functions)])
        self._config = config
        self._functions = functions
        self._tasks = TaskStore(db)
        self._artifacts = ArtifactStore(db)
        self._sweeping: asyncio.Task[None] | None = None

    def configured(self, config: WorkerConfig) -> WorkerConfig:
        """With the Task workflow."""
        config["workflows"] = with_task(config.get("workflows"))
        config["interceptors"] = [*(config.get("interceptors") or ()), OneInput()]
        return super().configured(config)

    async def start(self, worker: Worker) -> None:
        """As an engine starts, without its thread."""
        settings = await prepared_settings(
            worker.client,
            config=self._config,
            tasks=self._tasks,
            artifacts=self._artifacts,
            functions=self._functions,
        )
        self.made(
            engine_activities(
                config=self._config,
                settings=settings,
                tasks=self._tasks,
                artifacts=self._artifacts,
                home=HomeLoop(),
                functions=self._functions,
                identity=worker.config(active_config=True).get("identity") or worker.client.identity,
                by_name=True,
            )
        )
        sweep = Sweep(worker.client, self._tasks)
        self._sweeping = asyncio.create_task(sweep.run(self._config.sweep_sec))

    async def stop(self) -> None:
        """No more sweep."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)

    @activity.defn(name=MARK)
    async def open_task(self, opening: OpenTask) -> Opened:
        """TaskActivities.open_task; before there is one a KeyError, which Temporal retries."""
        opened: Opened = await self._made["open_task"](opening)
        return opened

    @activity.defn(name="record")
    async def record(self, record: RecordTask) -> None:
        """TaskActivities.record."""
        await self._made["record"](record)

    @activity.defn(name="close_task")
    async def close_task(self, close: CloseTask) -> bool:
        """TaskActivities.close_task."""
        return bool(await self._made["close_task"](close))


def with_task(workflows: Sequence[type] | None) -> list[type]:
    """`workflows` with Task, once."""
    return [*(each for each in workflows or () if each is not Task), Task]


def activity_name(function: Callable[..., Any]) -> str | None:
    """Name of an activity; Temporal's library has no public way to ask for it."""
    definition = activity._Definition.from_callable(function)
    return definition.name if definition else None


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
