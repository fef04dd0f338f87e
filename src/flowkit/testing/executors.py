"""Runs the activities of a worker and of an engine in this process, without Temporal."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from temporalio.testing import ActivityEnvironment

from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.config import CoordinatorConfig
from flowkit.core.loop_portal import LoopPortal
from flowkit.engine.worker import (
    create_engine_activities,
    create_function_activities,
    make_settings,
    read_activity_name,
)
from flowkit.errors import ConfigError
from flowkit.models import ENGINE_TYPES
from flowkit.worker.runner import Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from flowkit.adapters.mongo import Database
    from flowkit.core.time import Clock
    from flowkit.models import FirstBatch, Graph, Settings, ShardStarted
    from flowkit.worker import RoleHandler

RUN = "test-run"
"""The run id that activities see in place of a workflow's run id."""


class LocalSignals:
    """Passes the signals of attempts to the task that runs in this process, in place of Temporal's client."""

    def __init__(self) -> None:
        self.receive: Callable[[FirstBatch | ShardStarted], None] = lambda record: None
        self.request_cancel: Callable[[str], None] = lambda reason: None

    def as_client(self) -> Any:
        """Return this object as the client of activities."""
        return self

    def get_workflow_handle(self, task_id: str, *, run_id: str | None = None) -> Any:
        """Return this object as the handle of the only task."""
        return self

    async def signal(
        self, name: str, record: FirstBatch | ShardStarted, *, rpc_timeout: object = None
    ) -> None:
        """Pass on the signal."""
        self.receive(record)

    async def cancel(self, *, reason: str = "", **options: object) -> None:
        """Request that the task stop."""
        self.request_cancel(reason)


@dataclass(frozen=True, kw_only=True)
class Executors:
    """The activities of an engine and of a worker. Errors are the ones that activities raise to Temporal."""

    settings: Settings
    signals: LocalSignals
    _engine: Mapping[str | None, Callable[..., Any]]
    _role: Callable[[str], Callable[..., Any]]

    def find(self, name: str, queue: str) -> Callable[..., Any]:
        """Return the activity with this name on a task queue; `""` stands for the engine itself."""
        own = {"", self.settings.queue, self.settings.function_queue}
        return self._engine[name] if queue in own else self._role(name)

    def environment(self, task_id: str, run_id: str, *, is_local: bool) -> ActivityEnvironment:
        """Return the environment in which an activity runs."""
        made = ActivityEnvironment(self.signals.as_client())
        made.info = replace(made.info, workflow_id=task_id, workflow_run_id=run_id, is_local=is_local)
        return made


@asynccontextmanager
async def executors(
    db: Database,
    graph: Graph,
    handlers: Sequence[RoleHandler],
    functions: Mapping[str, Any],
    clock: Clock,
) -> AsyncIterator[Executors]:
    """Yield the executors for `graph` over one database. Raise ConfigError if a role has no handler or two.

    Handlers see `clock` as `ctx.clock`.
    """
    worker = Worker(db=db, roles=_create_roles(graph), handlers=_group_by_role(handlers), clock=clock)
    tasks, config = TaskStore(db), CoordinatorConfig()
    await tasks.prepare()
    settings = make_settings(
        config, deployment=await tasks.deployment(), search_attributes=(), functions=functions
    )
    stores: dict[str, Any] = {
        "config": config,
        "tasks": tasks,
        "artifacts": ArtifactStore(db),
        "portal": LoopPortal(),
    }
    calls = create_function_activities(**stores, functions=functions, identity="test-engine")
    engine = create_engine_activities(**stores, settings=settings, calls=calls, by_name=True)
    by_name = {read_activity_name(each): each for each in engine}
    try:
        yield Executors(
            settings=settings,
            signals=LocalSignals(),
            _engine=by_name,
            _role=(await worker.open()).activity_for,
        )
    finally:
        await worker.stop()


def _create_roles(graph: Graph) -> list[str]:
    return list(dict.fromkeys(node.type for node in graph.nodes if node.type not in ENGINE_TYPES))


def _group_by_role(handlers: Sequence[RoleHandler]) -> dict[str, RoleHandler]:
    found: dict[str, RoleHandler] = {}
    for handler in handlers:
        if found.setdefault(handler.role, handler) is not handler:
            raise ConfigError(f"two handlers are for role {handler.role!r}: pass one of them")
    return found
