"""The context of a handler in a unit test: the one that handlers get, over a database in memory."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any, Self

from flowkit.activities.builtin_functions import CoordinatorAdapters
from flowkit.activities.context import ArtifactsWriter, RunContext, TaskVariables
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.attempts import StoredParams
from flowkit.adapters.tasks.store import TaskStore
from flowkit.attempt.storage import begin
from flowkit.core.time import ManualClock
from flowkit.graph.scheduled import format_nominal
from flowkit.graph.submission import convert_to_json
from flowkit.models import AttemptInput, NodeIO, OpenTask
from flowkit.testing.memory import memory_database

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from types import TracebackType

    from flowkit.adapters.mongo import Database

_RUN, _WORKER = "test-run", "test-worker"


class HandlerContext(RunContext):
    """A RunContext without a worker. `async with` it, or await `release()`, to run the clean-ups of the handler.

    Its variables and artifacts are those of a task in the database `db`, with the checks of a real one. To let the
    handler see a cancel request, call `cancel("reason", grace_sec=30)`. Waits on `clock` take no time.
    """

    clock: ManualClock

    def __init__(self, document: _ContextDocument) -> None:
        attempt = document.attempt
        super().__init__(
            attempt=attempt,
            worker_id=_WORKER,
            artifacts=ArtifactsWriter(ArtifactStore(document.db), attempt, _WORKER),
            tasks=document.tasks,
            run_id=_RUN,
            clock=ManualClock(int(time.time() * 1000)),
        )
        self.begun(StoredParams(stored=document.params, scheduled_at=document.scheduled_at), attempt)
        self.vars = _Variables(document)
        self.db = document.db
        """The database with the variables and artifacts of the task."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()


def handler_context(
    *,
    params: Mapping[str, Any] | None = None,
    input_inline: Mapping[str, Any] | None = None,
    input_ref: Mapping[str, Any] | None = None,
    vars: Mapping[str, Any] | None = None,
    task_id: str | None = None,
    node_id: str = "node",
    attempt_epoch: int = 1,
    db: Database | None = None,
    scheduled_at: datetime | None = None,
) -> HandlerContext:
    """Return a context for a unit test of one handler, as if a worker ran it in a task with one node.

    `vars` are the variables of the task when the attempt begins. `db` is by default a new `memory_database()`.
    `scheduled_at`, with a time zone, is the nominal time of a task that a schedule has started. Raise GraphError for
    params or an input that JSON cannot hold.
    """
    given = [
        convert_to_json(name, dict(value)) if value is not None else None
        for name, value in (("params", params), ("input_inline", input_inline), ("input_ref", input_ref))
    ]
    attempt = AttemptInput(
        task_id=task_id or str(uuid.uuid4()),
        node_id=node_id,
        index=0,
        role="test",
        epoch=attempt_epoch,
        io=NodeIO(input_inline=given[1], input_ref=given[2]),
    )
    database = memory_database() if db is None else db
    nominal = None if scheduled_at is None else format_nominal(scheduled_at)
    return HandlerContext(_ContextDocument(database, attempt, given[0] or {}, dict(vars or {}), nominal))


class _ContextDocument:
    """The document of the task. It is written before the first use of a variable, because that is asynchronous."""

    def __init__(
        self,
        db: Database,
        attempt: AttemptInput,
        params: dict[str, Any],
        variables: dict[str, Any],
        scheduled_at: str | None,
    ) -> None:
        self.scheduled_at = scheduled_at
        self.db, self.attempt, self.params = db, attempt, params
        self.tasks = TaskStore(db)
        self._variables = variables
        self._turn = asyncio.Lock()
        self._is_open = False

    async def open(self) -> None:
        """Write the document with the variables, and begin the attempt, unless that has been done."""
        async with self._turn:
            if not self._is_open:
                await self._open()
                self._is_open = True

    async def _open(self) -> None:
        own, now = self.attempt, time.time()
        await self.tasks.prepare()
        graph = {"nodes": [{"node_id": own.node_id, "type": own.role}]}
        await self.tasks.open_task(
            OpenTask(
                task_id=own.task_id, first_run_id=_RUN, run_id=_RUN, at=now, graph=graph, params=self.params
            )
        )
        if self._variables:
            await CoordinatorAdapters(db=self.db).vars_set(own.task_id, kv=self._variables)
        await begin(self.tasks, ArtifactStore(self.db), own, _RUN, _WORKER)


class _Variables(TaskVariables):
    """The variables of the task, whose document is written before their first use."""

    def __init__(self, document: _ContextDocument) -> None:
        super().__init__(document.tasks, document.attempt, _RUN)
        self._document = document

    async def __call__(self) -> dict[str, Any]:
        """Return all current variables, or `{}` if the task has none."""
        await self._document.open()
        return await super().__call__()

    async def _change(self, method: str, **given: Any) -> None:
        await self._document.open()
        await super()._change(method, **given)
