"""The methods of the gateway. A flow is a FlowKit task, so starts, cancels and retries are those of the task client."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from cachetools import TTLCache
from temporalio.exceptions import TemporalError

from flowkit import reason_codes
from flowkit.actions.records import CHANGE_GRAPH, SATISFY
from flowkit.attempt.workflows import WorkflowState
from flowkit.connection import TemporalUnavailable
from flowkit.core.utils import Fields, dumps, same_json
from flowkit.errors import (
    ActionRejected,
    ActionUnanswered,
    ChecksBusy,
    ConfigError,
    GraphError,
    RejectionCause,
    StoreUnavailable,
    TaskIdTaken,
    UnknownTask,
)
from flowkit.gateway import models
from flowkit.gateway.destinations import parse_destination
from flowkit.gateway.events import FlowEvents
from flowkit.gateway.flows import (
    RESULT_UID,
    LatestRun,
    address_of,
    addresses_of,
    all_nodes,
    job_limits,
    new_task_id,
    read_latest,
    reopens,
    run_id,
    task_graph,
    task_node,
)
from flowkit.gateway.models import (
    FlowNode,
    FlowStatus,
    JobResult,
    MessageStatus,
    NodeStatus,
    NodeView,
    TransportStatus,
)
from flowkit.gateway.permissions import may_call, parts_of, right_for
from flowkit.gateway.secret_box import MASK, SecretBox, SecretError, masked
from flowkit.gateway.status import (
    Cycle,
    FlowRun,
    TaskNode,
    UnknownDependency,
    check_dag,
    flow_cause,
    flow_status,
    levels,
    node_states,
    waiting_on,
)
from flowkit.gateway.store import ACTORS, CONTEXTS, FLOWS, JOBS, MESSAGES, RUNNERS, Listing, key
from flowkit.gateway.transports import SupervisorError
from flowkit.models import NodeStatus as TaskNodeStatus
from flowkit.models import TaskStatus
from flowkit.models.ownership import task_owner
from flowkit.server.connection import MAX_SUBSCRIPTIONS
from flowkit.server.rpc import (
    AlreadyExists,
    DagCycle,
    DagMissingDependency,
    InvalidParams,
    InvalidTransition,
    LimitExceeded,
    Method,
    NotFound,
    PermissionDenied,
    StorageError,
    SupervisorTimeout,
    SupervisorUnreachable,
)
from flowkit.text import one_line, shown_address, truncate

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pydantic import BaseModel

    from flowkit.client import TaskClient
    from flowkit.gateway.delivery import RemoteSupervisors
    from flowkit.gateway.store import FlowStore
    from flowkit.server.rpc import Call

_CONTEXT_SEC: Final = 2.0
"""How long a gateway may use a context that it has read. Changes of its lists take effect within this time."""
_CONTEXTS: Final = 1_000
_ENGINE_SEC: Final = 30.0
"""How long an action waits for an engine."""
_BUSY_SEC: Final = 0.2
"""The pause before an action is sent again to a task that applies another one."""
_NAMED: Final = 20
"""How many flows an error names."""
_ERRORS_CHARS: Final = 2_000_000
"""How many characters the errors in one state of a flow have together. Many errors are truncated."""
_TRIES: Final = 10
"""How often a change of a flow is tried that other calls change at the same time."""

_STARTING_SEC: Final = 60.0
"""How long a start or a retry that was interrupted counts as a run. The next start of the flow completes
such a start."""

_NOT_RETRYING: Final[Fields] = {"retrying_at": None, "retrying": None}
"""The fields of a flow that no retry is about to start again."""

_UNOPENED_SEC: Final = 86_400.0
"""How long a list asks Temporal for a run without a document: no engine has opened it yet, or it was deleted."""

_Function = Callable[[Any, Any], Awaitable[Any]]


class FlowRunState(Enum):
    """Whether the latest run of a flow is open."""

    NONE = "none"
    """The flow has not started since it was created."""
    OPEN = "open"
    ENDED = "ended"
    ABSENT = "absent"
    """The flow names a task, but there is none: its start was interrupted, or it was deleted long after its end."""


class Gateway:
    """The methods of the gateway. Any number of gateways can run in parallel."""

    def __init__(
        self,
        store: FlowStore,
        tasks: TaskClient,
        supervisors: RemoteSupervisors,
        secrets: SecretBox,
    ) -> None:
        self._store = store
        self._tasks = tasks
        self._supervisors = supervisors
        self._secrets = secrets
        self._contexts: TTLCache[int, Fields] = TTLCache(_CONTEXTS, _CONTEXT_SEC)
        self.events = FlowEvents(store)

    # --- actors and contexts

    async def actor_create(self, call: Call, params: models.ActorCreate) -> models.Actor:
        """Create an actor, or replace it."""
        return _actor(await self._store.put(ACTORS, params.actor.id, params.actor.model_dump(), time.time()))

    async def actor_load(self, call: Call, params: models.ById) -> models.Actor:
        """Return an actor."""
        return _actor(await self._find(ACTORS, params.id, "actor", id=params.id))

    async def actor_list(self, call: Call, params: models.Page) -> models.Actors:
        """List the actors, in the order of their ids."""
        found = await self._store.listing(ACTORS, {}, after=params.after, limit=params.limit, by="_id")
        return models.Actors(actors=[_actor(each) for each in found.rows], next=_next(found))

    async def context_create(self, call: Call, params: models.ContextCreate) -> models.Context:
        """Create a context, or replace it. An operator creates one, and its admins may replace it."""
        given = params.context
        if not call.caller.is_operator:
            self._require(call, "context.create", await self._store.load(CONTEXTS, given.id))
        made = await self._store.put(CONTEXTS, given.id, given.model_dump(), time.time())
        self._contexts.pop(given.id, None)
        return _context(made)

    async def context_load(self, call: Call, params: models.ById) -> models.Context:
        """Return a context."""
        await self._permit(call, "context.load", params.id)
        return _context(await self._find(CONTEXTS, params.id, "context", id=params.id))

    async def context_list(self, call: Call, params: models.Page) -> models.Contexts:
        """List the contexts in which the caller has a part, in the order of their ids. Operators see all."""
        actor = call.caller.actor
        wanted: Fields = {}
        if not call.caller.is_operator:
            wanted = {"$or": [{name: actor} for name in ("admins", "executors", "readers")]}
        found = await self._store.listing(CONTEXTS, wanted, after=params.after, limit=params.limit, by="_id")
        return models.Contexts(contexts=[_context(each) for each in found.rows], next=_next(found))

    # --- runners

    async def runner_create(self, call: Call, params: models.RunnerCreate) -> models.Runner:
        """Register a supervisor in a context, or replace its registration."""
        await self._permit(call, "runner.create", params.context_id)
        given = params.runner
        _check_address(given)
        runner = given.model_dump()
        own = {"context_id": params.context_id, "addresses": addresses_of(runner)}
        fields = {**runner, **own, "secret": self._seal(call, given)}
        runner_key = key(params.context_id, given.id)
        return _runner(await self._store.put(RUNNERS, runner_key, fields, time.time()))

    def _seal(self, call: Call, runner: models.RunnerData) -> str | None:
        if runner.secret is None:
            return None
        if runner.secret == MASK:
            raise _invalid("runner.secret", MASK, "is a mask; pass the secret, a reference to it, or null")
        try:
            return self._secrets.seal(runner.secret, as_operator=call.caller.is_operator)
        except SecretError as error:
            raise _invalid("runner.secret", MASK, str(error)) from None

    async def runner_load(self, call: Call, params: models.InContext) -> models.Runner:
        """Return a runner. A stored secret is masked."""
        await self._permit(call, "runner.load", params.context_id)
        return _runner(await self._find_in(RUNNERS, "runner", params.context_id, id=params.id))

    async def runner_list(self, call: Call, params: models.ContextPage) -> models.Runners:
        """List the runners of a context, in the order of their ids."""
        await self._permit(call, "runner.list", params.context_id)
        found = await self._store.listing(RUNNERS, _in(params), after=params.after, limit=params.limit)
        return models.Runners(runners=[_runner(each) for each in found.rows], next=_next(found))

    async def runner_ping(self, call: Call, params: models.InContext) -> models.Ping:
        """Ask a supervisor for its runners."""
        await self._permit(call, "runner.ping", params.context_id)
        runner = await self._find_in(RUNNERS, "runner", params.context_id, id=params.id)
        try:
            secret = self._secrets.open(runner["secret"])
            destination = parse_destination(address_of(runner), topic=runner["topic"])
            return models.Ping(runners=await self._supervisors.ping(destination, secret=secret))
        except SupervisorError as error:
            kind = (
                SupervisorTimeout if error.code == reason_codes.SUPERVISOR_TIMEOUT else SupervisorUnreachable
            )
            raise kind(str(error), {"id": params.id}) from None
        except (SecretError, ValueError) as error:
            raise SupervisorUnreachable(str(error), {"id": params.id}) from None

    # --- jobs

    async def job_create(self, call: Call, params: models.JobCreate) -> models.Job:
        """Create a job, or replace it. A job of a flow that runs is not replaced."""
        given = params.job
        await self._permit_new(call, "job.create", params.context_id, "job", given)
        for flow in await self._store.flows_of_job(given.context_id, given.id, given.caller_id):
            if await self._run_state(flow) is FlowRunState.OPEN:
                raise InvalidTransition(
                    f"job {given.id} belongs to flow {flow['id']}, which runs; replace it when the flow has ended",
                    {"flow_id": flow["id"], "run_id": run_id(flow)},
                )
        job_key = key(given.context_id, given.caller_id, given.id)
        return _job(await self._store.put(JOBS, job_key, given.model_dump(), time.time()))

    async def job_load(self, call: Call, params: models.OfCaller) -> models.Job:
        """Return a job."""
        await self._permit(call, "job.load", params.context_id)
        ids = {"caller_id": params.caller_id, "id": params.id}
        return _job(await self._find_in(JOBS, "job", params.context_id, **ids))

    async def job_list(self, call: Call, params: models.CallerPage) -> models.Jobs:
        """List the jobs of a context, or those of one caller, in the order of their ids."""
        await self._permit(call, "job.list", params.context_id)
        found = await self._store.listing(JOBS, _in(params), after=params.after, limit=params.limit)
        return models.Jobs(jobs=[_job(each) for each in found.rows], next=_next(found))

    async def job_result(self, call: Call, params: models.OfJob) -> JobResult:
        """Return the result of a job in the latest run of its flow."""
        found = await self._read_result(call, params)
        if found.node_status is NodeStatus.COMPLETED and found.result is None:
            # A retry of the job may have deleted the result after the state was read.
            found = await self._read_result(call, params)
        return found

    async def _read_result(self, call: Call, params: models.OfJob) -> JobResult:
        latest, node = await self._node_of(call, "job.result", params)
        state = node_states(latest.nodes, latest.run)[node.id]
        task_node = _task_node(latest, node)
        stored: Fields | None = None
        error: str | None = None
        if state.status is NodeStatus.COMPLETED:
            stored = await self._store.result(latest.flow["task_id"], str(node.id), RESULT_UID)
        elif state.status is NodeStatus.FAILED:
            task_id = latest.flow["task_id"]
            error = await self._store.latest_error(task_id, node.id, state.generation) or task_node.error
        return JobResult(
            flow_id=latest.flow["id"],
            run_id=latest.id,
            job_id=node.id,
            node_status=state.status,
            attempt=state.attempt,
            result=(stored or {}).get("result"),
            error=error,
            finished_at=_whole(task_node.finished_at),
        )

    async def job_logs(self, call: Call, params: models.JobAttempts) -> models.JobLogs:
        """Return the logs of the attempts of a job in the latest run of its flow, oldest first."""
        latest, node = await self._node_of(call, "job.logs", params)
        listing = Listing([], more=False)
        if latest.run:
            task_id = latest.flow["task_id"]
            listing = await self._store.attempts(task_id, node.id, skip=params.after, limit=params.limit)
        attempts = [_attempt(number, row) for number, row in enumerate(listing.rows, params.after + 1)]
        return models.JobLogs(
            flow_id=latest.flow["id"],
            run_id=latest.id,
            job_id=node.id,
            attempts=attempts,
            next=attempts[-1].attempt if listing.more else None,
        )

    async def _node_of(self, call: Call, method: str, params: models.OfJob) -> tuple[LatestRun, FlowNode]:
        await self._permit(call, method, params.context_id)
        if params.flow_id is not None:
            flow = await self._flow(params.context_id, params.flow_id)
        else:
            flow = await self._only_flow(params)
        latest = await self._latest(flow)
        for node in latest.nodes:
            if node.id == params.id:
                return latest, node
        raise NotFound(f"flow {flow['id']} has no job {params.id}", {"flow_id": flow["id"], "id": params.id})

    async def _only_flow(self, params: models.OfJob) -> Fields:
        flows = await self._store.flows_of_job(params.context_id, params.id, params.caller_id)
        if not flows:
            raise NotFound(f"no flow has job {params.id}", {"context_id": params.context_id, "id": params.id})
        if len(flows) > 1:
            ids = sorted(flow["id"] for flow in flows)
            more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
            raise _invalid(
                "flow_id", None, f"is needed, because the flows {ids[:_NAMED]}{more} have job {params.id}"
            )
        return await self._flow(params.context_id, flows[0]["id"])

    # --- flows

    async def flow_create(self, call: Call, params: models.FlowCreate) -> models.Flow:
        """Create a flow, or replace it. A flow that runs is not replaced."""
        given = params.flow
        await self._permit_new(call, "flow.create", params.context_id, "flow", given)
        nodes = all_nodes(given)
        self._check_nodes(nodes)
        fields = await self._with_jobs(given, nodes)
        for _ in range(_TRIES):
            if await self._store.insert_flow(fields, time.time()):
                return await self._flow_made(fields)
            if await self._replace_flow(call, fields):
                return await self._flow_made(fields)
        raise _busy(given.id)

    async def _replace_flow(self, call: Call, fields: Fields) -> bool:
        """Replace a flow. Return False if another call has changed it meanwhile."""
        flow = await self._flow(fields["context_id"], fields["id"])
        await self._permit(call, "flow.replace", flow["context_id"], creator=flow["caller_id"])
        if fields["caller_id"] != flow["caller_id"]:
            raise PermissionDenied(
                f"flow {flow['id']} was created by actor {flow['caller_id']}, and only this actor changes it",
                {"caller_id": flow["caller_id"]},
            )
        await self._require_ended(flow, "replaced")
        await self.events.observe(flow)
        cleared = {
            **dict.fromkeys(("task_id", "run_seq", "renewed", "started_at", "retrying_at", "retrying")),
            "is_starting": False,
        }
        return await self._store.change_flow(flow, {**fields, **cleared}, time.time()) is not None

    async def _flow_made(self, fields: Fields) -> models.Flow:
        ids = [node["id"] for node in fields["nodes"]]
        await self._store.assign_jobs(fields["context_id"], fields["caller_id"], ids, fields["id"])
        flow = await self._flow(fields["context_id"], fields["id"])
        return _flow(await self._latest(flow))

    async def flow_add_nodes(self, call: Call, params: models.FlowAdd) -> models.FlowDag:
        """Add jobs to a flow, also while it runs. They may depend on every job of the flow."""
        for _ in range(_TRIES):
            flow = await self._permitted(call, "flow.add_nodes", params)
            changed = await self._add_nodes(flow, params.nodes)
            if changed is not None:
                return _dag(await self._latest(changed))
        raise _busy(params.id)

    async def _add_nodes(self, flow: Fields, added: Sequence[FlowNode]) -> Fields | None:
        """Add nodes to a flow and its run. Return None if another call has changed the flow meanwhile."""
        new = _new_nodes(flow, added)
        ids = [node.id for node in added]
        if new:
            self._check_nodes([*(FlowNode(**node) for node in flow["nodes"]), *new])
        jobs = await self._jobs(flow, ids)
        state = await self._run_state(flow)
        if state is not FlowRunState.NONE and not new and await self._run_has(flow, ids):
            return flow
        if state not in {FlowRunState.NONE, FlowRunState.OPEN}:
            raise InvalidTransition(
                f"flow {flow['id']} has ended; replace it with flow.create, or start it again",
                {"id": flow["id"]},
            )
        changed: Fields | None = flow
        if new:
            nodes = [*flow["nodes"], *map(_dump, new)]
            with_jobs = {"nodes": nodes, "jobs": [node["id"] for node in nodes]}
            changed = await self._store.change_flow(flow, with_jobs, time.time())
        if changed is None:
            return None
        await self._store.assign_jobs(flow["context_id"], flow["caller_id"], [*jobs], flow["id"])
        if state is FlowRunState.OPEN:
            await self._extend_run(changed, [task_node(flow, n, jobs[n.id], flow["run"]) for n in added])
        return changed

    async def _run_has(self, flow: Fields, ids: Collection[int]) -> bool:
        """Return whether the task of a flow has the nodes of these jobs."""
        task = await self._store.task(flow["task_id"], ["graph.nodes.node_id"])
        known = {node["node_id"] for node in task["graph"]["nodes"]} if task else set()
        return known.issuperset(map(str, ids))

    async def _extend_run(self, flow: Fields, nodes: list[Fields]) -> None:
        """Add nodes, which the flow has, to its task. Remove them from the flow if the task rejects them.

        A call that is repeated, because an engine was late to apply the change, may find that the task has
        the nodes, or is about to add them.
        """
        edges = [(parent, node["node_id"]) for node in nodes for parent in node.pop("depends_on")]
        try:
            await self._change_graph(flow, {"nodes": nodes, "edges": edges, "by": "gateway"})
        except (ActionRejected, GraphError) as error:
            ids = [int(node["node_id"]) for node in nodes]
            is_taken = isinstance(error, ActionRejected) and error.cause is RejectionCause.TAKEN
            if is_taken or await self._run_has(flow, ids):
                return
            await self._remove_nodes(flow, ids)
            raise InvalidTransition(str(error), {"id": flow["id"]}) from None

    async def _remove_nodes(self, flow: Fields, ids: Collection[int]) -> None:
        for _ in range(_TRIES):
            kept = [node for node in flow["nodes"] if node["id"] not in ids]
            fields = {"nodes": kept, "jobs": [node["id"] for node in kept]}
            if await self._store.change_flow(flow, fields, time.time()) is not None:
                return
            flow = await self._flow(flow["context_id"], flow["id"])
        raise _busy(flow["id"])

    async def _change_graph(self, flow: Fields, change: Fields) -> None:
        """Change the graph of the task of a flow, after other changes that are in progress. Raise as `_act` does."""
        until = time.monotonic() + _ENGINE_SEC
        while True:
            try:
                return await self._act(flow, CHANGE_GRAPH, change)
            except ActionRejected as error:
                if error.cause is not RejectionCause.BUSY or time.monotonic() > until:
                    raise
            await asyncio.sleep(_BUSY_SEC)

    async def flow_load(self, call: Call, params: models.InContext) -> models.Flow:
        """Return a flow with its status."""
        flow = await self._permitted(call, "flow.load", params)
        return _flow(await self._latest(flow))

    async def flow_list(self, call: Call, params: models.FlowPage) -> models.Flows:
        """List the flows of a context, in the order of their ids.

        With `status`, a page may have no entry and a next one.
        """
        await self._permit(call, "flow.list", params.context_id)
        found = await self._store.listing(FLOWS, _in(params), after=params.after, limit=params.limit)
        statuses = await self._statuses(found.rows)
        listed = [_summary(each, statuses.get(each["task_id"])) for each in found.rows]
        shown = [each for each in listed if params.status in {None, each.status}]
        return models.Flows(flows=shown, next=_next(found))

    async def _statuses(self, flows: Sequence[Fields]) -> dict[str, tuple[str, int]]:
        """Return status and `run_seq` of the latest run of each of these flows that has one, by id of the task."""
        statuses = await self._store.task_statuses([each["task_id"] for each in flows if each["task_id"]])
        since = time.time() - _UNOPENED_SEC
        missing = [
            each["task_id"]
            for each in flows
            if each["task_id"] and each["task_id"] not in statuses and each["started_at"] > since
        ]
        states = await asyncio.gather(*map(self._state_in_temporal, missing))
        started = [
            task_id for task_id, state in zip(missing, states, strict=True) if state is FlowRunState.OPEN
        ]
        return statuses | dict.fromkeys(started, (TaskStatus.QUEUED.value, 1))

    async def flow_status(self, call: Call, params: models.InContext) -> models.FlowView:
        """Return the state of the latest run of a flow."""
        flow = await self._permitted(call, "flow.status", params)
        latest = await self._latest(flow)
        nodes = _node_views(latest)
        return models.FlowView(
            flow_id=flow["id"],
            run_id=latest.id,
            status=flow_status(latest.run),
            cause=flow_cause(latest.run),
            failed_job=_failed_job(latest),
            nodes=nodes,
            created_at=flow["created_at"],
            started_at=flow.get("started_at") if latest.run else None,
            finished_at=_whole(latest.run.finished_at if latest.run else None),
        )

    async def flow_dag(self, call: Call, params: models.InContext) -> models.FlowDag:
        """Return the graph of a flow, with the state of its latest run."""
        return _dag(await self._latest(await self._permitted(call, "flow.dag", params)))

    async def flow_start(self, call: Call, params: models.InContext) -> models.Started:
        """Start a run of a flow. While one runs, return that."""
        flow = await self._permitted(call, "flow.start", params)
        for _ in range(_TRIES):
            state = await self._run_state(flow)
            if state is FlowRunState.OPEN:
                return _started(flow, begun=False)
            if _may_retry(flow):
                await asyncio.sleep(_BUSY_SEC)
            else:
                await self.events.observe(flow)
                if (started := await self._start_run(flow, state)) is not None:
                    return _started(started, begun=True)
            flow = await self._flow(params.context_id, params.id)
        raise _busy(params.id)

    async def _start_run(self, flow: Fields, state: FlowRunState) -> Fields | None:
        """Start the next run of a flow, and return the flow. Return None if another call has changed it meanwhile.

        The flow names its task before the task exists, and notes when it does. Only a start that was
        interrupted in between is completed, for a minute: with the number of a run that has been,
        supervisors return the results of its jobs.
        """
        jobs = await self._jobs(flow, [node["id"] for node in flow["nodes"]])
        claimed = flow if _may_start(flow, state) else await self._claim_run(flow)
        while claimed is not None:
            graph = task_graph(claimed, jobs, claimed["run"])
            if await self._start_task(claimed["task_id"], graph):
                await self._store.note_started(claimed["task_id"])
                return claimed
            claimed = await self._claim_run(claimed)
        return None

    async def _start_task(self, task_id: str, graph: Fields) -> bool:
        """Start the task of a run. Return False if the id belongs to another task, or to one whose document is lost."""
        owner = task_owner(task_id, await self._tasks.deployment())
        try:
            started = await self._tasks.start_task(task_id, params={}, graph=graph, owner=owner)
        except TaskIdTaken:
            return False
        return started or await self._store.task(task_id, ()) is not None

    async def _claim_run(self, flow: Fields) -> Fields | None:
        """Give a flow the number and the task of its next run. Return None if another call has changed it meanwhile."""
        run = flow["run"] + 1
        at, task_id = time.time(), new_task_id(flow, run, await self._tasks.deployment())
        claim = {"run": run, "task_id": task_id, "started_at": int(at), "is_starting": True}
        claim |= {"run_seq": 1, "renewed": None, "retrying_at": None, "retrying": None}
        return await self._store.change_flow(flow, claim, at)

    async def flow_cancel(self, call: Call, params: models.FlowCancel) -> models.Cancelled:
        """Cancel the run of a flow: stop jobs in flight, and start no further one."""
        flow = await self._permitted(call, "flow.cancel", params)
        requested = False
        if flow["task_id"] is not None:
            reason = params.reason or "cancelled by a client of the gateway"
            requested = await self._tasks.cancel_task(flow["task_id"], reason=reason)
        return models.Cancelled(flow_id=flow["id"], run_id=run_id(flow), requested=requested)

    async def flow_retry(self, call: Call, params: models.FlowRetry) -> models.Started:
        """Run jobs of an ended run again, and those that depend on them: by default those that did not complete."""
        flow = await self._permitted(call, "flow.retry", params)
        for _ in range(_TRIES):
            if flow["task_id"] is None:
                raise InvalidTransition(
                    f"flow {flow['id']} has no run; start it with flow.start", {"id": flow["id"]}
                )
            if _may_retry(flow):
                break
            if (started := await self._retry(call, flow, params.nodes)) is not None:
                return started
            flow = await self._flow(params.context_id, params.id)
        raise _busy(params.id)

    async def _retry(self, call: Call, flow: Fields, jobs: Sequence[int]) -> models.Started | None:
        """Run jobs of an ended run again. Return None if another call has changed the flow, or its run, meanwhile.

        The flow notes the attempt before, so that no other call starts or replaces it at the same time, and so that the
        new run never shows the ends of the run before.
        """
        try:
            planned = await self._rerun(
                call, flow, jobs, dry_run=True
            )  # wait for the end of a run that is ending
            await self.events.observe(flow)
            generations = await self._generations(flow)
            at = time.time()
            claim = {"retrying_at": int(at), "retrying": _renewed(planned, generations)}
            claimed = await self._store.change_flow(flow, claim, at)
            if claimed is None:
                return None
            made = await self._rerun_claimed(call, claimed, jobs, if_state=planned["state"])
        except ActionRejected as error:
            if error.cause is RejectionCause.OUTDATED:
                return None
            raise InvalidTransition(str(error), {"id": flow["id"], "run_id": run_id(flow)}) from None
        await self._note_retry(claimed, _renewed(made, generations))
        return _started({**flow, "run_seq": made["run_seq"]}, begun=True)

    async def _rerun_claimed(self, call: Call, flow: Fields, jobs: Sequence[int], *, if_state: str) -> Fields:
        """Run the task of a flow again, which notes that. Remove the note if the task has certainly not started."""
        try:
            return await self._rerun(call, flow, jobs, if_state=if_state)
        except (StoreUnavailable, TemporalUnavailable, TemporalError):
            raise
        except Exception:
            await self._store.change_flow(flow, _NOT_RETRYING, time.time())
            raise

    async def _rerun(self, call: Call, flow: Fields, jobs: Sequence[int], **how: Any) -> Fields:
        """Run the task of a flow again, with the limits that its jobs have now, as `TaskSteering.rerun` does."""
        stored = await self._jobs(flow, [node["id"] for node in flow["nodes"]])
        limits = {str(job_id): job_limits(job) for job_id, job in stored.items()}
        nodes = [str(each) for each in jobs] or None
        return await self._tasks.steering.rerun(flow["task_id"], nodes, limits=limits, by=_by(call), **how)

    async def _generations(self, flow: Fields) -> dict[int, int]:
        """Return the generations of the nodes in the latest run of a flow, by id of the job."""
        run = (await self._latest(flow)).run
        return {} if run is None else {job: node.generation for job, node in run.nodes.items()}

    async def _note_retry(self, flow: Fields, renewed: Fields) -> None:
        """Note the number of the run that a retry has started, and the generations that it starts."""
        for _ in range(_TRIES):
            if await self._store.change_flow(flow, {**renewed, **_NOT_RETRYING}, time.time()) is not None:
                return
            task_id, flow = flow["task_id"], await self._flow(flow["context_id"], flow["id"])
            if (
                flow["task_id"] != task_id or flow["run_seq"] >= renewed["run_seq"]
            ):  # it has ended, and a later one has begun
                return
        raise _busy(flow["id"])

    async def node_satisfy(self, call: Call, params: models.NodeSatisfy) -> models.Satisfied:
        """Satisfy a prerequisite in the run of a flow, for all nodes that name it."""
        flow = await self._permitted(call, "node.satisfy", params)
        named = [node for node in flow["nodes"] if params.prerequisite in node["prerequisites"]]
        if not named:
            known = sorted({each for node in flow["nodes"] for each in node["prerequisites"]})
            raise NotFound(
                f"no node of flow {flow['id']} names the prerequisite {params.prerequisite!r}",
                {"prerequisite": params.prerequisite, "known": known},
            )
        satisfied = await self._satisfy(call, flow, params.prerequisite)
        return models.Satisfied(
            prerequisite=params.prerequisite, satisfied=satisfied, nodes=[node["id"] for node in named]
        )

    async def _satisfy(self, call: Call, flow: Fields, prerequisite: str) -> bool:
        """Satisfy a prerequisite. Return False if it is satisfied already."""
        if await self._run_state(flow) is not FlowRunState.OPEN:
            raise InvalidTransition(
                f"flow {flow['id']} has no run that could wait; start it with flow.start", {"id": flow["id"]}
            )
        try:
            await self._act(flow, SATISFY, {"prerequisite": prerequisite, "by": _by(call)})
        except ActionRejected as error:
            if error.cause is RejectionCause.ALREADY_SATISFIED:
                return False
            raise InvalidTransition(str(error), {"id": flow["id"]}) from None
        return True

    async def flow_subscribe(self, call: Call, params: models.FlowSubscribe) -> models.Subscription:
        """Send the events of a flow as notifications `flow.event`, over this WebSocket, until it closes.

        With `after`, events that were sent before are left out. A client that reconnects with the `seq` of the last
        event that it has seen misses none. A second subscription to a flow replaces the first one.
        """
        flow = await self._permitted(call, "flow.subscribe", params)
        latest = await self._latest(flow)
        assert call.connection is not None
        sending = self.events.send(flow["_id"], params.after, call.connection.notify)
        if not call.connection.subscribe(flow["_id"], sending):
            raise LimitExceeded(
                f"the connection has subscriptions to {MAX_SUBSCRIPTIONS} flows; open another one for further flows",
                {"limit": MAX_SUBSCRIPTIONS},
            )
        return models.Subscription(
            flow_id=flow["id"], run_id=latest.id, status=flow_status(latest.run), after=params.after
        )

    # --- messages

    async def message_create(self, call: Call, params: models.MessageCreate) -> models.Message:
        """Store a message. The gateway does not deliver it; jobs are dispatched by the run of their flow."""
        given = params.message
        await self._permit_new(call, "message.create", params.context_id, "message", given)
        message_key = key(given.context_id, given.caller_id, given.id)
        fields = {
            **given.model_dump(exclude={"job", "nodes"}),
            "nodes": [_dump(node) for node in given.nodes],
            "status": MessageStatus.CREATED.value,
            "transport_status": TransportStatus.QUEUED.value,
        }
        made = await self._store.insert(MESSAGES, message_key, fields, time.time())
        if made is None:
            raise AlreadyExists(
                f"actor {given.caller_id} has created message {given.id} before; use another id",
                {"id": given.id},
            )
        return _message(made)

    async def message_load(self, call: Call, params: models.ByMessage) -> models.Message:
        """Return a message, also a dispatch of a job."""
        return _message(await self._message_of(call, "message.load", params))

    async def message_list(self, call: Call, params: models.MessagePage) -> models.Messages:
        """List the messages of a context or of a flow, newest first, with the dispatches of jobs."""
        await self._permit(call, "message.list", params.context_id)
        wanted = {"context_id": params.context_id} | (
            {} if params.flow_id is None else {"flow_id": params.flow_id}
        )
        found = await self._store.messages(wanted, after=_place_of(params.after), limit=params.limit)
        return models.Messages(messages=[_message(each) for each in found.rows], next=_next_place(found))

    async def message_status(self, call: Call, params: models.ByMessage) -> models.MessageState:
        """Return how far a message is."""
        message = await self._message_of(call, "message.status", params)
        return models.MessageState(
            id=message["id"],
            status=MessageStatus(message["status"]),
            transport_id=message.get("transport_id"),
            transport_status=TransportStatus(message["transport_status"]),
            late_replies=message.get("late_replies") or 0,
            updated_at=message["updated_at"],
        )

    async def _message_of(self, call: Call, method: str, params: models.ByMessage) -> Fields:
        await self._permit(call, method, params.context_id)
        is_dispatch = isinstance(params.id, str)
        message_key = params.id if is_dispatch else key(params.context_id, params.caller_id, int(params.id))
        message = await self._store.load(MESSAGES, message_key)
        own = (params.context_id, params.caller_id)
        if message is None or (message["context_id"], message["caller_id"]) != own:
            raise NotFound(
                f"there is no message {params.id!r} of actor {params.caller_id}", {"id": params.id}
            )
        return message

    # --- what several methods need

    async def _permitted(self, call: Call, method: str, params: models.InContext) -> Fields:
        """Return a flow that the caller may use with this method. Raise PermissionDenied or NotFound."""
        context = await self._context(call, params.context_id)
        flow = await self._store.load(FLOWS, key(params.context_id, params.id))
        creator = None if flow is None else flow["caller_id"]
        self._require(call, method, context, creator=creator)
        if flow is None:
            raise _not_found("flow", context_id=params.context_id, id=params.id)
        return flow

    async def _permit(self, call: Call, method: str, context_id: int, *, creator: int | None = None) -> None:
        """Raise PermissionDenied unless the caller may call a method in a context, and NotFound if there is none."""
        self._require(call, method, await self._context(call, context_id), creator=creator)

    async def _permit_new(
        self,
        call: Call,
        method: str,
        context_id: int,
        name: str,
        given: models.JobData | models.FlowData | models.MessageData,
    ) -> None:
        """Check that the caller may create an entity. Raise PermissionDenied, NotFound or InvalidParams."""
        if given.context_id != context_id:
            raise _invalid(
                f"{name}.context_id", given.context_id, f"must be the context_id of the call, {context_id}"
            )
        await self._permit(call, method, context_id)
        actor = call.caller.actor
        if actor is not None and given.caller_id != actor:
            raise PermissionDenied(
                f"{name}.caller_id is {given.caller_id}, but the token is that of actor {actor}",
                {"field": f"{name}.caller_id", "actor": actor},
            )

    def _require(
        self, call: Call, method: str, context: Mapping[str, Any] | None, *, creator: int | None = None
    ) -> None:
        """Raise PermissionDenied unless the caller may call a method in this context."""
        if call.caller.is_operator:
            return
        parts = parts_of(call.caller.actor, context, creator) if context is not None else frozenset()
        if not may_call(method, parts):
            played = ", ".join(sorted(parts)) or "no part in the context"
            raise PermissionDenied(
                f"actor {call.caller.actor} may not call {method} here (it has {played})", {"method": method}
            )

    async def _context(self, call: Call, context_id: int) -> Fields | None:
        """Return a context, as it was at most `_CONTEXT_SEC` ago.

        Return None if it does not exist and the caller is no operator, who would get NotFound.
        """
        if (known := self._contexts.get(context_id)) is not None:
            return known
        stored = await self._store.load(CONTEXTS, context_id)
        if stored is None:
            if call.caller.is_operator:
                raise _not_found("context", id=context_id)
            return None
        self._contexts[context_id] = stored
        return stored

    async def _find(self, collection: str, stored_id: int | str, name: str, /, **ids: int) -> Fields:
        found = await self._store.load(collection, stored_id)
        if found is None:
            raise _not_found(name, **ids)
        return found

    async def _find_in(self, collection: str, name: str, context_id: int, **ids: int) -> Fields:
        return await self._find(
            collection, key(context_id, *ids.values()), name, context_id=context_id, **ids
        )

    async def _flow(self, context_id: int, flow_id: int) -> Fields:
        return await self._find_in(FLOWS, "flow", context_id, id=flow_id)

    async def _latest(self, flow: Fields) -> LatestRun:
        """Return the latest run of a flow. A flow whose run was deleted, or never began, has none."""
        latest = await read_latest(self._store, flow)
        if latest is None:  # no engine has opened it yet, or it was deleted
            is_open = await self._state_in_temporal(flow["task_id"]) is FlowRunState.OPEN
            latest = LatestRun(flow, FlowRun() if is_open else None)
        return latest

    async def _run_state(self, flow: Fields) -> FlowRunState:
        """Return whether the latest run of a flow is open."""
        task_id = flow["task_id"]
        if task_id is None:
            return FlowRunState.NONE
        task = await self._store.task(task_id, ["status", "run_seq"])
        if task is None:
            return await self._state_in_temporal(task_id)
        if not TaskStatus(task["status"]).closed:
            return FlowRunState.OPEN
        if not reopens(flow, task["run_seq"]) and not flow.get("retrying_at"):
            return FlowRunState.ENDED
        is_open = await self._state_in_temporal(task_id) is FlowRunState.OPEN
        return FlowRunState.OPEN if is_open else FlowRunState.ENDED

    async def _state_in_temporal(self, task_id: str) -> FlowRunState:
        states = {
            WorkflowState.OPEN: FlowRunState.OPEN,
            WorkflowState.CLOSED: FlowRunState.ENDED,
            WorkflowState.ABSENT: FlowRunState.ABSENT,
        }
        return states[(await self._tasks.look_up(task_id)).state]

    async def _require_ended(self, flow: Fields, what: str) -> None:
        state = await self._run_state(flow)
        if state is FlowRunState.OPEN or _may_start(flow, state) or _may_retry(flow):
            raise InvalidTransition(
                f"flow {flow['id']} runs as {run_id(flow)}; it can be {what} when the run has ended",
                {"id": flow["id"], "run_id": run_id(flow)},
            )

    async def _jobs(self, flow: Mapping[str, Any], ids: Collection[int]) -> dict[int, Fields]:
        """Return the limits of the jobs of a flow by id. Raise NotFound if some do not exist."""
        limits = await self._store.job_limits(flow["context_id"], flow["caller_id"], ids)
        if missing := [job_id for job_id in ids if job_id not in limits]:
            raise NotFound(
                f"actor {flow['caller_id']} has no jobs {missing} in context {flow['context_id']}; create them first",
                {"jobs": missing},
            )
        return limits

    async def _with_jobs(self, given: models.FlowData, nodes: Sequence[FlowNode]) -> Fields:
        """Return the fields of a flow with these nodes. Raise NotFound if some of its jobs do not exist."""
        fields = given.model_dump(exclude={"nodes", "jobs"})
        ids = [node.id for node in nodes]
        await self._jobs(fields, ids)
        return {**fields, "jobs": ids, "nodes": [_dump(node) for node in nodes]}

    def _check_nodes(self, nodes: Sequence[FlowNode]) -> None:
        """Raise the error of the first problem of the nodes of a flow."""
        if not nodes:
            raise _invalid("flow.jobs", [], "must name at least one job")
        if len(nodes) > models.MAX_NODES:
            raise _invalid("nodes", len(nodes), f"are more than {models.MAX_NODES:,}; split the flow")
        if (size := len(dumps([_dump(node) for node in nodes]))) > models.NODES_BYTES:
            problem = f"have more than {models.NODES_BYTES:,} bytes of JSON; split the flow"
            raise _invalid("nodes", f"{size:,} bytes", problem)
        seen: set[int] = set()
        for node in nodes:
            if node.id in seen:
                raise _invalid("flow.nodes", node.id, "occurs twice; a flow has one node for each job")
            seen.add(node.id)
            _check_url(node)
        try:
            check_dag(nodes)
        except UnknownDependency as error:
            raise DagMissingDependency(str(error), {"nodes": error.missing}) from None
        except Cycle as error:
            raise DagCycle(str(error), {"nodes": error.nodes}) from None

    async def _act(self, flow: Fields, action: str, given: Fields) -> None:
        """Apply an action to the run of a flow.

        Raise ActionRejected, and StorageError if no engine responds in time.
        """
        try:
            await self._tasks.steering.act(flow["task_id"], action, given, wait_sec=_ENGINE_SEC)
        except (ActionUnanswered, TemporalError) as error:
            cause = (
                f"no engine has applied the action within {_ENGINE_SEC:.0f} s"
                if isinstance(error, ActionUnanswered)
                else f"Temporal does not respond ({one_line(error)})"
            )
            raise StorageError(
                f"{cause}; it may be applied later: flow.status shows the jobs and what they wait for, and "
                "the same call can be repeated",
                {"id": flow["id"]},
            ) from None


_Row: TypeAlias = "tuple[str, type[BaseModel], type[BaseModel], Any, tuple[Any, ...]]"
"""The name of a method, the models of its params and result, the method of the gateway, and the errors."""


def _rows(gateway: Gateway) -> list[_Row]:
    load, create = (NotFound, PermissionDenied), (NotFound, PermissionDenied, InvalidParams)
    change = (NotFound, PermissionDenied, InvalidTransition)
    reach = (SupervisorUnreachable, SupervisorTimeout)
    dag = (AlreadyExists, DagMissingDependency, DagCycle)
    return [
        ("actor.create", models.ActorCreate, models.Actor, gateway.actor_create, (PermissionDenied,)),
        ("actor.load", models.ById, models.Actor, gateway.actor_load, (NotFound,)),
        ("actor.list", models.Page, models.Actors, gateway.actor_list, ()),
        ("context.create", models.ContextCreate, models.Context, gateway.context_create, (PermissionDenied,)),
        ("context.load", models.ById, models.Context, gateway.context_load, load),
        ("context.list", models.Page, models.Contexts, gateway.context_list, ()),
        ("runner.create", models.RunnerCreate, models.Runner, gateway.runner_create, create),
        ("runner.load", models.InContext, models.Runner, gateway.runner_load, load),
        ("runner.list", models.ContextPage, models.Runners, gateway.runner_list, load),
        ("runner.ping", models.InContext, models.Ping, gateway.runner_ping, (*load, *reach)),
        ("job.create", models.JobCreate, models.Job, gateway.job_create, (*create, InvalidTransition)),
        ("job.load", models.OfCaller, models.Job, gateway.job_load, load),
        ("job.list", models.CallerPage, models.Jobs, gateway.job_list, load),
        ("job.result", models.OfJob, models.JobResult, gateway.job_result, (*load, InvalidParams)),
        ("job.logs", models.JobAttempts, models.JobLogs, gateway.job_logs, (*load, InvalidParams)),
        (
            "flow.create",
            models.FlowCreate,
            models.Flow,
            gateway.flow_create,
            (*create, InvalidTransition, *dag[1:]),
        ),
        (
            "flow.add_nodes",
            models.FlowAdd,
            models.FlowDag,
            gateway.flow_add_nodes,
            (*change, InvalidParams, *dag),
        ),
        ("flow.load", models.InContext, models.Flow, gateway.flow_load, load),
        ("flow.list", models.FlowPage, models.Flows, gateway.flow_list, load),
        ("flow.start", models.InContext, models.Started, gateway.flow_start, load),
        ("flow.status", models.InContext, models.FlowView, gateway.flow_status, load),
        ("flow.dag", models.InContext, models.FlowDag, gateway.flow_dag, load),
        ("flow.cancel", models.FlowCancel, models.Cancelled, gateway.flow_cancel, load),
        ("flow.retry", models.FlowRetry, models.Started, gateway.flow_retry, change),
        ("node.satisfy", models.NodeSatisfy, models.Satisfied, gateway.node_satisfy, change),
        (
            "message.create",
            models.MessageCreate,
            models.Message,
            gateway.message_create,
            (*create, AlreadyExists),
        ),
        ("message.load", models.ByMessage, models.Message, gateway.message_load, load),
        ("message.list", models.MessagePage, models.Messages, gateway.message_list, load),
        ("message.status", models.ByMessage, models.MessageState, gateway.message_status, load),
        ("flow.subscribe", models.FlowSubscribe, models.Subscription, gateway.flow_subscribe, load),
    ]


def methods(gateway: Gateway) -> list[Method]:
    """Return the methods of the gateway with their models and errors."""
    return [
        Method(
            name=name,
            needs=right_for(name),
            params=params,
            result=result,
            call=_translated(call),
            errors=errors,
            websocket_only=name == "flow.subscribe",
        )
        for name, params, result, call, errors in _rows(gateway)
    ]


def _translated(call: _Function) -> _Function:
    """Return a method that raises the errors of FlowKit and Temporal as those of the API."""

    @functools.wraps(call)
    async def translate(made: Call, params: Any) -> Any:
        try:
            return await call(made, params)
        except (GraphError, ConfigError) as error:
            raise InvalidParams(str(error)) from None
        except UnknownTask:
            raise InvalidTransition(
                "the run of the flow was deleted; start the flow with flow.start"
            ) from None
        except ChecksBusy as error:
            raise StorageError(str(error)) from None
        except (TemporalUnavailable, TemporalError) as error:
            raise StorageError(
                f"Temporal does not respond, or rejects the request: {one_line(error)}"
            ) from None

    return translate


def _check_address(runner: models.RunnerData) -> None:
    try:
        parse_destination(address_of(runner.model_dump()), topic=runner.topic)
    except ValueError as error:
        field = "runner.pubkey" if runner.pubkey else "runner.address"
        raise _invalid(field, shown_address(runner.pubkey or runner.address), str(error)) from None


def _check_url(node: FlowNode) -> None:
    url = node.supervisor_url
    scheme, _, rest = url.partition(":")
    if not url or (scheme == "runner" and rest.isascii() and rest.isdigit()):
        return
    try:
        parse_destination(url)
    except ValueError as error:
        problem = f"{error}, or runner:ID"
        raise _invalid(f"nodes.{node.id}.supervisor_url", shown_address(url), problem) from None


def _invalid(field: str, value: object, problem: str) -> InvalidParams:
    return InvalidParams(
        f"{field} {problem}", {"problems": [{"field": field, "value": repr(value)[:100], "problem": problem}]}
    )


def _new_nodes(flow: Mapping[str, Any], added: Sequence[FlowNode]) -> list[FlowNode]:
    """Return the nodes to add to a flow; none if it has all of them, because the call is repeated.

    Raise AlreadyExists, which names what differs, if the flow has some of them, or has them with another content.
    """
    known = {node["id"]: FlowNode(**node) for node in flow["nodes"]}
    taken = {node.id: _differences(known[node.id], node) for node in added if node.id in known}
    if not taken:
        return [*added]
    differ = {job_id: names for job_id, names in taken.items() if names}
    if not differ and len(taken) == len(added):
        return []
    more = "".join(
        f"; job {job_id} differs in {', '.join(names)}" for job_id, names in [*differ.items()][:_NAMED]
    )
    raise AlreadyExists(
        f"flow {flow['id']} has the jobs {[*taken][:_NAMED]} already{more}; leave them out, or pass exactly "
        "the nodes of an earlier call",
        {"nodes": sorted(taken), "differ": differ},
    )


def _differences(known: FlowNode, given: FlowNode) -> list[str]:
    """Return the names of the fields in which two nodes of a job differ."""
    before, after = _dump(known), _dump(given)
    return [name for name, value in after.items() if not same_json(before[name], value)]


def _not_found(name: str, **ids: int) -> NotFound:
    where = f" in context {ids['context_id']}" if "context_id" in ids else ""
    return NotFound(f"there is no {name} {ids['id']}{where}", {"entity": name, **ids})


def _busy(flow_id: int) -> StorageError:
    return StorageError(f"other calls change flow {flow_id} at the same time; try again", {"id": flow_id})


def _by(call: Call) -> str:
    return "operator" if call.caller.actor is None else f"actor {call.caller.actor}"


def _in(params: models.ContextPage) -> Fields:
    caller = getattr(params, "caller_id", None)
    return {"context_id": params.context_id} | ({} if caller is None else {"caller_id": caller})


def _dump(node: FlowNode) -> Fields:
    return node.model_dump(mode="json", exclude={"node_status"})


# --- results ----------------------------------------------------------------------------------------------------


def _next(listing: Listing) -> int | None:
    """Return the id after which the next page begins; None after the last one."""
    return listing.rows[-1]["id"] if listing.more else None


def _next_place(listing: Listing) -> str | None:
    """Return the place after which the next page of messages begins; None after the last one."""
    return f"{listing.rows[-1]['created_at']}/{listing.rows[-1]['_id']}" if listing.more else None


def _place_of(text: str | None) -> tuple[int, str] | None:
    """Return time and id of a place of `_next_place`."""
    if text is None:
        return None
    created_at, _, message_key = text.partition("/")
    return int(created_at), message_key


def _attempt(number: int, row: Mapping[str, Any]) -> models.AttemptLog:
    return models.AttemptLog(
        attempt=number,
        transport_id=row["transport_id"],
        outcome=row["outcome"],
        logs=row.get("logs"),
        error=row.get("error"),
    )


def _pick(kind: type[BaseModel], stored: Mapping[str, Any]) -> Fields:
    return {name: stored[name] for name in kind.model_fields if name in stored}


def _actor(stored: Fields) -> models.Actor:
    return models.Actor(**_pick(models.Actor, stored))


def _context(stored: Fields) -> models.Context:
    return models.Context(**_pick(models.Context, stored))


def _runner(stored: Fields) -> models.Runner:
    return models.Runner(**{**_pick(models.Runner, stored), "secret": masked(stored["secret"])})


def _job(stored: Fields) -> models.Job:
    return models.Job(**_pick(models.Job, stored))


def _message(stored: Fields) -> models.Message:
    return models.Message(**_pick(models.Message, stored))


def _flow(latest: LatestRun) -> models.Flow:
    stored = {**latest.flow, "status": flow_status(latest.run), "run_id": latest.id}
    states = node_states(latest.nodes, latest.run)
    shown = {job_id: {"node_status": state.status} for job_id, state in states.items()}
    nodes = [{**node, **shown.get(node["id"], {})} for node in latest.flow["nodes"]]
    return models.Flow(**{**_pick(models.Flow, stored), "nodes": nodes})


def _summary(flow: Fields, task: tuple[str, int] | None) -> models.FlowSummary:
    run, run_seq = None, 0
    if task is not None:
        status, run_seq = task
        run = FlowRun(status=TaskStatus.QUEUED if reopens(flow, run_seq) else TaskStatus(status))
    return models.FlowSummary(
        flow_id=flow["id"],
        caller_id=flow["caller_id"],
        run_id=None if run is None else run_id(flow, run_seq),
        status=flow_status(run),
        jobs=len(flow["jobs"]),
        created_at=flow["created_at"],
        updated_at=flow["updated_at"],
    )


def _may_start(flow: Mapping[str, Any], state: FlowRunState) -> bool:
    """Return whether the latest run of a flow, which was claimed, may start any moment."""
    is_recent = state is FlowRunState.ABSENT and time.time() < flow["started_at"] + _STARTING_SEC
    return is_recent and bool(flow["is_starting"])


def _renewed(rerun: Fields, generations: Mapping[int, int]) -> Fields:
    """Return the number of the run that a retry starts, and the generations that it starts of which jobs."""
    again = [int(each["node_id"]) for each in rerun["affected"]]
    return {
        "run_seq": rerun["run_seq"],
        "renewed": [[job, generations.get(job, 0) + 1] for job in again],
    }


def _may_retry(flow: Mapping[str, Any]) -> bool:
    """Return whether a retry of a flow may start its latest run again any moment."""
    return time.time() < (flow.get("retrying_at") or 0) + _STARTING_SEC


def _started(flow: Fields, *, begun: bool) -> models.Started:
    return models.Started(
        started=begun, flow_id=flow["id"], run_id=run_id(flow) or "", status=FlowStatus.STARTED
    )


def _task_node(latest: LatestRun, node: FlowNode) -> TaskNode:
    return (latest.run.nodes.get(node.id) if latest.run else None) or TaskNode()


def _node_views(latest: LatestRun) -> dict[str, NodeView]:
    states = node_states(latest.nodes, latest.run)
    failures = sum(state.status is NodeStatus.FAILED for state in states.values())
    views = {}
    for node in latest.nodes:
        state, task_node = states[node.id], _task_node(latest, node)
        failed = state.status is NodeStatus.FAILED
        views[str(node.id)] = NodeView(
            node_status=state.status,
            cause=state.cause,
            attempt=state.attempt,
            waiting_on=waiting_on(node, latest.run),
            supervisor_url=node.supervisor_url,
            error=truncate(task_node.error or "", _ERRORS_CHARS // failures) or None
            if failed and state.is_decided
            else None,
            retry_at=_whole(task_node.retry_at) if failed and state.is_decided else None,
        )
    return views


def _failed_job(latest: LatestRun) -> int | None:
    """Return the first job, in the order of the flow, that has failed and has no retry left."""
    failed = (n.id for n in latest.nodes if _task_node(latest, n).status is TaskNodeStatus.FAILED)
    return next(failed, None)


def _dag(latest: LatestRun) -> models.FlowDag:
    nodes, views = latest.nodes, _node_views(latest)
    edges = [(parent, node.id) for node in nodes for parent in node.depends]
    parents = {parent for parent, _ in edges}
    begun = {NodeStatus.DISPATCHED, NodeStatus.RUNNING, NodeStatus.COMPLETED, NodeStatus.FAILED}
    status = {node.id: views[str(node.id)].node_status for node in nodes}
    return models.FlowDag(
        flow_id=latest.flow["id"],
        run_id=latest.id,
        status=flow_status(latest.run),
        edges=edges,
        roots=[node.id for node in nodes if not node.depends],
        leaves=[node.id for node in nodes if node.id not in parents],
        levels=levels(nodes),
        started=[job_id for job_id, each in status.items() if each in begun],
        completed=[job_id for job_id, each in status.items() if each is NodeStatus.COMPLETED],
        failed_job=_failed_job(latest),
        nodes=views,
    )


def _whole(at: float | None) -> int | None:
    return None if at is None else int(at)
