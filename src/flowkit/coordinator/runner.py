"""The Coordinator, which combines an engine and a client in one object (spec: Coordinator)."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import logging
import os
import socket
from typing import TYPE_CHECKING, Any, TypeVar

from flowkit import reason_codes
from flowkit.actions.records import (
    CHANGE_GRAPH,
    COMPLETE_NODE,
    DECIDE,
    FAIL_NODE,
    PAUSE,
    RESUME,
    RETRY_BATCHES,
    RETRY_NODE,
    SATISFY,
    SKIP_BATCHES,
    SKIP_NODE,
    TASK_SCOPE,
)
from flowkit.activities.builtin_functions import default_adapters
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.adapters.vars.store import Variables
from flowkit.attempt.background import Health, error_summary
from flowkit.backfills import Backfills
from flowkit.backfills.hosting import create_backfill_worker
from flowkit.client import TaskCatalog, TaskClient
from flowkit.client.tasks import cancel_reason
from flowkit.config import CoordinatorConfig
from flowkit.connection import InlineWorkers, WorkerThread, connect
from flowkit.coordinator.hosting import HostedRoles
from flowkit.core import version
from flowkit.core.time import SystemClock
from flowkit.engine.worker import (
    EngineParts,
    check_functions,
    prepare_settings,
)
from flowkit.errors import Removed
from flowkit.protocol.messages import (
    Envelope,
    EventKind,
    EvHeartbeat,
    EvTaskFailed,
    MsgType,
    Role,
    RunState,
)
from flowkit.schedules import Schedules
from flowkit.text import clean
from flowkit.validation.arguments import (
    check_wait,
    client_problem,
    clock_problem,
    database_problem,
    functions_problem,
    handlers_problem,
    require,
    roles_problem,
    settings_problem,
    task_id_problem,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

    from temporalio.client import Client

    from flowkit.activities.handlers import RoleHandler
    from flowkit.bridge.service import Bridge
    from flowkit.client import TaskSummary
    from flowkit.connection import Service
    from flowkit.core.loop_portal import LoopPortal
    from flowkit.models import Settings, TaskResult, TaskStatus
    from flowkit.models.admission import Admission


class RemovedAttributes:
    """Raises `Removed` for attributes that earlier releases had."""

    @property
    def bus(self) -> Any:
        """Removed. Raise `Removed`, an AttributeError, so that `hasattr` returns False."""
        raise Removed(
            "Coordinator.bus was removed: engines and workers communicate through Temporal. Omit it; to exchange Kafka "
            "messages with external workers, use the models in flowkit.protocol.messages and a Kafka client"
        )

    @property
    def outbox(self) -> Any:
        """Removed. Raise `Removed`, an AttributeError, so that `hasattr` returns False."""
        raise Removed(
            "Coordinator.outbox was removed: Temporal workflows now dispatch attempts durably. Omit it; you "
            "do not need a replacement"
        )


__all__ = [
    "Coordinator",
    "CoordinatorConfig",
    "Envelope",
    "EvHeartbeat",
    "EvTaskFailed",
    "EventKind",
    "MsgType",
    "Role",
    "RunState",
]

_logger = logging.getLogger("flowkit.engine.worker")

T = TypeVar("T")


class Coordinator(RemovedAttributes):
    """An engine and a client in one object. Between `start` and `stop` it runs tasks; a client needs no `start`.

    Any number of coordinators can run in parallel.

    `db` is a Motor database, or one with the same interface. The coordinator copies `cfg`; the default is
    `CoordinatorConfig.load()`. `client` is a Temporal client with `pydantic_data_converter`; without it, the
    coordinator connects as `TEMPORAL_*` specifies.

    `adapters` maps names to coordinator functions, `async def fn(task_id, **fn_args)`, in addition to the built-in
    ones. To add a function later, set `coordinator.adapters[name] = fn`. `clock` provides the times that functions
    write. `sensitive_detector` decides which variables look like secrets.

    `handlers` maps roles to handlers that the engine hosts: it serves these roles as a worker does, and runs the
    attempts of handlers with `inline = True` as local activities. They run on the event loop that calls `start`.

    Temporal's worker runs on a separate thread, so your code may block this event loop. `own_thread=False` is faster
    if nothing blocks the loop; handlers could, so they need the thread.
    """

    def __init__(
        self,
        *,
        db: Any,
        cfg: CoordinatorConfig | None = None,
        worker_types: list[str] | None = None,
        clock: Any = None,
        adapters: dict[str, Any] | None = None,
        sensitive_detector: Any = None,
        client: Client | None = None,
        own_thread: bool = True,
        handlers: dict[str, RoleHandler] | None = None,
    ) -> None:
        require(
            database_problem(db), clock_problem(clock), client_problem(client), handlers_problem(handlers)
        )
        require(settings_problem(cfg, "cfg", CoordinatorConfig), roles_problem(worker_types, "worker_types"))
        require(functions_problem(adapters or {}, "adapters"))
        self.db = db
        self.cfg = copy.deepcopy(cfg) if cfg is not None else CoordinatorConfig.load()
        if worker_types is not None:
            self.cfg = dataclasses.replace(self.cfg, worker_types=list(worker_types))
        self.clock = clock if clock is not None else SystemClock()
        own = default_adapters(db=db, clock=self.clock, detector=sensitive_detector)
        check_functions(adapters or {})
        self.adapters: dict[str, Any] = {**own, **(adapters or {})}
        self.log = _logger
        self._given_client = client
        self._tasks = TaskStore(db)
        self._artifacts = ArtifactStore(db)
        self._client: TaskClient | None = None
        self._own_thread = own_thread
        self._hosted = HostedRoles(
            db=db, cfg=self.cfg, handlers=handlers or {}, clock=self.clock, own_thread=own_thread
        )
        self._thread: WorkerThread | InlineWorkers | None = None
        self._parts: EngineParts | None = None
        self._bridge: Bridge | None = None

    @property
    def _running(self) -> bool:
        """Whether this coordinator is running tasks. The documented health check reads it."""
        return self._thread is not None and self._thread.alive

    def health(self) -> Health:
        """Return the state of the engine, of its background loops and of its bridge. Contacts no server."""
        error = self._thread.error if self._thread is not None else None
        bridge = self._bridge
        return Health(
            running=self._running,
            error=None if error is None else error_summary(error),
            loops=(
                *(() if self._parts is None else self._parts.health),
                *self._hosted.loops,
                *(() if bridge is None else bridge.loops),
            ),
            bridge=None if bridge is None else bridge.health(),
        )

    async def start(self) -> None:
        """Connect, create the indexes and start running tasks. If an error is raised, nothing is left running."""
        if self._running:
            return
        if self._thread is not None:
            await self.stop()
        client = await self._connect()
        settings = await prepare_settings(
            client,
            config=self.cfg,
            tasks=self._tasks,
            artifacts=self._artifacts,
            functions=self.adapters,
            inline_roles=self._hosted.inline_roles,
        )
        try:
            await self._hosted.open(client.namespace)
            await self._run(client, settings)
        except BaseException:
            await self._hosted.stop()
            raise
        self.log.info("engine %s runs tasks of queue %r", version.__version__, self.cfg.queue)

    async def _connect(self) -> Client:
        client = self._given_client or await connect()
        self._client = TaskClient(
            client,
            self._tasks,
            queue=self.cfg.queue,
            max_nodes=self.cfg.max_nodes,
            external_roles=self.cfg.worker_types,
        )
        return client

    async def _run(self, client: Client, settings: Settings) -> None:
        parts = await EngineParts.connect(
            client,
            config=self.cfg,
            tasks=self._tasks,
            artifacts=self._artifacts,
            functions=self.adapters,
            identity=clean(f"engine-{os.getpid()}@{socket.gethostname()}"),
        )
        tasks = await self._task_client()

        def build() -> list[Service]:
            bridge = self._new_bridge(client, settings, parts.portal)
            workers = parts.workers(client, settings, self._hosted.local_activity)
            backfills = create_backfill_worker(
                client,
                db=self.db,
                tasks=tasks,
                portal=parts.portal,
                queue=self.cfg.queue,
                identity=parts.identity,
            )
            return [
                *workers,
                backfills,
                *self._hosted.pollers(client),
                *([bridge] if bridge is not None else []),
            ]

        thread = WorkerThread("flowkit-engine", build) if self._own_thread else InlineWorkers(build)
        await thread.start()
        self._thread, self._parts = thread, parts
        parts.start(Schedules(client, tasks, queue=self.cfg.queue).count_taken)

    def _new_bridge(self, client: Client, settings: Settings, portal: LoopPortal) -> Bridge | None:
        """Return the bridge to the external workers of `worker_types`, or None if there are none."""
        if not self.cfg.worker_types:
            return None
        from flowkit.bridge.service import Bridge

        self._bridge = Bridge(
            client,
            config=self.cfg,
            roles=self.cfg.worker_types,
            tasks=self._tasks,
            artifacts=self._artifacts,
            portal=portal,
            deployment=settings.deployment,
        )
        return self._bridge

    async def stop(self) -> None:
        """Stop running tasks. They continue where they stopped once an engine is running again."""
        thread, self._thread = self._thread, None
        self._bridge = None
        parts = self._parts
        if parts is not None:
            await parts.stop_loops()
        if thread is not None:
            await thread.stop()
        try:
            await asyncio.gather(self._hosted.stop(), *([] if parts is None else [parts.calls.close()]))
        finally:
            if parts is not None:
                await parts.stop_lines()
        self._parts = None

    async def restart(self) -> None:
        """Stop and start again."""
        await self.stop()
        await self.start()

    async def wait_stopped(self) -> None:
        """Wait until the engine ends on its own, and raise the error that ended it, if any."""
        if self._thread is not None:
            await asyncio.shield(self._thread.failed)

    async def create_task(
        self,
        *,
        params: dict[str, Any],
        graph: dict[str, Any],
        task_id: str | None = None,
        admit: Admission | None = None,
    ) -> str:
        """Start a task and return its id. Raise GraphError (a ValueError) if graph, params or id is invalid.

        If a task with this id runs or has finished, leave it unchanged. Raise TaskIdTaken, which names what differs, if
        it started with other params or another graph.

        With `admit`, submit the task to the admission queue instead (docs/admission.md): a process of
        `flowkit admission run` starts it when it is its turn. Raise AdmissionRejected if a limit is reached.

        This method checks the names of coordinator functions only while this coordinator is running. The engine that
        opens the task always checks them.
        """
        client = await self._task_client()
        functions = self.adapters.keys() if self._running else None
        if admit is not None:
            return await client.submit_task(
                admit, params=params, graph=graph, task_id=task_id, functions=functions
            )
        return await client.create_task(params=params, graph=graph, task_id=task_id, functions=functions)

    async def backfills(self) -> Backfills:
        """Return the backfills of this deployment, which start tasks of its schedules for past nominal times."""
        tasks = await self._task_client()
        schedules = await self.schedules()
        return Backfills(tasks.temporal, tasks, schedules, queue=self.cfg.queue)

    async def schedules(self) -> Schedules:
        """Return the schedules of this deployment, which start tasks on the queue of this coordinator."""
        tasks = await self._task_client()
        return Schedules(tasks.temporal, tasks, queue=self.cfg.queue)

    async def cancel_task(self, task_id: str, *, reason: str = reason_codes.USER_REQUEST) -> bool:
        """Request that a task stop, without waiting for it. Return False if it has ended or does not exist.

        A task that waits for admission then ends without starting. FlowKit stores `reason` in the task
        document and cuts it to 1,000 characters.
        """
        require(task_id_problem(task_id))
        why = cancel_reason(reason)
        return await (await self._task_client()).cancel_task(task_id, reason=why)

    async def cascade_cancel(self, task_id: str, reason: str = reason_codes.USER_REQUEST) -> bool:
        """Alias of `cancel_task`."""
        return await self.cancel_task(task_id, reason=reason)

    async def pause(
        self,
        task_id: str,
        scopes: Sequence[str] = (TASK_SCOPE,),
        *,
        interrupt: bool = False,
        reason: str = "",
        by: str = "",
        if_revision: int | None = None,
        if_state: str | None = None,
    ) -> dict[str, Any]:
        """Start nothing new in scopes of a running task: `task`, `node:ID`, `below:ID` or `role:NAME`.

        Attempts that run finish, or stop with `interrupt` and run again after the pause, which uses no retry. Deadlines
        and waits for retries of paused nodes stand still.

        All actions take the `revision` and the `state` of a `preview` as `if_revision` and `if_state`. The task then
        rejects the action if another one was applied meanwhile, or if a node that it affects has started or ended.

        Return `{"revision": …, "affected": [{"node_id", "from", "to"}], "notes": […]}`. Raise
        ActionRejected, which says what is allowed, if the task rejects the action or has ended, and
        UnknownTask if it does not exist.
        """
        given = {"scopes": [*scopes], "interrupt": interrupt}
        return await self._act(
            task_id, PAUSE, given, reason=reason, by=by, if_revision=if_revision, if_state=if_state
        )

    async def resume(
        self,
        task_id: str,
        scopes: Sequence[str] = (),
        *,
        reason: str = "",
        by: str = "",
        if_revision: int | None = None,
        if_state: str | None = None,
    ) -> dict[str, Any]:
        """End the pause of these scopes of a task, or of all if none is given. Otherwise the same as `pause`."""
        given = {"scopes": [*scopes]}
        return await self._act(
            task_id, RESUME, given, reason=reason, by=by, if_revision=if_revision, if_state=if_state
        )

    async def rerun(
        self,
        task_id: str,
        nodes: Sequence[str] | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Mapping[str, Any]] | None = None,
        failed_batches_of: Sequence[str] = (),
        reason: str = "",
        by: str = "",
        if_state: str | None = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Start an ended task again: `nodes` and what depends on them, in a new run with the same task id.

        By default, the nodes start that failed, were cancelled, or were skipped for a failure or the end of the task.
        Finished nodes, their artifacts and the variables stay. `params` replaces single params, and
        `inputs` single keys of the `input_inline` of nodes, by node id. The nodes in `failed_batches_of`
        also start; they keep their batches, and try those again that they have set aside. `nodes` is then
        empty by default. The task is read from MongoDB, so Temporal need not know it any more.

        Return `{"task_id", "run_seq", "affected": [{"node_id", "from", "to"}], "notes"}`; with `dry_run`,
        start nothing, and return the `state` of these nodes, too. Raise ActionRejected if the task has not ended,
        nothing would start, or the state is not `if_state`, UnknownTask if MongoDB has no document of the task in
        this namespace, and GraphError if the changed params are not valid.
        """
        require(task_id_problem(task_id))
        return await (await self._task_client()).steering.rerun(
            task_id,
            nodes,
            params=params,
            inputs=inputs,
            failed_batches_of=failed_batches_of,
            reason=reason,
            by=by,
            if_state=if_state,
            dry_run=dry_run,
        )

    async def retry_node(
        self,
        task_id: str,
        node_id: str,
        *,
        input_inline: dict[str, Any] | None = None,
        input_ref: dict[str, Any] | None = None,
        timeout_sec: float | None = None,
        retry_policy: dict[str, Any] | None = None,
        interrupt: bool = False,
        reason: str = "",
        by: str = "",
        if_revision: int | None = None,
        if_state: str | None = None,
    ) -> dict[str, Any]:
        """Start a node again, or end its wait for a retry. What has used its results runs again, too.

        A node that has ended or is held starts a new generation, with a new retry budget; so does one that runs, with
        `interrupt`. A node that waits for a retry starts its next attempt now, and keeps its generation, batches and
        budget; with changed fields or `interrupt`, it starts a new generation.

        `input_inline` and `retry_policy` replace single keys of the node's own ones, and None as the value of a key of
        `input_inline` removes it. `input_ref` and `timeout_sec` replace the whole value. The changes stay for later
        attempts. `interrupt` stops the attempt of the node and of descendants that run; without it, the
        task rejects the action while one runs.

        Return the result of `pause`, and raise its errors.
        """
        changes = {
            "input_inline": input_inline,
            "input_ref": input_ref,
            "timeout_sec": timeout_sec,
            "retry_policy": retry_policy,
        }
        given = {"node_id": node_id, "interrupt": interrupt, **changes}
        return await self._act(
            task_id, RETRY_NODE, given, reason=reason, by=by, if_revision=if_revision, if_state=if_state
        )

    async def skip_node(
        self,
        task_id: str,
        node_id: str,
        *,
        interrupt: bool = False,
        reason: str = "",
        by: str = "",
        if_revision: int | None = None,
        if_state: str | None = None,
    ) -> dict[str, Any]:
        """End a node as `skipped`, with the `skip_reason` `user`. Children that need only other parents still start.

        `interrupt` stops its attempt, and those of descendants that have to start again; without it, the task rejects
        the action while one runs. Return the result of `pause`, and raise its errors.
        """
        given = {"node_id": node_id, "interrupt": interrupt}
        return await self._act(
            task_id, SKIP_NODE, given, reason=reason, by=by, if_revision=if_revision, if_state=if_state
        )

    async def complete_node(
        self,
        task_id: str,
        node_id: str,
        *,
        metrics: dict[str, Any] | None = None,
        artifacts_ref: dict[str, Any] | None = None,
        batches: Sequence[dict[str, Any]] = (),
        interrupt: bool = False,
        reason: str = "",
        by: str = "",
        if_revision: int | None = None,
        if_state: str | None = None,
    ) -> dict[str, Any]:
        """End a node as `finished`, with results that you provide.

        `metrics` and `artifacts_ref` are its final results. `batches` are what nodes that pull from it find: objects
        with `batch_uid`, `metrics` and optionally `artifacts_ref`. `interrupt` is that of `skip_node`.

        Return the result of `pause`, and raise its errors.
        """
        results = {"metrics": metrics, "artifacts_ref": artifacts_ref, "batches": [*batches] or None}
        given = {"node_id": node_id, "interrupt": interrupt, **results}
        return await self._act(
            task_id, COMPLETE_NODE, given, reason=reason, by=by, if_revision=if_revision, if_state=if_state
        )

    async def fail_node(
        self,
        task_id: str,
        node_id: str,
        *,
        interrupt: bool = False,
        reason: str = "",
        by: str = "",
        if_revision: int | None = None,
        if_state: str | None = None,
    ) -> dict[str, Any]:
        """End a node as `failed`. `allow_failure`, `routing.on_failure` and `on_node_failure` apply as to any failure.

        `interrupt` is that of `skip_node`. Return the result of `pause`, and raise its errors.
        """
        given = {"node_id": node_id, "interrupt": interrupt}
        return await self._act(
            task_id, FAIL_NODE, given, reason=reason, by=by, if_revision=if_revision, if_state=if_state
        )

    async def retry_batches(
        self,
        task_id: str,
        node_id: str,
        batch_uids: Sequence[str] = (),
        *,
        interrupt: bool = False,
        reason: str = "",
        by: str = "",
        if_revision: int | None = None,
        if_state: str | None = None,
    ) -> dict[str, Any]:
        """Run a node again that has finished or failed, or is held, to try batches again that it has set aside.

        The node keeps its other batches, and a handler that makes its own batches processes all of them again. Without
        `batch_uids`, all batches are tried that are set aside and not skipped. What has used results of the node runs
        again, too. `interrupt` stops descendants that run; without it, the task rejects the action while one runs.

        Return the result of `pause`, and raise its errors.
        """
        given = {"node_id": node_id, "batch_uids": [*batch_uids], "interrupt": interrupt}
        return await self._act(
            task_id, RETRY_BATCHES, given, reason=reason, by=by, if_revision=if_revision, if_state=if_state
        )

    async def skip_batches(
        self,
        task_id: str,
        node_id: str,
        batch_uids: Sequence[str] = (),
        *,
        interrupt: bool = False,
        reason: str = "",
        by: str = "",
        if_revision: int | None = None,
        if_state: str | None = None,
    ) -> dict[str, Any]:
        """Accept that batches are missing that a node has set aside: these, or all. They no longer count as failed.

        A node that has failed, or is held, runs again without them, and keeps its other batches. `interrupt` is that of
        `retry_batches`. Return the result of `pause`, and raise its errors.
        """
        given = {"node_id": node_id, "batch_uids": [*batch_uids], "interrupt": interrupt}
        return await self._act(
            task_id, SKIP_BATCHES, given, reason=reason, by=by, if_revision=if_revision, if_state=if_state
        )

    async def decide(
        self,
        task_id: str,
        node_id: str,
        decision: str,
        *,
        comment: str = "",
        reason: str = "",
        by: str = "",
        if_revision: int | None = None,
        if_state: str | None = None,
    ) -> dict[str, Any]:
        """Decide at a node of the type `approval`: `approve` finishes it, `reject` fails it as `rejected`.

        `comment` becomes part of the error of a rejected node. Return the result of `pause`, and raise its errors.
        """
        given = {"node_id": node_id, "decision": decision, "comment": comment}
        return await self._act(
            task_id, DECIDE, given, reason=reason, by=by, if_revision=if_revision, if_state=if_state
        )

    async def satisfy(
        self,
        task_id: str,
        prerequisite: str,
        *,
        reason: str = "",
        by: str = "",
        if_revision: int | None = None,
        if_state: str | None = None,
    ) -> dict[str, Any]:
        """Satisfy a prerequisite, for all nodes of the task that name it, also those that it has not reached yet.

        Return the result of `pause`, and raise its errors.
        """
        given = {"prerequisite": prerequisite}
        return await self._act(
            task_id, SATISFY, given, reason=reason, by=by, if_revision=if_revision, if_state=if_state
        )

    async def change_graph(
        self,
        task_id: str,
        *,
        nodes: Sequence[dict[str, Any]] = (),
        edges: Sequence[Sequence[str]] = (),
        edges_ex: Sequence[dict[str, Any]] = (),
        changes: Mapping[str, dict[str, Any]] | None = None,
        reason: str = "",
        by: str = "",
        if_revision: int | None = None,
        if_state: str | None = None,
    ) -> dict[str, Any]:
        """Add nodes to the graph of a running task, and change nodes that have not started.

        `nodes`, `edges` and `edges_ex` have the form that they have in a graph; edges lead to new nodes.
        `changes` holds, by node id, a JSON merge patch (RFC 7396) with `io`, `retry_policy`, `timeout_sec`,
        `deadline_sec` or `when`: nested objects are merged, and None removes a key. The whole graph is
        validated as that of a new task, and all of the change is made or nothing.

        Return the result of `pause`, and raise its errors.
        """
        added = {"nodes": [*nodes], "edges": [[*each] for each in edges], "edges_ex": [*edges_ex]}
        given = {name: value for name, value in {**added, "changes": {**(changes or {})}}.items() if value}
        return await self._act(
            task_id, CHANGE_GRAPH, given, reason=reason, by=by, if_revision=if_revision, if_state=if_state
        )

    async def preview(self, task_id: str, action: str, **given: Any) -> dict[str, Any]:
        """Return what an action would affect, for example `preview(task_id, "pause", scopes=["role:index"])`.

        The result has the form of that of `pause`, with the `state` of the affected nodes; nothing changes. Raise the
        errors that the action would raise.
        """
        require(task_id_problem(task_id))
        return await (await self._task_client()).steering.preview(task_id, action, given)

    async def _act(self, task_id: str, name: str, given: dict[str, Any], **more: Any) -> dict[str, Any]:
        require(task_id_problem(task_id))
        known = {key: value for key, value in {**given, **more}.items() if value is not None}
        return await (await self._task_client()).steering.act(task_id, name, known)

    def result(self, task_id: str, timeout: float | None = None) -> Coroutine[Any, Any, TaskResult]:
        """Wait up to `timeout` seconds for a task to end, and return its result.

        Raise TaskFailed or TaskCancelled if the task ended that way, UnknownTask if it does not exist, and
        TaskStillOpen (a TimeoutError) if it is still running. Import these errors from `flowkit.client`. Any client
        may have started the task.
        """
        return self._with_client(task_id, timeout, lambda client: client.result(task_id, timeout))

    def wait(self, task_id: str, timeout: float | None = None) -> Coroutine[Any, Any, TaskStatus]:
        """Wait up to `timeout` seconds for a task to end, and return its final status.

        A failed or cancelled task raises no error. Raise UnknownTask if the task does not exist, and
        TaskStillOpen (a TimeoutError) if it is still running.
        """
        return self._with_client(task_id, timeout, lambda client: client.wait(task_id, timeout))

    async def list_tasks(
        self, status: str | None = None, limit: int = 50, *, waits: str | None = None
    ) -> list[TaskSummary]:
        """Return up to `limit` tasks from MongoDB, newest first: those with `status`, or all if it is None.

        With `waits`, return only tasks with a node that waits for a `decision` of a person, about a held failure or an
        approval, or for an `event`: prerequisites that are not satisfied.

        Raise ConfigError for an unknown status, an unknown wait or a limit outside 1 to 10,000, and StoreUnavailable if
        MongoDB does not respond. Does not need Temporal.
        """
        return await TaskCatalog(self.db).list_tasks(status, limit, waits=waits)

    async def vars(self, task_id: str) -> dict[str, Any]:
        """Return the variables of a task, or `{}` if it has none. Does not need Temporal.

        Raise AdapterError for an unknown task, and StoreUnavailable if MongoDB does not respond.
        """
        return await Variables(self._tasks).read(task_id)

    async def _with_client(
        self, task_id: str, seconds: float | None, call: Callable[[TaskClient], Awaitable[T]]
    ) -> T:
        check_wait(task_id, seconds)
        return await call(await self._task_client())

    async def _task_client(self) -> TaskClient:
        """Return the task client. Connect first if necessary: it works before `start` and after `stop`, too."""
        if self._client is None:
            await self._connect()
        assert self._client is not None
        return self._client
