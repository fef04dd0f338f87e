"""The handler of the role `job`: each attempt dispatches one job to a supervisor, and stores what it replies."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cachetools import FIFOCache, LRUCache, TTLCache

from flowkit import reason_codes
from flowkit.adapters.outages import retry_while_unavailable
from flowkit.errors import FlowKitError
from flowkit.gateway.delivery import JobState, WireJob
from flowkit.gateway.destinations import parse_destination
from flowkit.gateway.flows import (
    ABANDONED,
    RESULT_UID,
    ROLE,
    address_of,
    dispatch_id,
    node_ids,
    transport_id,
)
from flowkit.gateway.models import MessageStatus, NodeStatus, TransportStatus
from flowkit.gateway.secret_box import SecretError
from flowkit.gateway.status import JobDispatch, JobEvent, advance, read_dispatch
from flowkit.gateway.store import JOBS, MESSAGES, RUNNERS, key
from flowkit.gateway.transports import SupervisorError
from flowkit.text import printed, truncate
from flowkit.worker import Batch, BatchResult, FinalizeResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from flowkit.core.utils import Fields
    from flowkit.gateway.delivery import JobOutcome, LateReply, RemoteSupervisors
    from flowkit.gateway.destinations import Destination
    from flowkit.gateway.secret_box import SecretBox
    from flowkit.gateway.store import FlowStore
    from flowkit.worker import RunContext

CONCURRENCY: Final = 200
"""How many jobs one worker has in flight by default."""

_LOG_CHARS: Final = 1_000_000
_ERROR_CHARS: Final = 100_000
_REMEMBERED: Final = 10_000
"""How many ended jobs are remembered for late replies."""

_KNOWN_CHARS: Final = 25_000_000
"""How large the flows may be together that a worker remembers, in characters, as `FlowOfRun.size` estimates them."""
_READ_TOGETHER: Final = 20
"""Flows with up to so many nodes are read with all their jobs at once."""

_RUNNERS_SEC: Final = 1.0
"""How long a worker may use the runners of a context that it has read."""
_CONTEXTS: Final = 1_000
"""How many contexts there may be whose runners a worker remembers."""

_logger = logging.getLogger("flowkit.gateway")


class JobFailed(Exception):
    """An attempt of a job has failed."""

    def __init__(self, code: str, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.permanent = permanent


class FlowOfRun(NamedTuple):
    """A flow as it is in one of its runs."""

    flow: Fields
    nodes: Mapping[str, Fields]
    """By id of the node in its task."""
    jobs: Mapping[int, Fields]
    """The jobs by id; none if they are too many to be read together."""

    @property
    def size(self) -> int:
        """The size in characters, roughly."""
        return 500 * len(self.nodes) + sum(len(job["script"]) for job in self.jobs.values())


class JobHandler(RoleHandler):
    """Dispatches the jobs of flows to supervisors.

    It serves only tasks that the gateway has started as runs of flows: everyone who can start a task can
    write a node of this role with the ids of a foreign flow. An attempt that was lost continues its
    dispatch: the supervisor knows the id of the job, and returns the result. A retry after a failure is a
    new dispatch with another id.
    """

    role = ROLE

    def __init__(self, store: FlowStore, supervisors: RemoteSupervisors, secrets: SecretBox) -> None:
        self._store = store
        self._supervisors = supervisors
        self._secrets = secrets
        self._dispatched: FIFOCache[str, str] = FIFOCache(_REMEMBERED)
        """The ids of the latest dispatches, by the id of the job at its supervisor."""
        self._flows: LRUCache[str, FlowOfRun] = LRUCache(_KNOWN_CHARS, getsizeof=lambda flow: flow.size)
        """The flows of the latest jobs, by the tasks that run them."""
        self._runners_of: TTLCache[int, asyncio.Future[list[Fields]]] = TTLCache(_CONTEXTS, _RUNNERS_SEC)
        """The runners of contexts, which were read a moment ago."""

    async def load_input(self, input_ref: Fields | None, input_inline: Fields | None) -> Fields:
        """Return the ids of the job."""
        return input_inline or {}

    async def iter_batches(self, loaded: Fields) -> AsyncIterator[Batch]:
        """Yield the job as one batch."""
        yield Batch(batch_uid=RESULT_UID, payload=loaded)

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Run the job at its supervisor. Return its result and its log, or why it has failed."""
        try:
            return await self._dispatch(batch.payload, ctx)
        except JobFailed as error:
            return BatchResult(
                success=False, reason_code=error.code, permanent=error.permanent, error=str(error)
            )

    async def _dispatch(self, ids: Fields, ctx: RunContext) -> BatchResult:
        dispatch = await self._open(ids, ctx)
        outcome = await self._run(dispatch, ctx)
        logs = None if outcome.logs is None else truncate(outcome.logs, _LOG_CHARS)
        if not outcome.success:
            await self._fail(
                dispatch, JobFailed(reason_codes.JOB_FAILED, outcome.text or "the job failed"), logs
            )
        ctx.kv["logs"], ctx.kv["dispatch"] = logs, dispatch.known
        return BatchResult(success=True, metrics={"result": outcome.text, "logs": logs})

    async def finalize(self, ctx: RunContext) -> FinalizeResult:
        """Note that the job is completed, once its result is stored, and its log."""
        kept = ctx.kv if "logs" in ctx.kv else await self._of_lost_attempt(ctx)
        if kept["dispatch"] is not None:
            epoch = ctx.attempt_epoch
            await self._note(_id_of(ctx), kept["dispatch"], epoch, JobEvent.COMPLETED, logs=kept["logs"])
        return FinalizeResult()

    async def _of_lost_attempt(self, ctx: RunContext) -> Fields:
        """Return the dispatch, and the log that an attempt has stored with its result before it was lost."""
        stored = await retry_while_unavailable(
            lambda: self._store.result(ctx.task_id, ctx.node_id, RESULT_UID)
        )
        known = await retry_while_unavailable(lambda: self._store.dispatch(ctx.task_id, _id_of(ctx)))
        return {
            "logs": (stored or {}).get("logs"),
            "dispatch": None if known is None else read_dispatch(known),
        }

    async def _open(self, ids: Fields, ctx: RunContext) -> Dispatching:
        """Return the dispatch of this attempt: that of a lost attempt, or a new one."""
        known = await self._flow(ids, ctx)
        flow, node = known.flow, known.nodes[ctx.node_id]
        url: str = node["supervisor_url"]
        job = await self._job(ids, ctx, known)
        dispatch = Dispatching(
            id=_id_of(ctx),
            task_id=ctx.task_id,
            epoch=ctx.attempt_epoch,
            job=job,
            transport_id=transport_id(flow, job, ids["run"], ctx.generation, ctx.failures),
            env_vars={**flow["env_vars"], **job["env_vars"]},
        )
        chosen: Fields | None = None
        problem: JobFailed | None = None
        try:
            chosen = await self._choose_runner(url, job)
        except JobFailed as error:
            problem = error
        record = await self._record(dispatch, ids, ctx, chosen, node)
        dispatch.known, dispatch.transport_id = read_dispatch(record), record["transport_id"]
        if record["outcome"] in {"failed", "abandoned"}:
            await self._end_again(dispatch.id)
            raise JobFailed(
                record.get("code") or reason_codes.JOB_FAILED,
                record.get("error") or "a later attempt has begun",
            )
        if problem is not None:
            await self._fail(dispatch, problem)
        runner = chosen
        if chosen is not None and record["runner_id"] not in {None, chosen["id"]}:
            runner = await self._find_runner(ids["context_id"], record["runner_id"])
        await self._address(dispatch, runner, url)
        return dispatch

    async def _end_again(self, dispatch_id: str) -> None:
        """Note that no runner is busy with a dispatch that had ended when an attempt opened it."""
        await retry_while_unavailable(
            lambda: self._store.change_dispatch(dispatch_id, {}, {"open_until": None}, time.time())
        )

    async def _flow(self, ids: Fields, ctx: RunContext) -> FlowOfRun:
        """Return the flow whose run the task of this attempt is. Raise JobFailed if the node is not one of that run.

        A flow that runs is not replaced, and a flow that was replaced has another run next. So what was read once is
        used for all jobs of the run, unless it lacks a job that was added since.
        """
        known = self._flows.get(ctx.task_id)
        if known is None or ctx.node_id not in known.nodes:
            flow = await retry_while_unavailable(lambda: self._store.flow_of_task(ctx.task_id))
            if flow is None:
                raise _foreign(ctx, "the task is not the latest run of a flow")
            known = await self._with_jobs(flow)
            if known.size <= _KNOWN_CHARS:
                self._flows[ctx.task_id] = known
        if ctx.node_id not in known.nodes:
            raise _foreign(ctx, f"flow {known.flow['id']} has no such job")
        if ids != node_ids(known.flow, int(ctx.node_id), known.flow["run"]):
            raise _foreign(ctx, "its input names another job than the node")
        return known

    async def _with_jobs(self, flow: Fields) -> FlowOfRun:
        nodes = {str(node["id"]): node for node in flow["nodes"]}
        jobs: dict[int, Fields] = {}
        if len(nodes) <= _READ_TOGETHER:
            ids = [node["id"] for node in flow["nodes"]]
            jobs = await retry_while_unavailable(
                lambda: self._store.jobs(flow["context_id"], flow["caller_id"], ids)
            )
        return FlowOfRun(flow, nodes, jobs)

    async def _job(self, ids: Fields, ctx: RunContext, flow: FlowOfRun) -> Fields:
        """Return a job. It may have been replaced before a retry of the flow, which begins other generations."""
        known = None if ctx.generation else flow.jobs.get(ids["job_id"])
        if known is not None:
            return known
        found = await self._load(JOBS, key(ids["context_id"], ids["caller_id"], ids["job_id"]))
        if found is None:
            problem = f"context {ids['context_id']} has no job {ids['job_id']}"
            raise JobFailed(reason_codes.BAD_INPUT, problem, permanent=True)
        return found

    async def _load(self, collection: str, document_id: str) -> Fields | None:
        return await retry_while_unavailable(lambda: self._store.load(collection, document_id))

    async def _record(
        self, dispatch: Dispatching, ids: Fields, ctx: RunContext, runner: Fields | None, node: Fields
    ) -> Fields:
        """Return the stored record of a dispatch, and end those of earlier attempts of the job.

        A lost attempt may have created it, with another runner.
        """
        fields = {
            "id": dispatch.id,
            "context_id": ids["context_id"],
            "caller_id": ids["caller_id"],
            "flow_id": ids["flow_id"],
            "task_id": ctx.task_id,
            "job_id": ids["job_id"],
            "nodes": [node],
            "message_type": "job",
            "generation": ctx.generation,
            "retry": ctx.failures,
            "transport_id": dispatch.transport_id,
            "runner_id": None if runner is None else runner["id"],
            "state": NodeStatus.READY.value,
            "outcome": None,
            "status": MessageStatus.CREATED.value,
            "transport_status": TransportStatus.QUEUED.value,
        }
        now, task_id, job = time.time(), ctx.task_id, ids["job_id"]
        latest = {"open_until": now + dispatch.job["timeout"] + 60.0}
        if ctx.generation or ctx.failures:
            await retry_while_unavailable(
                lambda: self._store.abandon_earlier(
                    task_id, job, ctx.generation, ctx.failures, ABANDONED, now
                )
            )
        return await retry_while_unavailable(
            lambda: self._store.open_dispatch(dispatch.id, fields, dispatch.epoch, latest, now)
        )

    async def _able_runners(self, context_id: int, executor: str) -> list[Fields]:
        """Return the runners of a context that have an executor, as they were a second ago at most."""
        for fresh in (False, True):
            runners = await self._runners(context_id, fresh=fresh)
            able = [each for each in runners if not each["executors"] or executor in each["executors"]]
            if able:
                return able
        return []

    def _runners(self, context_id: int, *, fresh: bool) -> Awaitable[list[Fields]]:
        """Return the runners of a context, unless `fresh` as they were a second ago at most."""
        runners = None if fresh else self._runners_of.get(context_id)
        if runners is None:
            runners = asyncio.ensure_future(
                retry_while_unavailable(
                    lambda: self._store.page(RUNNERS, {"context_id": context_id}, after=None, limit=1_000)
                )
            )
            self._runners_of[context_id] = runners
        return asyncio.shield(runners)

    async def _choose_runner(self, url: str, job: Fields) -> Fields | None:
        """Return the runner for a job; None if the node names the address of a supervisor."""
        if url.startswith("runner:"):
            return await self._find_runner(job["context_id"], int(url.removeprefix("runner:")))
        if url:
            return None
        context_id, executor = job["context_id"], job["executor"]
        able = await self._able_runners(context_id, executor)
        if not able:
            raise JobFailed(
                reason_codes.NO_RUNNER, f"context {context_id} has no runner with the executor {executor!r}"
            )
        if len(able) == 1:
            return able[0]
        busy = await retry_while_unavailable(lambda: self._store.busy(context_id, time.time()))
        return min(able, key=lambda each: (busy.get(each["id"], 0), each["id"]))

    async def _find_runner(self, context_id: int, runner_id: int) -> Fields:
        found = await self._load(RUNNERS, key(context_id, runner_id))
        if found is None:
            raise JobFailed(reason_codes.NO_RUNNER, f"context {context_id} has no runner {runner_id}")
        return found

    async def _address(self, dispatch: Dispatching, runner: Fields | None, url: str) -> None:
        """Set where a dispatch goes, and its secret.

        Let the attempt fail if the address or the secret is not usable.
        """
        try:
            if runner is None:
                destination = parse_destination(url)
                runner = await self._runner_at(dispatch.job["context_id"], destination)
                topic = runner["topic"] if runner else destination.topic
                dispatch.destination = replace(destination, topic=topic)
            else:
                dispatch.destination = parse_destination(address_of(runner), topic=runner["topic"])
            dispatch.secret = self._secrets.open(runner["secret"] if runner else None)
        except SecretError as error:
            await self._fail(dispatch, JobFailed(reason_codes.NO_RUNNER, str(error)))
        except ValueError as error:
            await self._fail(dispatch, JobFailed(reason_codes.BAD_INPUT, str(error), permanent=True))

    async def _runner_at(self, context_id: int, destination: Destination) -> Fields | None:
        """Return the runner of a context at this address, whose secret the supervisor expects."""
        wanted = {"context_id": context_id, "addresses": destination.key}
        found = await retry_while_unavailable(lambda: self._store.page(RUNNERS, wanted, after=None, limit=1))
        return found[0] if found else None

    async def _run(self, dispatch: Dispatching, ctx: RunContext) -> JobOutcome:
        """Run a job at its supervisor. Raise JobFailed if there is no outcome. Stop the job if the run is cancelled."""
        assert dispatch.destination is not None
        self._remember(dispatch)
        running = self._supervisors.run(
            dispatch.destination,
            dispatch.wire_job(),
            dispatch.secret,
            timeout_sec=dispatch.job["timeout"],
            on_state=self._state_writer(dispatch),
        )
        try:
            return await ctx.cancellable(running)
        except SupervisorError as error:
            await self._fail(dispatch, JobFailed(error.code, str(error)))
            raise
        except asyncio.CancelledError:
            if ctx.cancel_requested:
                await asyncio.shield(self._stop(dispatch))
            raise

    async def _stop(self, dispatch: Dispatching) -> None:
        assert dispatch.destination is not None
        await self._supervisors.stop(dispatch.destination, dispatch.transport_id, dispatch.secret)
        await self._report(dispatch, JobEvent.STOPPED)

    def _state_writer(self, dispatch: Dispatching) -> Callable[[JobState], Awaitable[None]]:
        async def write(state: JobState) -> None:
            is_running = state is JobState.RUNNING
            await self._report(dispatch, JobEvent.STARTED if is_running else JobEvent.ACCEPTED)

        return write

    async def _report(self, dispatch: Dispatching, event: JobEvent, **fields: Any) -> None:
        assert dispatch.known is not None
        dispatch.known = await self._note(dispatch.id, dispatch.known, dispatch.epoch, event, **fields)

    async def _note(
        self, dispatch_id: str, known: JobDispatch, epoch: int, event: JobEvent, **fields: Any
    ) -> JobDispatch:
        """Store what an attempt reports of a dispatch, with other fields of its record, unless it comes too late.

        Return the dispatch as it is then. All changes of its status are made here, or end it as abandoned.
        """
        return await retry_while_unavailable(lambda: self._try_note(dispatch_id, known, epoch, event, fields))

    async def _try_note(
        self, dispatch_id: str, known: JobDispatch, epoch: int, event: JobEvent, fields: Fields
    ) -> JobDispatch:
        while (new := advance(known, event, epoch)) is not None:
            changed = {**_FIELDS_AFTER[event], **fields, **_stored(new)}
            if await self._store.change_dispatch(dispatch_id, _stored(known), changed, time.time()):
                return new
            found = await self._store.load(MESSAGES, dispatch_id)
            if found is None:  # the run was purged
                break
            known = read_dispatch(found)
        return known

    async def _fail(self, dispatch: Dispatching, error: JobFailed, logs: str | None = None) -> None:
        """Note a failed attempt, and raise its error.

        If the worker is lost in between, the next one raises it again.
        """
        event = JobEvent.FAILED if error.code == reason_codes.JOB_FAILED else JobEvent.NO_OUTCOME
        text = truncate(str(error), _ERROR_CHARS)
        await self._report(dispatch, event, code=error.code, error=text, logs=logs)
        raise error

    def _remember(self, dispatch: Dispatching) -> None:
        self._dispatched[dispatch.transport_id] = dispatch.id

    async def late_reply(self, transport_id: str, reply: LateReply) -> None:
        """Note a reply that came too late, for people. It changes nothing."""
        dispatch_id = self._dispatched.get(transport_id)
        _logger.warning("a reply for job %s came too late, or twice; it is not applied", transport_id)
        if dispatch_id is None:
            return
        try:
            await self._store.add_late_reply(dispatch_id, reply, time.time())
        except FlowKitError as error:  # the other replies that the caller reads are worth more than this one
            _logger.warning("the late reply for job %s is not stored: %s", transport_id, error)


_SENT: Final = {
    "status": MessageStatus.DISPATCHED.value,
    "transport_status": TransportStatus.DELIVERED.value,
}
_ENDED: Final = {"status": MessageStatus.ERROR.value, "open_until": None}
_FIELDS_AFTER: Final[dict[JobEvent, Fields]] = {
    JobEvent.ACCEPTED: _SENT,
    JobEvent.STARTED: _SENT,
    JobEvent.COMPLETED: {**_SENT, "status": MessageStatus.ACKNOWLEDGED.value, "open_until": None},
    JobEvent.FAILED: {**_SENT, **_ENDED},
    JobEvent.NO_OUTCOME: {**_ENDED, "transport_status": TransportStatus.FAILED.value},
    JobEvent.STOPPED: _ENDED,
}
"""The other fields of the record of a dispatch after an event."""


def _stored(dispatch: JobDispatch) -> Fields:
    """Return what decides about the status of a job, as the record of its dispatch has it."""
    return {"state": dispatch.state.value, "outcome": dispatch.outcome, "epoch": dispatch.epoch}


class Dispatching:
    """A dispatch in progress."""

    def __init__(
        self,
        *,
        id: str,
        task_id: str,
        epoch: int,
        job: Fields,
        transport_id: str,
        env_vars: Mapping[str, str],
    ) -> None:
        self.id = id
        self.task_id = task_id
        self.epoch = epoch
        """The attempt."""
        self.known: JobDispatch | None = None
        """The dispatch as this attempt has stored or read it last; None before it is opened."""
        self.job = job
        self.transport_id = transport_id
        self.env_vars = env_vars
        self.destination: Destination | None = None
        self.secret = ""

    def wire_job(self) -> WireJob:
        """Return the job in the form in which a supervisor receives it."""
        return WireJob(
            id=self.transport_id,
            caller_id=str(self.job["caller_id"]),
            context_id=str(self.job["context_id"]),
            payload=self.job["script"],
            executor=self.job["executor"],
            runner=self.job["executor"],
            timeout=self.job["timeout"],
            env_vars={**self.env_vars},
            created_at=_iso(self.job["created_at"]),
            updated_at=_iso(self.job["updated_at"]),
        )


def _foreign(ctx: RunContext, cause: str) -> JobFailed:
    """Return the error of a node that the gateway has not started."""
    problem = (
        f"node {printed(ctx.node_id)} of task {printed(ctx.task_id)} does not run a job: {cause}. Only the "
        f"gateway starts nodes of the type {ROLE!r}; create a flow and call flow.start"
    )
    return JobFailed(reason_codes.BAD_INPUT, problem, permanent=True)


def _id_of(ctx: RunContext) -> str:
    return dispatch_id(ctx.task_id, ctx.node_id, ctx.generation, ctx.failures)


def _iso(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
