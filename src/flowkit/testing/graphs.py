"""Runs whole tasks in one process and without servers, for tests of handlers and graphs."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from flowkit.activities.builtin_functions import default_adapters
from flowkit.activities.params_checks import ParamsChecks
from flowkit.core.time import SystemClock
from flowkit.errors import ConfigError
from flowkit.graph.params import complete_params
from flowkit.graph.scheduled import evaluate_params, format_nominal
from flowkit.graph.submission import convert_to_json, parse_input, validate_input
from flowkit.graph.validation import raise_if, unknown_function
from flowkit.testing.executors import executors
from flowkit.testing.memory import memory_database
from flowkit.testing.runs import GraphRun, NodeRun, read_run
from flowkit.testing.simulation.clock import VirtualClock
from flowkit.testing.simulation.server import TaskServer, TaskStuck
from flowkit.testing.simulation.steering import SimulatedTask, decide_all
from flowkit.testing.stubs import Stub
from flowkit.text import names

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection
    from datetime import datetime

    from flowkit.adapters.mongo import Database
    from flowkit.core.time import Clock
    from flowkit.models import Graph
    from flowkit.testing.simulation.steering import Decisions
    from flowkit.worker import RoleHandler

    Script = Callable[[SimulatedTask], Awaitable[object]]

__all__ = ["GraphRun", "NodeRun", "Pipeline", "run_graph", "simulate"]

_HANGS_AFTER_SEC = 10.0
_HASTE_SEC = 0.2
"""How long `run_graph` lets working attempts delay the retries of others."""

_WAITS = ("deadline_sec", "hold_sec", "hold_on_failure", "prerequisites")
"""Fields of graphs and nodes that `run_graph` ignores."""


@runtime_checkable
class TypedGraph(Protocol):
    """A graph in Python, with its handlers and functions, such as a Flow."""

    @property
    def handlers(self) -> Mapping[str, RoleHandler]:
        """The handlers by role."""

    @property
    def functions(self) -> Mapping[str, Any]:
        """The functions by name."""

    def to_dict(self) -> dict[str, Any]:
        """Return the graph."""


@runtime_checkable
class TypedParams(Protocol):
    """What knows the type of the params of its tasks, such as a Flow."""

    def dump_params(self, params: Any = None) -> dict[str, Any]:
        """Return params as JSON, with their default values."""


def _dump_plain(params: Any = None) -> dict[str, Any]:
    return dict(params or {})


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A graph with what runs it."""

    graph: dict[str, Any]
    handlers: list[RoleHandler]
    functions: dict[str, Any]
    dump_params: Callable[[Any], dict[str, Any]] = _dump_plain
    """Returns params with the default values that the type of a typed graph gives them."""

    @classmethod
    def of(
        cls,
        graph: dict[str, Any] | TypedGraph,
        handlers: Collection[RoleHandler],
        functions: Mapping[str, Any] | None,
    ) -> Pipeline:
        """Return the pipeline of a graph, or of a typed graph with its own handlers and functions.

        `handlers` replace those of a typed graph by role.
        """
        own: Mapping[str, RoleHandler] = {}
        known: Mapping[str, Any] = {}
        plain: Any = graph
        if isinstance(graph, TypedGraph):
            plain, own, known = graph.to_dict(), graph.handlers, graph.functions
        replaced = {each.role for each in handlers}
        kept = [handler for role, handler in own.items() if role not in replaced]
        return cls(
            graph=plain,
            handlers=[*kept, *handlers],
            functions={**known, **(functions or {})},
            dump_params=graph.dump_params if isinstance(graph, TypedParams) else _dump_plain,
        )

    def check_stubs(self, graph: dict[str, Any]) -> None:
        """Raise ConfigError for a stub whose role no node of the valid graph has."""
        roles = {node["type"] for node in graph["nodes"]}
        for each in self.handlers:
            if isinstance(each, Stub) and each.role not in roles:
                known = names(sorted(roles))
                raise ConfigError(
                    f"a stub is for role {each.role!r}, which no node has; the graph has {known}"
                )


async def run_graph(
    graph: dict[str, Any] | TypedGraph,
    *handlers: RoleHandler,
    params: Any = None,
    functions: Mapping[str, Any] | None = None,
    db: Database | None = None,
    scheduled_at: datetime | None = None,
) -> GraphRun:
    """Run a task to its end in this process, without any server, and return its outcome.

    `graph` is a graph, or a `Flow` with its handlers and functions; `handlers` replace those of a flow by role.
    `params` is a dict, or for a flow also a value of the type of its params, whose defaults the flow adds.

    Handlers and coordinator functions run in the same activities as on a worker and an engine, and the workflow is that
    of an engine. `functions` adds to the built-in functions. To give handlers data to read, pass a database as `db`;
    the default is a new `memory_database()`. With `scheduled_at`, which has a time zone, the task runs as one that a
    schedule has started for this nominal time.

    A failed task raises no error; check it with `run.assert_finished()`. Raise GraphError for an invalid graph, and
    ConfigError for a role without a handler, or a stub for a role that no node has.

    Nothing waits: retries follow immediately, delays pass at once, approvals are approved, prerequisites are satisfied,
    no failure is held, and no `deadline_sec` passes. To test these, use `simulate`. Requires the extra
    `flowkit-temporal[testing]`.
    """
    job = await _prepare(Pipeline.of(graph, handlers, functions), params, db, scheduled_at)
    job.pipeline.check_stubs(job.given["graph"])
    clock = VirtualClock(time.time())
    return await job.run(
        clock,
        _without_waits(job.given),
        seen=SystemClock(),
        hangs_after_sec=_HASTE_SEC,
        waits_for_work=True,
        decide=lambda node_id: "approve",
        satisfied=(),
        script=None,
        scheduled_at=scheduled_at,
    )


async def simulate(
    graph: dict[str, Any] | TypedGraph,
    *handlers: RoleHandler,
    params: Any = None,
    functions: Mapping[str, Any] | None = None,
    db: Database | None = None,
    decide: Decisions | None = None,
    satisfied: Collection[str] = (),
    script: Script | None = None,
    start: datetime | None = None,
    scheduled_at: datetime | None = None,
    hangs_after_sec: float = _HANGS_AFTER_SEC,
) -> GraphRun:
    """Run a task as `run_graph` does, with a clock that skips what the task waits for: backoffs, delays, deadlines.

    Its time stands still while handlers and functions work, and passes at once while all wait. `ctx.clock` is this
    clock, so that `await ctx.clock.sleep_ms(...)` takes no real time; `asyncio.sleep` does. It begins at `start`, by
    default now.

    `decide` has the decision of each approval, `approve` or `reject`, or is a function that returns it for a node id.
    An approval without one waits for its deadline. `satisfied` names the prerequisites that are satisfied. `script` is
    a coroutine function that gets the running task, a SimulatedTask, and steers it.

    An attempt that neither ends nor waits on the clock for `hangs_after_sec` seconds counts as hanging. Seconds in
    which a busy machine does not run this process do not count. Time then passes without the attempt, so that its
    `timeout_sec` or a deadline ends it. Raise TaskStuck if nothing ends it, or if the task waits for something else
    that does not happen by itself. Raise ConfigError for the decision of a node that is no approval.
    """
    job = await _prepare(Pipeline.of(graph, handlers, functions), params, db, scheduled_at)
    if script is None:  # A script may add nodes.
        job.pipeline.check_stubs(job.given["graph"])
        job.check_decisions(decide)
    clock = VirtualClock(time.time() if start is None else start.timestamp())
    return await job.run(
        clock,
        job.given,
        seen=clock,
        hangs_after_sec=hangs_after_sec,
        waits_for_work=False,
        decide=decide or {},
        satisfied=satisfied,
        script=script,
        scheduled_at=scheduled_at,
    )


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A valid task that is about to run."""

    task_id: str
    given: dict[str, Any]
    parsed: Graph
    pipeline: Pipeline
    functions: dict[str, Any]
    db: Database

    @property
    def approvals(self) -> list[str]:
        """The nodes that wait for a decision."""
        return [node.node_id for node in self.parsed.nodes if node.approval is not None]

    def check_decisions(self, decide: Decisions | None) -> None:
        """Raise ConfigError for the decision of a node that is no approval."""
        for node_id in decide if isinstance(decide, Mapping) else ():
            if node_id not in self.approvals:
                known = names(self.approvals) or "none"
                raise ConfigError(
                    f"decide has {node_id!r}, which is no approval of the graph; it has {known}"
                )

    async def run(
        self,
        clock: VirtualClock,
        given: dict[str, Any],
        *,
        seen: Clock,
        hangs_after_sec: float,
        waits_for_work: bool,
        decide: Decisions,
        satisfied: Collection[str],
        script: Script | None,
        scheduled_at: datetime | None,
    ) -> GraphRun:
        """Run the task with the input `given`, and return its outcome. Handlers see the clock `seen`."""
        begun = clock.now
        async with executors(self.db, self.parsed, self.pipeline.handlers, self.functions, seen) as ready:
            server = TaskServer(
                self.task_id,
                ready,
                clock,
                hangs_after_sec=hangs_after_sec,
                waits_for_work=waits_for_work,
                scheduled_at=scheduled_at,
            )
            task = SimulatedTask(server)
            server.observe = task.observe
            steering = _Steering(clock, task, self.approvals, decide, satisfied, script)
            async with steering.started():
                await server.run(given, steering.tasks)
                await steering.end(hangs_after_sec)
        return await read_run(self.db, self.task_id, events=ready.trace.events, seconds=clock.now - begun)


class _Steering:
    """What steers a task while it runs: the decisions about its approvals, and the script of the test."""

    def __init__(
        self,
        clock: VirtualClock,
        task: SimulatedTask,
        approvals: list[str],
        decisions: Decisions,
        satisfied: Collection[str],
        script: Script | None,
    ) -> None:
        self._clock = clock
        self._task = task
        self._approvals, self._decisions = approvals, decisions
        self._satisfied, self._script = satisfied, script
        self.tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Steer the task until the end of the block."""
        self.tasks = [asyncio.create_task(each) for each in (self._run_script(), self._decide())]
        try:
            yield
        finally:
            for each in self.tasks:
                each.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _run_script(self) -> None:
        with self._clock.party("the script"):
            for each in self._satisfied:
                await self._task.satisfy(each)
            if self._script is not None:
                await self._script(self._task)

    async def _decide(self) -> None:
        with self._clock.party("the decisions"):
            await decide_all(self._task, self._approvals, self._decisions)

    async def end(self, hangs_after_sec: float) -> None:
        """Let the script continue to its end when the task has ended. Raise its error."""
        scripted = self.tasks[0]
        while not scripted.done():
            settled = await self._clock.settle(hangs_after_sec)
            if scripted.done() or self._clock.advance():
                continue
            if not (settled and await self._clock.news(hangs_after_sec)):
                raise TaskStuck(
                    f"the script has not ended {hangs_after_sec:g} s after the task; wait for states with task.until, "
                    "or pass a larger hangs_after_sec if it takes that long"
                )
        scripted.result()


async def _prepare(
    pipeline: Pipeline, params: Any, db: Database | None, scheduled_at: datetime | None
) -> _Job:
    task_id = str(uuid.uuid4())
    if scheduled_at is not None and isinstance(params, dict):
        params = evaluate_params(params, format_nominal(scheduled_at))
    graph = convert_to_json("graph", pipeline.graph)
    own_params = convert_to_json("params", pipeline.dump_params(params))
    given = {"params": complete_params(graph, own_params), "graph": graph}
    parsed, new = validate_input(task_id, given), parse_input(task_id, given)
    await ParamsChecks().check(new.graph, new.params)
    database = memory_database() if db is None else db
    known = {**default_adapters(db=database), **pipeline.functions}
    raise_if([problem for node in new.graph["nodes"] if (problem := unknown_function(node, known))])
    return _Job(
        task_id=task_id,
        given={"params": new.params, "graph": new.graph},
        parsed=parsed,
        pipeline=pipeline,
        functions=known,
        db=database,
    )


def _without_waits(given: dict[str, Any]) -> dict[str, Any]:
    """Return the input of a task that waits for no operator, and whose deadlines do not pass."""
    graph = {key: value for key, value in given["graph"].items() if key not in _WAITS}
    nodes = [{key: value for key, value in node.items() if key not in _WAITS} for node in graph["nodes"]]
    return {**given, "graph": {**graph, "nodes": nodes}}
