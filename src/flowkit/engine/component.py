"""The components that FlowKitPlugin adds to a user's own Temporal workers."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, get_type_hints

from temporalio import activity

from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.attempt.failures import failed_attempt, handed_over
from flowkit.engine.worker import (
    EngineParts,
    add_task,
    check_functions,
    count_workflow_tasks,
    limit_heartbeats,
    list_activities,
    prepare_settings,
    read_activity_name,
)
from flowkit.models import AttemptInput, AttemptResult, temporal_names
from flowkit.workflows.interceptor import TaskInterceptor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from temporalio.client import Client
    from temporalio.worker import Worker, WorkerConfig

    from flowkit.activities.function_attempt import Function
    from flowkit.adapters.mongo import Database
    from flowkit.config import CoordinatorConfig
    from flowkit.core.loop_portal import LoopPortal
    from flowkit.engine.gauges import CountTaken


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
        self._bound = {read_activity_name(each): each for each in activities}

    def delegate(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return an activity with the name and types of `method`, which `bind` binds to an object.

        Until then it raises KeyError, which Temporal retries.
        """
        name = read_activity_name(method)

        async def run(request: Any) -> Any:
            return await self._bound[name](request)

        types = get_type_hints(method)
        result = types.pop("return")
        [parameter] = types.values()
        run.__annotations__ = {"request": parameter, "return": result}
        return activity.defn(name=name)(run)

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

    async def open(self, namespace: str) -> None:
        """Register the engine, take the leases of its roles in the namespace, and prepare the activities."""

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
        *,
        backfills: Callable[[Client, LoopPortal, str], Worker] | None = None,
        count_taken: Callable[[Client], CountTaken] | None = None,
    ) -> None:
        """`backfills` returns the worker of backfills, for a client, the loop of the database and an identity;
        `count_taken` returns what counts the nominal times whose ids are taken, for a client.
        """
        check_functions(functions)
        attempts = (*functions, temporal_names.INLINE_ATTEMPT)
        super().__init__([*map(self.delegate, list_activities()), *map(self.attempt, attempts)])
        self._inline = inline
        self._backfills = backfills
        self._count_taken = count_taken
        self._config = config
        self._functions = functions
        self._tasks = TaskStore(db)
        self._artifacts = ArtifactStore(db)
        self._side_workers: list[SideWorker] = []
        self._parts: EngineParts | None = None

    def configured(self, config: WorkerConfig) -> WorkerConfig:
        """Return the worker's settings with the Task workflow, its interceptor and the activities added."""
        config["workflows"] = add_task(config.get("workflows"))
        config["interceptors"] = [*(config.get("interceptors") or ()), TaskInterceptor(self._config.page_url)]
        if not config.get("tuner") and not config.get("max_concurrent_workflow_tasks"):
            config["max_concurrent_workflow_tasks"] = count_workflow_tasks(self._inline.inline_roles)
        return super().configured(limit_heartbeats(config))

    async def start(self, worker: Worker) -> None:
        """Start as an engine does, but without a thread."""
        settings = await prepare_settings(
            worker.client,
            config=self._config,
            tasks=self._tasks,
            artifacts=self._artifacts,
            functions=self._functions,
            inline_roles=self._inline.inline_roles,
        )
        await self._inline.open(worker.client.namespace)
        parts = self._parts = await EngineParts.connect(
            worker.client,
            config=self._config,
            tasks=self._tasks,
            artifacts=self._artifacts,
            functions=self._functions,
            identity=worker.config(active_config=True).get("identity") or worker.client.identity,
        )
        self.bind([*parts.activities(settings, by_name=True), self._inline.local_activity])
        self._side_workers = [SideWorker(parts.function_worker(worker.client), main=worker)]
        if self._backfills is not None:
            backfills = self._backfills(worker.client, parts.portal, parts.identity)
            self._side_workers.append(SideWorker(backfills, main=worker))
        parts.start(None if self._count_taken is None else self._count_taken(worker.client))

    async def stop(self) -> None:
        """Stop the background loops and the side workers. Raise the error that ended one of them, if any."""
        if self._parts is not None:
            await self._parts.stop_loops()
        await self._inline.stop()
        await asyncio.gather(*(each.stop() for each in self._side_workers))
        if self._parts is not None:
            await self._parts.calls.close()
            await self._parts.stop_lines()


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
            queue = self._worker.config(active_config=True)["task_queue"]
            _logger.exception("the worker of task queue %s stopped; the engine stops, too", queue)
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
