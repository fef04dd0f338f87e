"""Runs the activities of a worker and of an engine in this process, without Temporal."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from temporalio.testing import ActivityEnvironment

from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.config import CoordinatorConfig
from flowkit.engine.worker import (
    EngineParts,
    make_settings,
    read_activity_name,
)
from flowkit.errors import ConfigError
from flowkit.models import ENGINE_TYPES, AttemptInput, CloseTask, NodeStatus, RecordTask
from flowkit.worker.runner import Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from flowkit.adapters.mongo import Database
    from flowkit.core.time import Clock
    from flowkit.models import FirstBatch, Graph, NodeRecord, Settings, ShardStarted
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


class Trace:
    """When nodes begin and end, oldest first: the id of a node, and `begins` or `ends`, which an attempt does."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self._ended: set[str] = set()

    @contextmanager
    def call(self, given: object) -> Iterator[None]:
        """Note what the input of an activity says: that an attempt runs, or that nodes without attempts have ended."""
        if isinstance(given, AttemptInput):
            self.events.append((given.node_id, "begins"))
            try:
                yield
            finally:
                self.events.append((given.node_id, "ends"))
            return
        if isinstance(given, RecordTask | CloseTask):
            self._note_ends(given.nodes)
        yield

    def _note_ends(self, records: Iterable[NodeRecord]) -> None:
        for each in records:
            if each.epoch == 0 and each.status is NodeStatus.FINISHED and each.node_id not in self._ended:
                self._ended.add(each.node_id)
                self.events += [(each.node_id, "begins"), (each.node_id, "ends")]


@dataclass(frozen=True, kw_only=True)
class Executors:
    """The activities of an engine and of a worker. Errors are the ones that activities raise to Temporal."""

    settings: Settings
    signals: LocalSignals
    trace: Trace
    _engine: Mapping[str | None, Callable[..., Any]]
    _role: Callable[[str], Callable[..., Any]]
    _roles: Collection[str]

    def find(self, name: str, queue: str) -> Callable[..., Any]:
        """Return the activity with this name on a task queue; `""` stands for the engine itself."""
        own = {"", self.settings.queue, self.settings.function_queue}
        if queue in own:
            return self._engine[name]
        if name not in self._roles:
            raise ConfigError(
                f"no handler for role {name!r}, which a change of the graph has added: pass one"
            )
        return self._role(name)

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
    by_role = _group_by_role(handlers)
    worker = Worker(
        db=db, roles=[*{**dict.fromkeys(_list_roles(graph)), **by_role}], handlers=by_role, clock=clock
    )
    worker.versions = dict.fromkeys(
        worker.versions, ""
    )  # Errors then name no worker, so that tests can compare them.
    tasks, config = TaskStore(db), CoordinatorConfig()
    await tasks.prepare()
    settings = make_settings(
        config, deployment=await tasks.deployment(), search_attributes=(), functions=functions
    )
    parts = EngineParts(
        config=config,
        tasks=tasks,
        artifacts=ArtifactStore(db),
        functions=functions,
        identity="test-engine",
    )
    engine = parts.activities(settings, by_name=True)
    by_name = {read_activity_name(each): each for each in engine}
    try:
        yield Executors(
            settings=settings,
            signals=LocalSignals(),
            trace=Trace(),
            _engine=by_name,
            _role=(await worker.open()).activity_for,
            _roles=worker.roles,
        )
    finally:
        await worker.stop()


def _list_roles(graph: Graph) -> list[str]:
    return list(dict.fromkeys(node.type for node in graph.nodes if node.type not in ENGINE_TYPES))


def _group_by_role(handlers: Sequence[RoleHandler]) -> dict[str, RoleHandler]:
    found: dict[str, RoleHandler] = {}
    for handler in handlers:
        if found.setdefault(handler.role, handler) is not handler:
            raise ConfigError(f"two handlers are for role {handler.role!r}: pass one of them")
    return found
