"""The engine's Temporal workers, with the Task workflow, its activities and the coordinator functions, and
its loops."""

from __future__ import annotations

import asyncio
import logging
from itertools import chain
from typing import TYPE_CHECKING

from temporalio import activity
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from flowkit import products
from flowkit.activities.builtin_functions import detector_of
from flowkit.activities.calls import Threads
from flowkit.activities.conditions import ConditionActivities
from flowkit.activities.function_attempt import FunctionActivities, built_in
from flowkit.activities.role_attempt import refuse_inline
from flowkit.activities.tasks import TaskActivities, unknown_namespace
from flowkit.adapters.slots import QueueLimits
from flowkit.adapters.worker_events import WorkerEvents
from flowkit.attempt.supervision import HEARTBEAT_THROTTLE, WorkerContext
from flowkit.connection import Namespace, register_search_attributes, registered_search_attributes
from flowkit.core.loop_portal import LoopPortal
from flowkit.engine.activations import OrderedRunner, allow_long_workflow_tasks
from flowkit.engine.gauges import CountTaken, Gauges
from flowkit.engine.silent_attempts import SilenceCheck
from flowkit.engine.slot_grants import SlotActivities, SlotGrants
from flowkit.engine.slot_leaks import SlotLoop
from flowkit.engine.sweep import Sweep
from flowkit.errors import ConfigError
from flowkit.graph.validation import RESERVED_FUNCTIONS
from flowkit.models import COORDINATOR_FN, Settings
from flowkit.models.temporal_names import INLINE_ATTEMPT, SEARCH_ATTRIBUTES, engine_identity, role_queue
from flowkit.products import keep_logs
from flowkit.workflows.interceptor import TaskInterceptor
from flowkit.workflows.task import Task

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
    from typing import Any, Self

    from temporalio.client import Client
    from temporalio.worker import WorkerConfig

    from flowkit.activities.function_attempt import Function
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.attempt.background import LoopHealth
    from flowkit.config import CoordinatorConfig
    from flowkit.products import LogKeeper

_logger = logging.getLogger("flowkit.engine.worker")

_REGISTRATION_SEC = 3.0
"""How long an engine waits after it has registered search attributes.

Each process of a Temporal cluster looks for new ones every two seconds. Until then, it fails workflow tasks that set
them.
"""
_INLINE_WORKFLOW_TASKS = 50
"""Workflow tasks that an engine with inline roles runs at once.

Each of them lasts as long as its inline attempts. With the SDK's 100, the attempts of a hundred tasks that
start at once slow each other down so much that workflow tasks take more than five seconds.
"""


def limit_heartbeats(config: WorkerConfig) -> WorkerConfig:
    """Return the worker's settings with heartbeats sent at least every HEARTBEAT_THROTTLE."""
    longest = config.get("max_heartbeat_throttle_interval", HEARTBEAT_THROTTLE)
    usual = config.get("default_heartbeat_throttle_interval", HEARTBEAT_THROTTLE)
    config["max_heartbeat_throttle_interval"] = min(longest, HEARTBEAT_THROTTLE)
    config["default_heartbeat_throttle_interval"] = min(usual, HEARTBEAT_THROTTLE)
    return config


def count_workflow_tasks(inline_roles: Collection[str]) -> int | None:
    """Return how many workflow tasks an engine with these inline roles runs at once; None for the SDK's default."""
    return _INLINE_WORKFLOW_TASKS if inline_roles else None


def make_settings(
    config: CoordinatorConfig,
    *,
    deployment: str,
    search_attributes: tuple[str, ...],
    functions: Mapping[str, Function],
    inline_roles: tuple[str, ...] = (),
) -> Settings:
    """Return the part of the engine's settings that a task stores in its history."""
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
        max_in_flight=config.max_in_flight,
        function_queue=name_function_queue(config.queue),
        limits=QueueLimits.of(config).configured,
        inline_roles=inline_roles,
    )


def name_function_queue(queue: str) -> str:
    """Return the task queue of user-defined functions. They share no slots with the engine's own activities."""
    return role_queue(queue, COORDINATOR_FN)


def check_functions(functions: Iterable[str]) -> None:
    """Raise ConfigError if a coordinator function has the name of one of the engine's own activities."""
    if taken := sorted({*RESERVED_FUNCTIONS, INLINE_ATTEMPT}.intersection(functions)):
        raise ConfigError(
            f"the coordinator function name {taken[0]!r} is reserved for the engine; choose another name"
        )


async def prepare_settings(
    client: Client,
    *,
    config: CoordinatorConfig,
    tasks: TaskStore,
    artifacts: ArtifactStore,
    functions: Mapping[str, Function],
    inline_roles: tuple[str, ...] = (),
) -> Settings:
    """Create the indexes and return the settings of tasks, with the values that MongoDB and Temporal provide."""
    await tasks.prepare()
    await artifacts.prepare()
    await WorkerEvents(tasks.database).expire_after(config.worker_events_ttl_sec)
    if (logs := products.logs()) is not None:
        await logs.expire_after(tasks.database, config.attempt_logs_ttl_sec)
    return make_settings(
        config,
        deployment=await tasks.deployment(),
        search_attributes=await find_search_attributes(client),
        functions=functions,
        inline_roles=inline_roles,
    )


class EngineParts:
    """What an engine consists of, in a process of its own, in the worker of a user, or in a simulation."""

    def __init__(
        self,
        *,
        config: CoordinatorConfig,
        tasks: TaskStore,
        artifacts: ArtifactStore,
        functions: Mapping[str, Function],
        identity: str,
        lines: LogKeeper | None = None,
        grants: SlotGrants | None = None,
        namespace: Namespace | None = None,
    ) -> None:
        """Call this on the loop of the database handle. Without a server, there are no `grants` and no `namespace`."""
        self.config, self.tasks, self.artifacts = config, tasks, artifacts
        self.functions, self.identity = functions, identity
        self.portal = LoopPortal()
        self._lines, self._grants, self._namespace = lines, grants, namespace
        self._loops: EngineLoops | None = None
        context = WorkerContext(tasks=tasks, portal=self.portal, worker_id=identity, lines=lines)
        threads = Threads(config.function_slots, "flowkit-function")
        self.calls = FunctionActivities(
            worker=context, artifacts=artifacts, functions=functions, threads=threads
        )
        """The activities that run coordinator functions, shared by all Temporal workers of the engine."""

    @classmethod
    async def connect(
        cls,
        client: Client,
        *,
        config: CoordinatorConfig,
        tasks: TaskStore,
        artifacts: ArtifactStore,
        functions: Mapping[str, Function],
        identity: str,
    ) -> Self:
        """Return the parts of an engine of a server, with its slots and the lines of its functions."""
        namespace = Namespace(client)
        await namespace.id()
        return cls(
            config=config,
            tasks=tasks,
            artifacts=artifacts,
            functions=functions,
            identity=identity,
            lines=keep_logs(tasks.database, config),
            grants=SlotGrants(client, tasks.database, namespace.id, config),
            namespace=namespace,
        )

    def activities(self, settings: Settings, *, by_name: bool = False) -> list[Callable[..., Any]]:
        """Return the activities that a worker of the engine's queue registers in addition to the Task workflow.

        One dynamic activity runs all functions. With `by_name`, each function has its own activity: a user's worker may
        already have a dynamic activity, and Temporal allows only one.
        """
        own = TaskActivities(
            tasks=self.tasks,
            artifacts=self.artifacts,
            portal=self.portal,
            settings=settings,
            functions=self.functions,
            max_nodes=self.config.max_nodes,
            external_roles=self.config.worker_types,
            namespace_id=self._namespace.id if self._namespace else unknown_namespace,
            on_closed=products.on_closed(self.tasks.database),
        )
        detector = detector_of(self.functions)
        conditions = ConditionActivities(tasks=self.tasks, portal=self.portal, detector=detector)
        calls = self.calls
        return [
            *own.all,
            *conditions.all,
            *(SlotActivities(self._grants, self.portal).all if self._grants else []),
            *(
                [calls.activity_for(name) for name in self.functions]
                if by_name
                else [calls.dynamic_activity()]
            ),
        ]

    def workers(
        self, client: Client, settings: Settings, inline: Callable[..., Any] = refuse_inline
    ) -> list[Worker]:
        """Return the Temporal workers of an engine. Call this on the loop that will run them.

        `inline` is the local activity that runs attempts of the roles that the engine hosts.

        The workers run without Temporal's sandbox, which would take a third of the engine's time. They run only
        FlowKit's own workflow, and every test run replays recorded histories of it in the sandbox.
        """
        runs_tasks = Worker(
            client,
            task_queue=self.config.queue,
            workflows=[Task],
            activities=[*self.activities(settings), inline],
            workflow_runner=OrderedRunner(UnsandboxedWorkflowRunner()),
            interceptors=[TaskInterceptor(self.config.page_url)],
            identity=engine_identity(self.identity, settings.deployment),
            max_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
            default_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
            max_concurrent_workflow_tasks=count_workflow_tasks(settings.inline_roles),
        )
        return [allow_long_workflow_tasks(runs_tasks), self.function_worker(client)]

    def function_worker(self, client: Client) -> Worker:
        """Return the Temporal worker for user-defined functions, so that slow functions do not delay the engine."""
        return Worker(
            client,
            task_queue=name_function_queue(self.config.queue),
            activities=[self.calls.dynamic_activity()],
            identity=self.identity,
            max_concurrent_activities=self.config.function_slots,
            max_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
            default_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
        )

    def start(self, count_taken: CountTaken | None = None) -> None:
        """Start the background loops of an engine of a server, and store the lines of its functions."""
        assert self._namespace is not None
        assert self._grants is not None
        self._loops = EngineLoops(self.tasks, self.config, self._namespace, self._grants, count_taken)
        if self._lines is not None:
            self._lines.start()

    @property
    def health(self) -> tuple[LoopHealth, ...]:
        """The health of the loops."""
        lines = () if self._lines is None else (self._lines.health,)
        return (*(() if self._loops is None else self._loops.health), *lines)

    async def stop_loops(self) -> None:
        """Stop the background loops, before the workers stop."""
        if self._loops is not None:
            await self._loops.stop()

    async def stop_lines(self) -> None:
        """Store the last lines of functions, after the workers and the calls have ended."""
        if self._lines is not None:
            await self._lines.stop()


def add_task(workflows: Sequence[type] | None) -> list[type]:
    """Return `workflows` with Task added, without duplicates of Task."""
    return [*(each for each in workflows or () if each is not Task), Task]


def read_activity_name(function: Callable[..., Any]) -> str | None:
    """Return the name of an activity, or None. Temporal's SDK has no public API for this."""
    definition = activity._Definition.from_callable(function)
    return definition.name if definition else None


def list_activities() -> list[Callable[..., Any]]:
    """Return the methods that are the engine's own activities, without those that run functions."""
    members = (vars(kind).values() for kind in (TaskActivities, ConditionActivities, SlotActivities))
    return [member for member in chain.from_iterable(members) if read_activity_name(member)]


async def find_search_attributes(
    client: Client, pause: Callable[[float], Awaitable[object]] = asyncio.sleep
) -> tuple[str, ...]:
    """Register FlowKit's search attributes if the namespace lacks one, and return those that it then has.

    After a registration, pause until the whole server knows it.
    """
    before = await _list_search_attributes(client)
    if len(before) == len(SEARCH_ATTRIBUTES):
        return before
    try:
        await register_search_attributes(client)
    except RPCError as error:
        _logger.info("search attributes were not registered: %s", error.message)
    after = await _list_search_attributes(client)
    if after != before:
        await pause(_REGISTRATION_SEC)
    return after


async def _list_search_attributes(client: Client) -> tuple[str, ...]:
    try:
        return await registered_search_attributes(client)
    except RPCError as error:
        _logger.info("search attributes were not set: %s", error.message)
        return ()


class EngineLoops:
    """Runs the background loops of one engine between its creation and `stop`, on the loop of the database handle."""

    def __init__(
        self,
        tasks: TaskStore,
        config: CoordinatorConfig,
        namespace: Namespace,
        grants: SlotGrants,
        count_taken: CountTaken | None = None,
    ) -> None:
        silence = SilenceCheck(grants.client, tasks.database, config)
        sweep = Sweep(grants.client, tasks, namespace, every_sec=config.sweep_sec, silence=silence)
        self._loops = (sweep, SlotLoop(grants), Gauges(tasks, namespace, grants, config.queue, count_taken))
        self._running = [asyncio.create_task(loop.run()) for loop in self._loops]

    @property
    def health(self) -> tuple[LoopHealth, ...]:
        """The health of each loop."""
        return tuple(loop.health for loop in self._loops)

    async def stop(self) -> None:
        """Stop the loops."""
        for each in self._running:
            each.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
