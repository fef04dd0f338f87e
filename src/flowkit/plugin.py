"""A plugin that runs FlowKit in your own Temporal workers: `plugins=[FlowKitPlugin(...)]` (docs/plugin.md)."""

from __future__ import annotations

import asyncio
import copy
import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from temporalio.converter import DataConverter
from temporalio.plugin import SimplePlugin
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from flowkit.activities.builtin_functions import default_adapters
from flowkit.adapters.tasks.store import TaskStore
from flowkit.backfills.hosting import create_backfill_worker
from flowkit.client import TaskClient
from flowkit.config import DEFAULT_QUEUE, CoordinatorConfig, WorkerConfig
from flowkit.coordinator.hosting import HostedRoles
from flowkit.engine.activations import OrderedRunner, allow_long_workflow_tasks
from flowkit.engine.component import EngineComponent, WorkerComponent
from flowkit.engine.worker import add_task, check_functions, limit_heartbeats, read_activity_name
from flowkit.errors import ConfigError
from flowkit.models import COORDINATOR_FN
from flowkit.models.temporal_names import is_backfill_queue, role_queue
from flowkit.payload_converter import complete_converter, configured_converter, uses_pydantic
from flowkit.schedules import Schedules
from flowkit.validation.arguments import (
    database_problem,
    functions_problem,
    handlers_problem,
    require,
    settings_problem,
)
from flowkit.worker.runner import Worker
from flowkit.workflows.backfill import Backfill

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from temporalio import worker as temporal
    from temporalio.client import Client

    from flowkit.activities.function_attempt import Function
    from flowkit.activities.handlers import RoleHandler
    from flowkit.core.loop_portal import LoopPortal

__all__ = ["FlowKitPlugin"]

_logger = logging.getLogger("flowkit.plugin")

_PASSED_THROUGH = tuple(f"flowkit.{name}" for name in ("errors", "limits", "models", "reason_codes"))
"""Modules that a user's workflow imports to run tasks. Reloading them in the sandbox would slow down each workflow."""

_PYTEST = "_pytest"
"""The package of pytest, which rewrites FlowKit's modules so that they import it, because FlowKit has a plugin for it.

Passed through as well: each workflow of a test would otherwise load its 80 modules anew.
"""


class FlowKitPlugin(SimplePlugin):
    """Makes your own Temporal worker run tasks, or the attempts of a role, in addition to its other work.

    Pass the plugin to `Client.connect`; the client's workers inherit it. The task queue of a worker determines what
    it runs: `config.queue` runs tasks, `<queue>.<role>` runs the role's handler. A client or a Replayer needs the
    plugin without arguments.

    `db` is a Motor database, or one with the same interface. The plugin uses it on the loop that runs the worker.
    `functions` maps names to coordinator functions, in addition to the built-in ones. `handlers` maps roles to
    handlers; the worker that runs tasks hosts the inline ones, on a thread with its own event loop. The
    plugin copies both configurations; the default of `config` is `CoordinatorConfig.load()`.
    """

    def __init__(
        self,
        *,
        db: Any = None,
        config: CoordinatorConfig | None = None,
        functions: Mapping[str, Function] | None = None,
        handlers: Mapping[str, RoleHandler] | None = None,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        super().__init__(
            "flowkit.FlowKitPlugin", data_converter=_complete_converter, workflow_runner=_make_runner
        )
        if db is not None:
            require(database_problem(db))
        require(settings_problem(config, "config", CoordinatorConfig), handlers_problem(handlers))
        require(settings_problem(worker_config, "worker_config", WorkerConfig))
        require(functions_problem(functions or {}, "functions"))
        self._db = db
        self._config, self._worker_config = _match_configs(config, worker_config)
        self._functions: dict[str, Function] = {
            **(default_adapters(db=db) if db is not None else {}),
            **(functions or {}),
        }
        check_functions(self._functions)
        self._handlers = dict(handlers or {})
        self._components: list[WorkerComponent] = []

    def configure_replayer(self, config: temporal.ReplayerConfig) -> temporal.ReplayerConfig:
        """Add the Task workflow and the data converter, so that the Replayer can replay tasks."""
        config = super().configure_replayer(config)
        config["workflows"] = [*add_task(config.get("workflows")), Backfill]
        return config

    def configure_worker(self, config: temporal.WorkerConfig) -> temporal.WorkerConfig:
        """Add what the worker's task queue requires. Raise ConfigError (a ValueError) if that is not possible."""
        config = super().configure_worker(config)
        given = [plugin for plugin in config.get("plugins") or () if isinstance(plugin, FlowKitPlugin)]
        if given and self not in given:
            return config  # the worker's own plugin takes precedence over its client's
        role = self._role(config["task_queue"])
        if role == COORDINATOR_FN or is_backfill_queue(config["task_queue"], self._config.queue):
            return config  # an engine's own worker for coordinator functions, or for backfills
        if role is None:
            self._check_not_idle(config, asked_for=self in given)
            return config
        if (role or EngineComponent.MARK) in map(read_activity_name, config.get("activities") or ()):
            return config  # already configured, or an engine or worker of FlowKit itself
        self._check(config)
        try:
            component = self._component(role)
        except ConfigError as error:
            raise ConfigError(f"FlowKitPlugin on task queue {config['task_queue']!r}: {error}") from None
        self._components.append(component)
        return component.configured(config)

    async def run_worker(
        self, worker: temporal.Worker, next: Callable[[temporal.Worker], Awaitable[None]]
    ) -> None:
        """Start the worker's FlowKit component, run the worker, and stop the component."""
        component = self._take_component(worker)
        if component is None:
            return await next(worker)
        allow_long_workflow_tasks(worker)
        try:
            await component.start(worker)
        except Exception:
            await _run_and_shut_down(worker, next)
            raise
        else:
            await next(worker)
        finally:
            await component.stop()

    def _role(self, queue: str) -> str | None:
        """Return the role of a queue: an empty string for the engine's queue, None for a queue of another system."""
        if queue == self._config.queue:
            return ""
        prefix = role_queue(self._config.queue, "")
        return queue.removeprefix(prefix) or None if queue.startswith(prefix) else None

    def _component(self, role: str) -> WorkerComponent:
        if role:
            return RoleComponent(self._db, self._worker_config, role, self._handlers)
        inline = {name: handler for name, handler in self._handlers.items() if handler.inline}
        hosted = HostedRoles(db=self._db, cfg=self._config, handlers=inline, clock=None, own_loop=True)
        return EngineComponent(
            self._db,
            self._config,
            self._functions,
            hosted,
            backfills=self._backfill_worker,
            count_taken=lambda client: (
                Schedules(client, self._task_client(client), queue=self._config.queue).count_taken
            ),
        )

    def _task_client(self, client: Client) -> TaskClient:
        return TaskClient(
            client,
            TaskStore(self._db),
            queue=self._config.queue,
            max_nodes=self._config.max_nodes,
            external_roles=self._config.worker_types,
        )

    def _backfill_worker(self, client: Client, portal: LoopPortal, identity: str) -> temporal.Worker:
        """Return the worker of backfills beside an engine inside a worker of the user."""
        tasks = self._task_client(client)
        return create_backfill_worker(
            client, db=self._db, tasks=tasks, portal=portal, queue=self._config.queue, identity=identity
        )

    def _check_not_idle(self, config: temporal.WorkerConfig, *, asked_for: bool) -> None:
        """Raise ConfigError for a queue that FlowKit does not use.

        A worker that inherited the plugin from its client and has other work is left unchanged.
        """
        queue = config["task_queue"]
        if not asked_for and (config.get("activities") or config.get("workflows")):
            _logger.info("the worker of task queue %r runs no part of FlowKit", queue)
            return
        roles = [role_queue(self._config.queue, role) for role in self._handlers or ("<role>",)]
        raise ConfigError(
            f"FlowKitPlugin has nothing to do on task queue {queue!r}: it runs tasks on {self._config.queue!r} "
            f"and handlers on {', '.join(map(repr, roles))} (set by config=, worker_config= and handlers=)"
        )

    def _check(self, config: temporal.WorkerConfig) -> None:
        queue = config["task_queue"]
        if self._db is None:
            raise ConfigError(
                f"FlowKitPlugin has no database for task queue {queue!r}: pass db=, the same database for all workers"
            )
        if not uses_pydantic(config["client"].data_converter):
            raise ConfigError(
                f"the client of the worker on task queue {queue!r} cannot serialize FlowKit's records: "
                "pass the plugin to the client, too: Client.connect(..., plugins=[FlowKitPlugin(...)])"
            )

    def _take_component(self, worker: temporal.Worker) -> WorkerComponent | None:
        """Return the component of a worker on the first call, and None on later calls.

        A worker can have this plugin twice: from its client and as its own.
        """
        registered = worker.config(active_config=True).get("activities") or ()
        for component in self._components:
            if component.activities[0] in registered:
                self._components.remove(component)
                return component
        return None


class RoleComponent(WorkerComponent):
    """Makes a Temporal worker run the attempts of one role."""

    def __init__(self, db: Any, config: WorkerConfig, role: str, handlers: Mapping[str, RoleHandler]) -> None:
        super().__init__([self.attempt(role)])
        self._role = role
        self._worker = Worker(db=db, cfg=config, roles=[role], handlers=dict(handlers))

    def configured(self, config: temporal.WorkerConfig) -> temporal.WorkerConfig:
        """Return the worker's settings, with WorkerConfig filling in those that the worker leaves out."""
        config = super().configured(limit_heartbeats(config))
        config["identity"] = self._worker.worker_id = config.get("identity") or self._worker.worker_id
        if at_once := config.get("max_concurrent_activities"):
            self._worker.cfg.max_concurrent = at_once
        elif config.get("tuner") is None:
            config["max_concurrent_activities"] = self._worker.cfg.slots(self._role)
        return config

    async def start(self, worker: temporal.Worker) -> None:
        """Start as FlowKit's own worker does, but without a thread."""
        self.bind([(await self._worker.open(worker.client.namespace)).activity_for(self._role)])

    async def stop(self) -> None:
        """Stop the worker's background work and release its resources."""
        await self._worker.stop()


def _match_configs(
    config: CoordinatorConfig | None, worker_config: WorkerConfig | None
) -> tuple[CoordinatorConfig, WorkerConfig]:
    """Return copies of both configurations, or their defaults. Raise ConfigError if their queues differ."""
    queue = config.queue if config is not None else worker_config.queue if worker_config else DEFAULT_QUEUE
    own = copy.deepcopy(config) if config else CoordinatorConfig.load(overrides={"queue": queue})
    workers = copy.deepcopy(worker_config) if worker_config else WorkerConfig(queue=queue)
    if workers.queue != own.queue:
        raise ConfigError(
            f"FlowKitPlugin was given two queues, config.queue {own.queue!r} and worker_config.queue "
            f"{workers.queue!r}: roles belong to the queue of their engine"
        )
    return own, workers


def _complete_converter(existing: DataConverter | None) -> DataConverter:
    """Return the user's data converter with what FlowKit needs, or the configured one if the user gives none."""
    if existing is None or existing is DataConverter.default:
        return configured_converter()
    return complete_converter(existing)


def _make_runner(runner: temporal.WorkflowRunner | None) -> temporal.WorkflowRunner:
    runner = runner or SandboxedWorkflowRunner()
    if isinstance(runner, OrderedRunner):
        return runner
    if isinstance(runner, SandboxedWorkflowRunner):
        passed = runner.restrictions.with_passthrough_modules(*_PASSED_THROUGH, _PYTEST)
        runner = replace(runner, restrictions=passed)
    return OrderedRunner(runner)


async def _run_and_shut_down(
    worker: temporal.Worker, next: Callable[[temporal.Worker], Awaitable[None]]
) -> None:
    """Run a worker that shuts down at once: `shutdown` and `async with` would wait forever for one that never ran."""
    ending = asyncio.create_task(worker.shutdown())
    await asyncio.sleep(0)
    with suppress(Exception):
        await next(worker)
    await ending
