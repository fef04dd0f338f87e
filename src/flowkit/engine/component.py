"""What a Temporal worker of somebody else's does for FlowKit; the plugin gives it to the worker."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from temporalio import activity

from flowkit.activities.loop_portal import LoopPortal
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.task_store import TaskStore
from flowkit.attempt.failures import failed_attempt, handed_over
from flowkit.connection import Namespace
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
from flowkit.models import AttemptInput, AttemptResult, CloseTask, Opened, OpenTask, RecordTask
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
    """What a Temporal worker of somebody else's does for FlowKit.

    Its activities are registered when the worker is made, and do their work once `made` has been called: the loop,
    the deployment and the registered search attributes are not known before the worker runs.
    """

    def __init__(self, activities: Sequence[Callable[..., Any]]) -> None:
        self.activities = activities
        self._bound: dict[str | None, Callable[..., Any]] = {}

    def configured(self, config: WorkerConfig) -> WorkerConfig:
        """The worker's settings with ours beside."""
        config["activities"] = [*(config.get("activities") or ()), *self.activities]
        return config

    async def start(self, worker: Worker) -> None:
        """Make what the activities need, on the loop that runs the worker."""

    async def stop(self) -> None:
        """Give back what `start` has made."""

    def bind(self, activities: Iterable[Callable[..., Any]]) -> None:
        """The activities that do the work, under the same names."""
        self._bound = {activity_name(each): each for each in activities}

    def attempt(self, name: str) -> Callable[..., Any]:
        """An activity to register that runs attempts."""

        @activity.defn(name=name)
        async def run_attempt(attempt: AttemptInput) -> AttemptResult:
            if name not in self._bound:
                raise failed_attempt(handed_over("the worker could not start"))
            result: AttemptResult = await self._bound[name](attempt)
            return result

        return run_attempt


class EngineComponent(WorkerComponent):
    """Running tasks: their workflow, its activities, the coordinator functions and the sweep."""

    MARK = "open_task"
    """An activity by which a worker with this component is known."""

    def __init__(self, db: Database, config: CoordinatorConfig, functions: Mapping[str, Function]) -> None:
        own: list[Callable[..., Any]] = [self.open_task, self.record, self.close_task]
        check_functions(functions)
        super().__init__([*own, *map(self.attempt, functions)])
        self._config = config
        self._functions = functions
        self._tasks = TaskStore(db)
        self._artifacts = ArtifactStore(db)
        self._sweeping: asyncio.Task[None] | None = None
        self._function_worker: SideWorker | None = None

    def configured(self, config: WorkerConfig) -> WorkerConfig:
        """With the Task workflow."""
        config["workflows"] = with_task(config.get("workflows"))
        config["interceptors"] = [*(config.get("interceptors") or ()), SingleInputInterceptor()]
        return super().configured(throttled(config))

    async def start(self, worker: Worker) -> None:
        """As an engine starts, without its thread."""
        settings = await prepared_settings(
            worker.client,
            config=self._config,
            tasks=self._tasks,
            artifacts=self._artifacts,
            functions=self._functions,
        )
        namespace = Namespace(worker.client)
        await namespace.id()
        portal = LoopPortal()
        identity = worker.config(active_config=True).get("identity") or worker.client.identity
        calls = function_activities(
            config=self._config,
            tasks=self._tasks,
            artifacts=self._artifacts,
            portal=portal,
            functions=self._functions,
            identity=identity,
        )
        self.bind(
            engine_activities(
                config=self._config,
                settings=settings,
                tasks=self._tasks,
                artifacts=self._artifacts,
                portal=portal,
                calls=calls,
                by_name=True,
                namespace_id=namespace.id,
            )
        )
        beside = function_worker(worker.client, config=self._config, calls=calls, identity=identity)
        self._function_worker = SideWorker(beside, main=worker)
        sweep = Sweep(worker.client, self._tasks, namespace, every_sec=self._config.sweep_sec)
        self._sweeping = asyncio.create_task(sweep.run())

    async def stop(self) -> None:
        """No more sweep, no more functions; raises what ended the worker of functions."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        if self._function_worker is not None:
            await self._function_worker.stop()

    @activity.defn(name=MARK)
    async def open_task(self, opening: OpenTask) -> Opened:
        """TaskActivities.open_task; before there is one a KeyError, which Temporal retries."""
        opened: Opened = await self._bound["open_task"](opening)
        return opened

    @activity.defn(name="record")
    async def record(self, record: RecordTask) -> None:
        """TaskActivities.record."""
        await self._bound["record"](record)

    @activity.defn(name="close_task")
    async def close_task(self, close: CloseTask) -> bool:
        """TaskActivities.close_task."""
        return bool(await self._bound["close_task"](close))


class SideWorker:
    """A Temporal worker that runs beside another one until `stop`; when it fails, it stops the other one."""

    def __init__(self, worker: Worker, *, main: Worker) -> None:
        self._worker = worker
        self._main = main
        self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._worker.run()
        except Exception:
            _logger.exception("the worker of coordinator functions has ended; the engine stops")
            await self._main.shutdown()
            raise

    async def stop(self) -> None:
        """Stop it; raises what ended it before."""
        if self._worker.is_running:
            await self._worker.shutdown()
        elif not self._running.done():
            self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running
