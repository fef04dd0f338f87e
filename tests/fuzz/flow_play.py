"""Flows that clients drive through a gateway, while its processes are killed, and what each flow must show
at its end."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter, defaultdict
from contextlib import AsyncExitStack, aclosing
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from tests.fuzz.flow_model import (
    CALLER,
    COMPLETED,
    CONTEXT,
    ERROR,
    FAILED,
    FINISHED,
    event_problems,
    first_generations,
    known_wire_ids,
    next_generations,
    random_flow,
    run_problems,
    wire_problems,
)
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, wait_seconds

from flowkit.gateway.client import CallFailed, GatewayClient, GatewayUnavailable
from flowkit.local.ports import free_port

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from tests.fork_server import ForkedProcess
    from tests.fuzz.flow_model import FlowPlan, Generations, JobPlan
    from tests.integration.harness import Harness

    from flowkit.testing.supervisor import Supervisor

Fields = dict[str, Any]

RUN_SEC: Final = 90.0
"""Seconds after which a run counts as stuck; much longer than runs take."""
_PAUSE_SEC: Final = 0.2
"""Time between two calls of a gateway that does not respond."""
_INVALID_TRANSITION: Final = -32004
_STORAGE_ERROR: Final = -32010


class Part(StrEnum):
    """A process that a play kills."""

    GATEWAY = "gateway"
    WITH_JOBS = "gateway that dispatches jobs"
    ENGINE = "engine"


class Processes:
    """Two gateways, of which one dispatches jobs, and an engine, each in a process of its own."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._ports = {part: free_port() for part in (Part.GATEWAY, Part.WITH_JOBS)}
        self._running: dict[Part, ForkedProcess] = {}

    @property
    def urls(self) -> list[str]:
        """The addresses of the gateways, always the same."""
        return [f"http://127.0.0.1:{port}" for port in self._ports.values()]

    def start(self, part: Part) -> None:
        """Start a process."""
        self._running[part] = self._started(part)

    async def replace(self, part: Part) -> None:
        """Kill a process, and start another one in its place."""
        self._running[part].kill()
        self._running[part].wait(EVENT_TIMEOUT_SEC)
        if part is Part.ENGINE:
            await self._harness.release_tasks()
        self.start(part)

    def _started(self, part: Part) -> ForkedProcess:
        if part is Part.ENGINE:
            return self._harness.engine_process()
        jobs = "--jobs" if part is Part.WITH_JOBS else "--no-jobs"
        ports = ("--port", str(self._ports[part]), "--websocket-port", str(free_port()))
        return self._harness.process("gateway", jobs, *ports, "--supervisor-networks", "loopback")


class FlowsPlay:
    """Some flows in parallel, and the processes that are killed meanwhile."""

    def __init__(self, chance: random.Random, first_id: int, flows: int, kills: int) -> None:
        self.flows = [random_flow(chance, id) for id in range(first_id, first_id + flows)]
        parts = [*chance.sample([*Part], len(Part)), *chance.choices([*Part], k=max(0, kills - len(Part)))]
        self._kills = [(chance.uniform(0.3, 1.2), part) for part in parts[:kills]]
        self.counts: Counter[str] = Counter()

    async def run(self, processes: Processes, supervisor: Supervisor) -> list[str]:
        """Run the flows, and return all problems."""
        self._prepare(supervisor)
        async with AsyncExitStack() as stack:
            gateways = [await stack.enter_async_context(GatewayClient(url)) for url in processes.urls]
            clients = [FlowClient(gateways, flow, supervisor.url) for flow in self.flows]
            async with asyncio.TaskGroup() as group:
                group.create_task(self._kill(processes))
                for each in clients:
                    group.create_task(each.drive())
        for each in clients:
            self.counts.update(each.counts)
        received = received_ids(supervisor)
        self.counts["repeated delivery"] += len(received) - len({*received})
        return [problem for each in clients for problem in each.find_problems({*received}, supervisor)]

    def _prepare(self, supervisor: Supervisor) -> None:
        """Let the supervisor misbehave as planned."""
        for flow in self.flows:
            for job in flow.jobs:
                for attempt, wrong in job.misbehavior.items():
                    supervisor.misbehave(job.wire_id(*attempt), *wrong)

    async def _kill(self, processes: Processes) -> None:
        for pause, part in self._kills:
            await wait_seconds(pause)
            await processes.replace(part)
            self.counts[f"killed {part}"] += 1


class FlowClient:
    """A client that drives one flow, and follows its events over connections that break.

    It calls the gateways in turn, as behind a load balancer.
    """

    def __init__(self, gateways: Sequence[GatewayClient], flow: FlowPlan, supervisor_url: str) -> None:
        self._gateways = itertools.cycle(gateways)
        self._flow = flow
        self._supervisor_url = supervisor_url
        self._own = {"context_id": CONTEXT, "id": flow.id}
        self._events: list[Fields] = []
        self._again: list[Fields] = []
        """The same events, read once more at the end."""
        self._ended: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """Set at the end of a run, by its id."""
        self._views: list[Fields] = []
        self._generations: list[Generations] = []
        self._results: dict[int, Fields] = {}
        self._problems: list[str] = []
        self.counts: Counter[str] = Counter()

    async def drive(self) -> None:
        """Create the flow, run it, and retry it if it ends with an error and the plan says so."""
        await wait_seconds(self._flow.start_after)
        await self._create()
        follower = asyncio.create_task(self._follow())
        try:
            await self._run(self._start, 1)
            if self._flow.is_retried and self._views[0]["status"] == ERROR:
                await self._run(self._retry, 2)
            await self._read_again()
        except TimeoutError:
            state = await self._call("flow.status", self._own)
            raise AssertionError(f"flow {self._flow.id} is stuck: {state}, {self._flow}") from None
        finally:
            follower.cancel()
            await asyncio.wait([follower])

    async def _create(self) -> None:
        owner = {"context_id": CONTEXT, "caller_id": CALLER}
        for job in self._flow.jobs:
            fields = {"script": job.script, "timeout": job.timeout, "retries": job.retries}
            made = {**owner, **fields, "id": job.id, "executor": "echo"}
            await self._call("job.create", {"context_id": CONTEXT, "job": made})
        nodes = [self._node(job) for job in self._flow.jobs]
        flow = {**owner, "id": self._flow.id, "nodes": nodes, "on_failure": self._flow.on_failure}
        await self._call("flow.create", {"context_id": CONTEXT, "flow": flow})

    def _node(self, job: JobPlan) -> Fields:
        waits = {"depends": [*job.depends], "prerequisites": [*job.prerequisites]}
        return {"id": job.id, **waits, "supervisor_url": self._supervisor_url}

    async def _start(self) -> None:
        """Start the flow twice at the same time."""
        first, second = await asyncio.gather(self._start_once(), self._start_once())
        if {first, second} != {self._flow.run_id(1)}:
            self._note(f"two starts have returned {first} and {second}")

    async def _start_once(self) -> str:
        """Start the flow, and return the id of the run.

        If the connection is lost, look first whether it has started.
        """

        async def look() -> str | None:
            state = await self._call("flow.status", self._own)
            if state["run_id"] is not None:
                return str(state["run_id"])
            started = await self._try("flow.start", self._own)
            return str(started[0]["run_id"]) if started else None

        return await eventually(look)

    async def _retry(self) -> None:
        """Retry the flow. If the connection was lost, an earlier call may have started the run."""
        try:
            made = await self._call("flow.retry", self._own)
        except CallFailed as error:
            view = await self._call("flow.status", self._own)
            if error.rpc_code != _INVALID_TRANSITION or view["run_id"] != self._flow.run_id(2):
                raise
            return
        if made["run_id"] != self._flow.run_id(2):
            self._note(f"the retry has returned {made}")

    async def _run(self, begin: Callable[[], Awaitable[None]], number: int) -> None:
        """Begin a run, do to it what is planned, and check it at its end."""
        await begin()
        async with asyncio.TaskGroup() as group:
            for name, pause in self._flow.satisfy_after.items():
                group.create_task(self._satisfy(name, pause))
            if self._flow.cancel_after is not None and number == 1:
                group.create_task(self._cancel(self._flow.cancel_after))
        async with asyncio.timeout(RUN_SEC):
            await self._ended[self._flow.run_id(number)].wait()
        view = await self._call("flow.status", self._own)
        if view["run_id"] != self._flow.run_id(number):
            self._note(f"the run {number} is {view['run_id']}")
        before = next_generations(self._views[-1]) if self._views else first_generations(self._flow)
        self._views.append(view)
        self._generations.append(before)
        self._problems += [f"run {number}: {each}" for each in run_problems(self._flow, view, before, number)]
        self.counts[f"{view['status']} run" if view["cause"] != "cancelled" else "cancelled run"] += 1
        self.counts.update(f"{node['node_status']} job" for node in view["nodes"].values())
        for job in self._flow.jobs:
            await self._check_result(job, view["nodes"][str(job.id)]["node_status"])

    async def _satisfy(self, name: str, pause: float) -> None:
        """Satisfy a prerequisite, unless the run ends before. A rejected call would leave a run that waits stuck."""
        await wait_seconds(pause)
        try:
            await self._call("node.satisfy", {**self._own, "prerequisite": name})
        except CallFailed as error:
            if error.rpc_code != _INVALID_TRANSITION:
                raise
            self.counts["satisfied too late"] += 1

    async def _cancel(self, pause: float) -> None:
        await wait_seconds(pause)
        await self._call("flow.cancel", self._own)

    async def _check_result(self, job: JobPlan, status: str) -> None:
        found = await self._call("job.result", self._own | {"id": job.id, "flow_id": self._flow.id})
        result = job.script if status == COMPLETED else None
        if (found["node_status"], found["result"]) != (status, result):
            self._note(f"job {job.id} is {status}, and its result must be {result!r}: {found}")
        if (found["error"] is not None) != (status == FAILED):
            self._note(f"job {job.id} is {status}, and its error is {found['error']!r}")

    async def _follow(self) -> None:
        """Collect the events, over connections that the plan drops, or that break."""
        drops = [*self._flow.drops]
        while True:
            try:
                if await self._follow_once(drops[0] if drops else None):
                    drops.pop(0)
                    self.counts["dropped connection"] += 1
            except GatewayUnavailable:
                await wait_seconds(_PAUSE_SEC)

    async def _follow_once(self, most: int | None) -> bool:
        """Collect events until there are so many, and return True; False if the connection ends before."""
        begin = len(self._events)
        async with self._subscription(self._events[-1]["seq"] if self._events else 0) as events:
            async for event in events:
                self._events.append(event)
                if event["node"] is None and event["to"] in (FINISHED, ERROR):
                    self._ended[event["run_id"]].set()
                if len(self._events) - begin == most:
                    return True
        self.counts["lost connection"] += 1
        return False

    def _subscription(self, after: int) -> AbstractAsyncContextManager[Any]:
        return aclosing(next(self._gateways).events(CONTEXT, self._flow.id, after))

    async def _read_again(self) -> None:
        """Read all events with one more subscription."""

        async def look() -> bool:
            found: list[Fields] = []
            try:
                async with self._subscription(0) as events:
                    async for event in events:
                        found.append(event)
                        if event["seq"] >= self._events[-1]["seq"]:
                            self._again = found
                            return True
            except GatewayUnavailable:
                pass
            return False

        await eventually(look, RUN_SEC)

    async def _call(self, method: str, params: Mapping[str, Any]) -> Any:
        """Call a method, again while the gateway or what it needs does not respond."""
        return (await eventually(lambda: self._try(method, params)))[0]

    async def _try(self, method: str, params: Mapping[str, Any]) -> list[Any]:
        """Call a method, and return its result in a list; an empty one if the gateway or MongoDB does not respond."""
        try:
            return [await next(self._gateways).call(method, params)]
        except GatewayUnavailable:
            self.counts["repeated call"] += 1
            await wait_seconds(_PAUSE_SEC)
        except CallFailed as error:
            if error.rpc_code != _STORAGE_ERROR:
                raise
            self.counts["storage error"] += 1
        return []

    def _note(self, problem: str) -> None:
        self._problems.append(problem)

    # --- the end

    def find_problems(self, received: set[str], supervisor: Supervisor) -> list[str]:
        """Return what is wrong with the flow, with its plan. The supervisor has received jobs with these ids."""
        found = [*self._problems, *self._problems_of_events(), *self._problems_of_jobs(received, supervisor)]
        return [f"flow {self._flow.id}: {each}" for each in found] + [str(self._flow)] * bool(found)

    def _problems_of_events(self) -> Iterator[str]:
        if self._again != self._events:
            yield f"the events were sent as {self._events}, and then as {self._again}"
        yield from event_problems(self._flow, self._events, self._views, self._generations)

    def _problems_of_jobs(self, received: set[str], supervisor: Supervisor) -> Iterator[str]:
        jobs = {job.wire_id(0, 0) for job in self._flow.jobs}
        own = {id for id in received if re.split("[/@]", id)[0] in jobs}
        if unknown := own - known_wire_ids(self._flow, self._generations):
            yield f"the supervisor has received {unknown}"
        for view, generations in zip(self._views, self._generations, strict=True):
            yield from wire_problems(self._flow, view, generations, own, supervisor.executions)


def received_ids(supervisor: Supervisor) -> list[str]:
    """Return the ids of the jobs that a supervisor has received, once for each delivery."""
    given = [params for request in supervisor.requests for params in request["params"] if "job" in params]
    return [params["job"]["id"] for params in given]
