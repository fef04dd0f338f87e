"""The components that FlowKitPlugin adds to a user's own Temporal workers."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from temporalio import activity

from flowkit import temporal_names
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.task_store import TaskStore
from flowkit.attempt.failures import failed_attempt, handed_over
from flowkit.attempt.loop_portal import LoopPortal
from flowkit.connection import Namespace
from flowkit.engine.limits.grants import SlotGrants
from flowkit.engine.limits.leaks import SlotLoop
from flowkit.engine.silence import SilenceCheck
from flowkit.engine.sweep import Sweep
from flowkit.engine.worker import (
    activity_name,
    check_functions,
    engine_activities,
    function_activities,
    function_worker,
    prepared_settings,
    throttled,
    with_task,
)
from flowkit.models import (
    AttemptInput,
    AttemptResult,
    CloseTask,
    ConditionResults,
    EvaluateConditions,
    Opened,
    OpenTask,
    RecordTask,
    ReleaseSlots,
    SlotReply,
    SlotRequest,
)
from flowkit.workflows.interceptor import SingleInputInterceptor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from temporalio.worker import Worker, WorkerConfig

    from flowkit.activities.functions import Function
    from flowkit.adapters.mongo import Database
    from flowkit.config import CoordinatorConfig

_logger = logging.getLogger("flowkit.engine.worker")


class WorkerComponent:
    """The FlowKit part of a user's own Temporal worker.

    The worker registers the component's activities when it is created. The activities work only after `bind`: the
    event loop, the deployment and the registered search attributes are unknown until the worker runs.
    """

    def __init__(self, activities: Sequence[Callable[..., Any]]) -> None:
        self.activities = activities
        self._bound: dict[str | None, Callable[..., Any]] = {}

    def configured(self, config: WorkerConfig) -> WorkerConfig:
        """Return the worker's settings with this component's activities added."""
        config["activities"] = [*(config.get("activities") or ()), *self.activities]
        return config

    async def start(self, worker: Worker) -> None:
        """Create what the activities need, on the loop that runs the worker."""

    async def stop(self) -> None:
        """Release what `start` created."""

    def bind(self, activities: Iterable[Callable[..., Any]]) -> None:
        """Set the activities to which the registered activities of the same names delegate."""
        self._bound = {activity_name(each): each for each in activities}

    def attempt(self, name: str) -> Callable[..., Any]:
        """Return an activity that runs attempts, to be registered as `name`."""

        @activity.defn(name=name)
        async def run_attempt(attempt: AttemptInput) -> AttemptResult:
            if name not in self._bound:
                raise failed_attempt(handed_over("the worker could not start"))
            result: AttemptResult = await self._bound[name](attempt)
            return result

        return run_attempt


class InlineRoles(Protocol):
    """The inline roles that an engine hosts."""

    inline_roles: tuple[str, ...]

    async def open(self) -> None:
        """Register the engine, and prepare the activities."""

    @property
    def local_activity(self) -> Callable[..., Any]:
        """The local activity that runs the attempts, once it is open."""

    async def stop(self) -> None:
        """Release what `open` created."""


class EngineComponent(WorkerComponent):
    """Makes a Temporal worker run tasks: the workflow, its activities, the coordinator functions and the sweep."""

    MARK = temporal_names.OPEN_TASK
    """The activity that identifies a worker with this component."""

    def __init__(
        self,
        db: Database,
        config: CoordinatorConfig,
        functions: Mapping[str, Function],
        inline: InlineRoles,
    ) -> None:
        own: list[Callable[..., Any]] = [self.open_task, self.record, self.close_task]
        own += [self.evaluate_conditions, self.acquire_slot, self.await_slot, self.release_slots]
        check_functions(functions)
        super().__init__([*own, *map(self.attempt, (*functions, temporal_names.INLINE_ATTEMPT))])
        self._inline = inline
        self._config = config
        self._functions = functions
        self._tasks = TaskStore(db)
        self._artifacts = ArtifactStore(db)
        self._background: list[asyncio.Task[None]] = []
        self._function_worker: SideWorker | None = None

    def configured(self, config: WorkerConfig) -> WorkerConfig:
        """Return the worker's settings with the Task workflow, its interceptor and the activities added."""
        config["workflows"] = with_task(config.get("workflows"))
        config["interceptors"] = [*(config.get("interceptors") or ()), SingleInputInterceptor()]
        return super().configured(throttled(config))

    async def start(self, worker: Worker) -> None:
        """Start as an engine does, but without a thread."""
        settings = await prepared_settings(
            worker.client,
            config=self._config,
            tasks=self._tasks,
            artifacts=self._artifacts,
            functions=self._functions,
            inline_roles=self._inline.inline_roles,
        )
        await self._inline.open()
        namespace = Namespace(worker.client)
        await namespace.id()
        portal = LoopPortal()
        identity = worker.config(active_config=True).get("identity") or worker.client.identity
        grants = SlotGrants(worker.client, self._tasks.database, namespace.id, self._config)
        calls = function_activities(
            config=self._config,
            tasks=self._tasks,
            artifacts=self._artifacts,
            portal=portal,
            functions=self._functions,
            identity=identity,
        )
        own = engine_activities(
            config=self._config,
            settings=settings,
            tasks=self._tasks,
            artifacts=self._artifacts,
            portal=portal,
            calls=calls,
            by_name=True,
            namespace_id=namespace.id,
            grants=grants,
        )
        self.bind([*own, self._inline.local_activity])
        side_worker = function_worker(worker.client, config=self._config, calls=calls, identity=identity)
        self._function_worker = SideWorker(side_worker, main=worker)
        silence = SilenceCheck(worker.client, self._tasks.database, self._config)
        sweep = Sweep(
            worker.client, self._tasks, namespace, every_sec=self._config.sweep_sec, silence=silence
        )
        self._background = [asyncio.create_task(sweep.run()), asyncio.create_task(SlotLoop(grants).run())]

    async def stop(self) -> None:
        """Stop the background loops and the function worker. Raise the error that ended the function worker, if any."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._inline.stop()
        if self._function_worker is not None:
            await self._function_worker.stop()

    @activity.defn(name=MARK)
    async def open_task(self, opening: OpenTask) -> Opened:
        """Run TaskActivities.open_task. Raise KeyError, which Temporal retries, until the component has started."""
        opened: Opened = await self._bound[temporal_names.OPEN_TASK](opening)
        return opened

    @activity.defn(name=temporal_names.RECORD)
    async def record(self, record: RecordTask) -> None:
        """Run TaskActivities.record."""
        await self._bound[temporal_names.RECORD](record)

    @activity.defn(name=temporal_names.CLOSE_TASK)
    async def close_task(self, close: CloseTask) -> bool:
        """Run TaskActivities.close_task."""
        return bool(await self._bound[temporal_names.CLOSE_TASK](close))

    @activity.defn(name=temporal_names.EVALUATE_CONDITIONS)
    async def evaluate_conditions(self, due: EvaluateConditions) -> ConditionResults:
        """Run ConditionActivities.evaluate_conditions."""
        results: ConditionResults = await self._bound[temporal_names.EVALUATE_CONDITIONS](due)
        return results

    @activity.defn(name=temporal_names.ACQUIRE_SLOT)
    async def acquire_slot(self, request: SlotRequest) -> SlotReply:
        """Run SlotActivities.acquire_slot."""
        reply: SlotReply = await self._bound[temporal_names.ACQUIRE_SLOT](request)
        return reply

    @activity.defn(name=temporal_names.AWAIT_SLOT)
    async def await_slot(self, request: SlotRequest) -> SlotReply:
        """Run SlotActivities.await_slot."""
        reply: SlotReply = await self._bound[temporal_names.AWAIT_SLOT](request)
        return reply

    @activity.defn(name=temporal_names.RELEASE_SLOTS)
    async def release_slots(self, record: ReleaseSlots) -> None:
        """Run SlotActivities.release_slots."""
        await self._bound[temporal_names.RELEASE_SLOTS](record)


class SideWorker:
    """Runs a second Temporal worker alongside the main one until `stop`. If it fails, it shuts down the main one."""

    def __init__(self, worker: Worker, *, main: Worker) -> None:
        self._worker = worker
        self._main = main
        self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._worker.run()
        except Exception:
            _logger.exception("the worker of coordinator functions stopped; the engine stops, too")
            await self._main.shutdown()
            raise

    async def stop(self) -> None:
        """Stop the worker. Raise the error that ended it earlier, if any."""
        if self._worker.is_running:
            await self._worker.shutdown()
        elif not self._running.done():
            self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running
