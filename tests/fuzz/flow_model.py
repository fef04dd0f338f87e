"""Random flows, and a model of how they may end, written from docs/flows.md. It shares no rule with the gateway."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from flowkit.gateway.models import NodeStatus
from flowkit.gateway.status import EDGES
from flowkit.testing.supervisor import Misbehavior

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterator, Mapping, Sequence

Fields = dict[str, Any]
Generations = dict[int, int]
"""Which generation of each job a run has, by id of the job: the second if a retry of the flow has started it again."""

DEPLOYMENT: Final = "f10f10f1"
"""The id of the database."""
CONTEXT: Final = 3
CALLER: Final = 11
MOST_RETRIES: Final = 2
SYNC_TIMEOUT_SEC: Final = 40.0
POLL_TIMEOUT_SEC: Final = 90.0
"""Timeouts of jobs: up to a minute, the handler waits for the reply to `job.run`; above, it asks for the status."""

FAILURES: Final = (Misbehavior.ERROR, Misbehavior.NO_JSON, Misbehavior.OTHER_REQUEST, Misbehavior.NO_OUTCOME)
"""What fails an attempt. The last one does so in a reply to `job.run` only, since other replies have no outcome."""
INTERRUPTIONS: Final = (Misbehavior.DISCONNECT, Misbehavior.RUN_THEN_DISCONNECT, Misbehavior.STATUS_500)
"""What lets the handler deliver the job again, with the same id."""
_ALWAYS: Final = 100
"""More deliveries than one attempt has, however often its handler is lost."""

COMPLETED, FAILED, CANCELLED = "Completed", "Failed", "Cancelled"
FINISHED, ERROR = "Finished", "Error"


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """A job, and what its supervisor does wrong."""

    id: int
    script: str
    retries: int
    timeout: float
    depends: tuple[int, ...] = ()
    prerequisites: tuple[str, ...] = ()
    misbehavior: Mapping[tuple[int, int], list[Misbehavior]] = field(default_factory=dict)
    """What goes wrong with the deliveries of an attempt, by generation and retry."""

    def wire_id(self, generation: int, retry: int) -> str:
        """Return the id of an attempt at the supervisor."""
        first = f"{DEPLOYMENT}:{CONTEXT}:{CALLER}:{self.id}"
        return f"{first}/{generation}.{retry}" if generation or retry else first

    def attempts(self, generation: int) -> int:
        """Return how many attempts a generation has until the job succeeds or its retries are used up."""
        tries = range(self.retries + 1)
        return next((retry + 1 for retry in tries if self._succeeds(generation, retry)), len(tries))

    def ends(self, generation: int) -> str:
        """Return how a generation ends, if it starts and nobody cancels it."""
        return COMPLETED if self._succeeds(generation, self.attempts(generation) - 1) else FAILED

    def _succeeds(self, generation: int, retry: int) -> bool:
        planned = self.misbehavior.get((generation, retry), [])
        return not self.script.startswith("fail:") and not set(planned) & set(FAILURES)


@dataclass(frozen=True, kw_only=True)
class FlowPlan:
    """A flow, and what its client does."""

    id: int
    jobs: tuple[JobPlan, ...]
    on_failure: str
    start_after: float
    """Seconds from the beginning of the play until the client creates and starts the flow."""
    satisfy_after: Mapping[str, float]
    """Seconds after the start at which each prerequisite is satisfied."""
    cancel_after: float | None
    is_retried: bool
    """Whether the client retries the flow after an error."""
    drops: tuple[int, ...]
    """Numbers of events after which the client drops its connections, one after the other."""

    def run_id(self, run: int) -> str:
        """Return the id of the first run, or of the retry of it."""
        return f"flow:{DEPLOYMENT}:{CONTEXT}:{self.id}/1" + ("" if run == 1 else f".{run}")


def random_flow(chance: random.Random, id: int) -> FlowPlan:
    """Return a random flow."""
    jobs: list[JobPlan] = []
    names: list[str] = []
    for number in range(chance.randint(2, 8)):
        own = (f"approval:{number}",) if chance.random() < 0.15 else ()
        shared = tuple(name for name in names if chance.random() < 0.2)
        parents = [job.id for job in jobs if chance.random() < 0.4]
        jobs.append(_random_job(chance, id * 100 + number, tuple(parents), own + shared))
        names += own
    return FlowPlan(
        id=id,
        jobs=tuple(jobs),
        on_failure=chance.choice(["finish_running", "continue"]),
        start_after=chance.uniform(0.0, 2.0),
        satisfy_after={name: chance.uniform(0.0, 2.0) for name in names},
        cancel_after=chance.uniform(0.0, 4.0) if chance.random() < 0.2 else None,
        is_retried=chance.random() < 0.6,
        drops=tuple(chance.randint(1, 12) for _ in range(chance.randint(0, 4))),
    )


def _random_job(
    chance: random.Random, id: int, depends: tuple[int, ...], prerequisites: tuple[str, ...]
) -> JobPlan:
    retries = chance.randint(0, MOST_RETRIES)
    timeout = chance.choice([SYNC_TIMEOUT_SEC, POLL_TIMEOUT_SEC])
    planned = {
        (generation, retry): wrong
        for generation in range(2)
        for retry in range(retries + 1)
        if (wrong := _random_misbehavior(chance, timeout))
    }
    return JobPlan(
        id=id,
        script=_random_script(chance, id),
        retries=retries,
        timeout=timeout,
        depends=depends,
        prerequisites=prerequisites,
        misbehavior=planned,
    )


def _random_script(chance: random.Random, id: int) -> str:
    drawn = chance.random()
    if drawn < 0.06:
        return f"fail:job {id} is broken"
    return f"sleep:{chance.uniform(0.05, 1.5):.2f}" if drawn < 0.4 else f"result of {id}"


def _random_misbehavior(chance: random.Random, timeout: float) -> list[Misbehavior]:
    """Return what goes wrong with the deliveries of one attempt. A failure occurs again if the handler is lost."""
    interruptions = chance.choices(INTERRUPTIONS, k=chance.choice([0, 0, 0, 1, 2]))
    if chance.random() > 0.2:
        return interruptions
    return interruptions + [chance.choice(FAILURES if timeout <= 60 else FAILURES[:-1])] * _ALWAYS


# --- statuses ---------------------------------------------------------------------------------------------------


def run_problems(flow: FlowPlan, view: Fields, generations: Generations, run: int) -> Iterator[str]:
    """Yield what is wrong with the final state of a run, which `flow.status` has returned. Only run 1 is cancelled."""
    statuses = {int(id): node["node_status"] for id, node in view["nodes"].items()}
    is_cancelled = view["cause"] == "cancelled"
    if is_cancelled and (flow.cancel_after is None or run != 1):
        yield "nobody has cancelled the flow"
    for job in flow.jobs:
        found = (statuses[job.id], view["nodes"][str(job.id)]["cause"])
        allowed = _allowed_ends(flow, job, statuses, generations[job.id], is_cancelled=is_cancelled)
        if found not in allowed:
            yield f"job {job.id} is {found}, but must be one of {sorted(allowed, key=str)}"
    everything = set(statuses.values()) == {COMPLETED}
    if view["status"] != (FINISHED if everything and not is_cancelled else ERROR):
        yield f"the flow is {view['status']} ({view['cause']}) with the jobs {statuses}"
    failed = [id for id, status in statuses.items() if status == FAILED]
    if view["failed_job"] != next(iter(failed), None):
        yield f"the failed job is {view['failed_job']}, but must be the first of {failed}"


def _allowed_ends(
    flow: FlowPlan, job: JobPlan, statuses: Mapping[int, str], generation: int, *, is_cancelled: bool
) -> set[tuple[str, str | None]]:
    """Return the statuses in which a job may end beside these ends of the others, each with its cause.

    When the flow is cancelled, or stops after a failure, it depends on the time which jobs still run.
    """
    found: set[tuple[str, str | None]] = set()
    if all(statuses[parent] == COMPLETED for parent in job.depends):
        found.add((job.ends(generation), None))
    if any(statuses[each] == FAILED for each in _ancestors(flow, job)):
        found.add((CANCELLED, "upstream_failed"))
    if flow.on_failure == "finish_running" and FAILED in statuses.values():
        found.add((CANCELLED, "flow_failed"))
    if is_cancelled:
        found.add((CANCELLED, "cancelled"))
    return found


def _ancestors(flow: FlowPlan, job: JobPlan) -> set[int]:
    jobs = {each.id: each for each in flow.jobs}
    return set(job.depends).union(*(_ancestors(flow, jobs[parent]) for parent in job.depends))


def first_generations(flow: FlowPlan) -> Generations:
    """Return the generations of the first run."""
    return {job.id: 0 for job in flow.jobs}


def next_generations(view: Fields) -> Generations:
    """Return the generations of the retry of a run: each job starts again that is not completed."""
    return {int(id): int(node["node_status"] != COMPLETED) for id, node in view["nodes"].items()}


# --- deliveries -------------------------------------------------------------------------------------------------


def wire_problems(
    flow: FlowPlan,
    view: Fields,
    generations: Generations,
    delivered: Collection[str],
    executions: Mapping[str, int],
) -> Iterator[str]:
    """Yield what is wrong with the jobs that the supervisor has received and run for one run of a flow."""
    for job in flow.jobs:
        generation, node = generations[job.id], view["nodes"][str(job.id)]
        status, cause = node["node_status"], node["cause"]
        ids = [job.wire_id(generation, retry) for retry in range(job.retries + 1)]
        wanted = ids[: job.attempts(generation)] if cause in (None, "cancelled") else []
        found = [id for id in ids if id in delivered]
        if found != wanted[: len(found)] or (cause is None and found != wanted):
            yield f"job {job.id} is {status} ({cause}) after {found}, but must be so after {wanted}"
        if status == COMPLETED and executions[wanted[-1]] != 1:
            yield f"{wanted[-1]} is completed after {executions[wanted[-1]]} executions"
        yield from (f"the supervisor has run {id} {executions[id]} times" for id in ids if executions[id] > 1)


def known_wire_ids(flow: FlowPlan, generations: Sequence[Generations]) -> set[str]:
    """Return all ids that the supervisor may receive for these runs of a flow."""
    return {
        job.wire_id(own[job.id], retry)
        for own in generations
        for job in flow.jobs
        for retry in range(job.retries + 1)
    }


# --- events -----------------------------------------------------------------------------------------------------


def event_problems(
    flow: FlowPlan, events: Sequence[Fields], views: Sequence[Fields], generations: Sequence[Generations]
) -> Iterator[str]:
    """Yield what is wrong with the events of a flow, given the final states of its runs."""
    if [event["seq"] for event in events] != [*range(1, len(events) + 1)]:
        yield f"the numbers of the events are {[event['seq'] for event in events]}"
    own = [(e["run_id"], e["from"], e["to"]) for e in events if e["node"] is None]
    wanted = []
    for run, view in enumerate(views, 1):
        wanted += [
            (flow.run_id(run), "Created", "Started"),
            (flow.run_id(run), "Started", view["status"]),
        ]
    if own != wanted:
        yield f"the events of the flow are {own}, but must be {wanted}"
    yield from _EventReader(flow).problems(events, views[-1], generations[-1])


class _EventReader:
    """Follows the statuses of the nodes of a flow through its events."""

    def __init__(self, flow: FlowPlan) -> None:
        self._jobs = {job.id: job for job in flow.jobs}
        self._status: dict[int, str] = {}
        self._attempt: dict[int, int] = {}
        self._begun: dict[int, list[str]] = defaultdict(list)
        """The runs in which each node has begun a generation."""

    def problems(self, events: Sequence[Fields], view: Fields, generations: Generations) -> Iterator[str]:
        for event in events:
            if event["node"] is not None:
                yield from (f"{problem}: {event}" for problem in self._read(event["node"], event))
        for job in self._jobs:
            status = view["nodes"][str(job)]["node_status"]
            if self._status.get(job) != status:
                yield f"the events of job {job} end with {self._status.get(job)}, but it is {status}"
            if len(self._begun[job]) != generations[job] + 1:
                yield f"job {job} has begun in {self._begun[job]}, but has {generations[job] + 1} generations"

    def _read(self, node: int, event: Fields) -> Iterator[str]:
        """Apply an event, and yield what is wrong with it."""
        before, to = event["from"], event["to"]
        if before == NodeStatus.PENDING:
            yield from self._begin(node, event["run_id"])
        elif before != self._status.get(node):
            yield f"the node was {self._status.get(node)}"
        if to not in EDGES[NodeStatus(before)]:
            yield "there is no such transition"
        self._attempt[node] = self._attempt.get(node, 1) + (before == FAILED)
        if event["attempt"] != self._attempt[node]:
            yield f"the attempt must be {self._attempt[node]}"
        # A cancel that comes with the last failure ends one more attempt, which never begins.
        if event["attempt"] > self._jobs[node].retries + 1 and to not in (NodeStatus.READY, CANCELLED):
            yield f"the job has {self._jobs[node].retries} retries"
        if to == NodeStatus.READY:
            yield from self._check_parents(node)
        self._status[node] = to

    def _begin(self, node: int, run: str) -> Iterator[str]:
        if run in self._begun[node]:
            yield "the node has begun in this run before"
        self._begun[node].append(run)
        self._attempt[node] = 1

    def _check_parents(self, node: int) -> Iterator[str]:
        parents = {parent: self._status.get(parent) for parent in self._jobs[node].depends}
        if set(parents.values()) - {COMPLETED}:
            yield f"the node is ready, but those before it are {parents}"
