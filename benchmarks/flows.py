"""Flows and jobs by JSON-RPC: the gateway compared with a hand-written workflow, and with a bare HTTP route."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp

from benchmarks import baseline, flows_by_hand
from benchmarks.flows_by_hand import CALLER, CONTEXT, TIMEOUT_SEC
from benchmarks.processes import SHARED, Program, by_hand, flowkit
from benchmarks.rows import Group, Row, Setting, Side, Sides, Target, emptied
from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskClient
from flowkit.connection import connect
from flowkit.gateway.client import GatewayClient, GatewayUnavailable
from flowkit.local.ports import free_port
from flowkit.models import TaskStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping

    from temporalio.client import Client

QUEUE = "benchmark-flows"
DATABASE = "flowkit"
CHAIN_JOBS, CHAINS = 20, 3
FLOWS, MANY_FLOWS, WARM_UP_FLOWS = 100, 200, 20
REQUESTS, CONNECTIONS = 1_500, 16
PAYLOAD = "done"
_TRIES = 1_200

CHAIN_LEVELS = [[job] for job in range(1, CHAIN_JOBS + 1)]
DIAMOND = [[1], [2, 3, 4], [5]]
DIAMOND_JOBS = 5

CHAIN = Row(
    name=f"flows: chain of {CHAIN_JOBS} jobs",
    unit="ms/job",
    items=CHAINS * CHAIN_JOBS,
    item="job",
    targets={"flowkit": Target(ratio="<= 1.15")},
    rounds=3,
    always=False,
)
AT_ONCE, MANY_AT_ONCE = (
    Row(
        name=f"flows: {count} of {DIAMOND_JOBS} jobs at once",
        unit="flows/s",
        items=count,
        item="flow",
        targets={"flowkit": Target(ratio=">= 0.95")},
        rounds=2,
        always=count == FLOWS,
    )
    for count in (FLOWS, MANY_FLOWS)
)
STATUS = Row(
    name="flows: flow.status beside a bare route",
    unit="requests/s",
    items=REQUESTS + REQUESTS // 10,
    item="request",
    targets={"flowkit": Target(ratio=">= 0.75")},
    rounds=3,
)

Levels = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Ports:
    """The ports of the processes."""

    gateway: int = field(default_factory=free_port)
    websocket: int = field(default_factory=free_port)
    supervisor: int = field(default_factory=free_port)
    bare: int = field(default_factory=free_port)


def programs(ports: Ports) -> list[Program]:
    """Return the programs of both sides, and the supervisor that both call."""
    gateway = ("--no-jobs", "--port", str(ports.gateway), "--websocket-port", str(ports.websocket))
    jobs = ("gateway", "jobs", "--queue", QUEUE, "--supervisor-networks", "loopback")
    return [
        flowkit("engine", "engine", "--queue", QUEUE),
        flowkit("gateway", "gateway", *gateway, "--queue", QUEUE),
        flowkit("worker", *jobs),
        by_hand("supervisor", "flowkit.testing.supervisor", "--port", str(ports.supervisor), side=SHARED),
        by_hand("engine", "benchmarks.flows_by_hand", "workflows"),
        by_hand("worker", "benchmarks.flows_by_hand", "activities"),
        by_hand("gateway", "benchmarks.bare_status", str(ports.bare), side="route"),
    ]


@asynccontextmanager
async def opened(setting: Setting) -> AsyncIterator[Mapping[str, Sides]]:
    """Start the programs of both sides, and yield how the rows take samples."""
    async with running(setting) as flows:
        yield sides_of(flows, partial(emptied, setting.mongo, [DATABASE, flows_by_hand.DATABASE]))


@asynccontextmanager
async def running(setting: Setting) -> AsyncIterator[Flows]:
    """Start the programs of both sides, and yield what runs flows on them."""
    ports = Ports()
    with setting.processes.running(*programs(ports)):
        tasks = TaskClient(await connect(), TaskStore(setting.mongo[DATABASE]), queue=QUEUE)
        async with GatewayClient(f"http://127.0.0.1:{ports.gateway}") as gateway:
            flows = Flows(gateway, tasks, await baseline.connect(), ports)
            await flows.prepare()
            yield flows


def sides_of(flows: Flows, clean: Callable[[], Awaitable[None]]) -> Mapping[str, Sides]:
    """Return how the rows take samples."""
    written = partial(Side, programs="baseline", warm_up=partial(flows.by_hand, DIAMOND, WARM_UP_FLOWS))
    ours = partial(Side, programs="flowkit", warm_up=flows.warm_up)
    chain = {
        "baseline": written(run=flows.chains_by_hand),
        "flowkit": ours(run=flows.chains_by_flowkit, prepare=partial(flows.create, CHAIN_LEVELS, CHAINS)),
    }
    at_once = {
        row.name: {
            "baseline": written(run=partial(flows.at_once_by_hand, row.items)),
            "flowkit": ours(run=flows.at_once_by_flowkit, prepare=partial(flows.create, DIAMOND, row.items)),
        }
        for row in (AT_ONCE, MANY_AT_ONCE)
    }
    status = {
        "baseline": Side(run=flows.bare_status, programs="route", warm_up=flows.show_another),
        "flowkit": Side(run=flows.status, programs="flowkit"),
    }
    return {
        CHAIN.name: Sides(sides=chain, clean=clean),
        **{name: Sides(sides=sides, clean=clean) for name, sides in at_once.items()},
        STATUS.name: Sides(sides=status, clean=flows.show_another),
    }


class Flows:
    """Runs flows on either side, and asks for the status of one."""

    def __init__(self, gateway: GatewayClient, tasks: TaskClient, client: Client, ports: Ports) -> None:
        self._gateway = gateway
        self._tasks = tasks
        self._client = client
        self._ports = ports
        self._ids = itertools.count(1)
        self._shown = 0
        """The flow whose status is asked for."""
        self._created: list[int] = []

    @property
    def supervisor(self) -> str:
        """The address of the supervisor."""
        return f"http://127.0.0.1:{self._ports.supervisor}"

    async def prepare(self) -> None:
        """Wait for the gateway, then create the context, the runner and the jobs."""
        await self._wait_for_gateway()
        own, call = {"context_id": CONTEXT}, self._gateway.call
        await call("context.create", {"context": {"id": CONTEXT, "admins": [CALLER], "executors": [CALLER]}})
        runner = {"id": 1, "address": self.supervisor, "executors": ["echo"]}
        await call("runner.create", {**own, "runner": runner})
        job = {**own, "caller_id": CALLER, "script": PAYLOAD, "executor": "echo", "timeout": TIMEOUT_SEC}
        for id in range(1, CHAIN_JOBS + 1):
            await call("job.create", {**own, "job": {**job, "id": id}})

    async def _wait_for_gateway(self) -> None:
        for _ in range(_TRIES):
            with suppress(GatewayUnavailable):
                await self._gateway.call("context.list")
                return
            await asyncio.sleep(0.1)
        raise RuntimeError("the gateway does not start")

    # --- runs

    async def warm_up(self) -> None:
        """Run some flows at once, which takes less time than a whole sample."""
        await self.create(DIAMOND, WARM_UP_FLOWS)
        await self.at_once_by_flowkit()

    async def chains_by_hand(self) -> float:
        """Run chains one after another, and return the milliseconds per job."""
        return sum([await self.by_hand(CHAIN_LEVELS, 1) for _ in range(CHAINS)]) / CHAINS / CHAIN_JOBS * 1000

    async def chains_by_flowkit(self) -> float:
        """Run the flows that `create` has made one after another, and return the milliseconds per job."""
        began = time.perf_counter()
        for id in self._created:
            await self._run(id)
        return (time.perf_counter() - began) / CHAINS / CHAIN_JOBS * 1000

    async def at_once_by_hand(self, count: int) -> float:
        """Run flows at once, and return the flows per second."""
        return count / await self.by_hand(DIAMOND, count)

    async def at_once_by_flowkit(self) -> float:
        """Run the flows that `create` has made at once. Return the flows per second, from the first `flow.start`."""
        began = time.perf_counter()
        await asyncio.gather(*(self._run(id) for id in self._created))
        return len(self._created) / (time.perf_counter() - began)

    async def by_hand(self, levels: Levels, count: int) -> float:
        """Return the seconds from the start of the first workflow to the end of the last one."""
        plan = {"levels": levels, "payload": PAYLOAD, "supervisor": self.supervisor}
        workflow, queue = flows_by_hand.FlowByHand.run, flows_by_hand.QUEUE

        async def run() -> None:
            await self._client.execute_workflow(
                workflow, plan, id=f"by-hand-{uuid.uuid4()}", task_queue=queue
            )

        began = time.perf_counter()
        await asyncio.gather(*(run() for _ in range(count)))
        return time.perf_counter() - began

    async def create(self, levels: Levels, count: int) -> list[int]:
        """Create flows for the next sample, and return their ids."""
        own = {"context_id": CONTEXT, "caller_id": CALLER}
        nodes = [
            {"id": job, "depends": before}
            for before, level in itertools.pairwise([[], *levels])
            for job in level
        ]
        made = [next(self._ids) for _ in range(count)]
        for id in made:
            flow = {**own, "id": id, "nodes": nodes}
            await self._gateway.call("flow.create", {"context_id": CONTEXT, "flow": flow})
        self._created = made
        return made

    async def _run(self, id: int) -> None:
        started = await self._gateway.call("flow.start", {"context_id": CONTEXT, "id": id})
        ended = await self._tasks.handle(started["run_id"]).result()
        if ended.status is not TaskStatus.FINISHED:
            raise RuntimeError(f"flow {id} has ended as {ended}")

    # --- flow.status

    async def show_another(self) -> None:
        """Run a flow whose status is asked for from now on."""
        (self._shown,) = await self.create(CHAIN_LEVELS, 1)
        await self._run(self._shown)

    async def bare_status(self) -> float:
        """Ask the bare route for the status of the flow, and return the requests per second."""
        return await self.requests(self._ports.bare)

    async def status(self) -> float:
        """Ask the gateway for the status of the flow, and return the requests per second."""
        return await self.requests(self._ports.gateway)

    async def requests(self, port: int) -> float:
        """Ask the server on a port for the status of the flow, and return the requests per second."""
        url = f"http://127.0.0.1:{port}/"
        connector = aiohttp.TCPConnector(limit=CONNECTIONS)
        async with aiohttp.ClientSession(connector=connector) as session:
            await self._ask(session, url, REQUESTS // 10)
            began = time.perf_counter()
            await self._ask(session, url, REQUESTS)
            return REQUESTS / (time.perf_counter() - began)

    async def _ask(self, session: aiohttp.ClientSession, url: str, count: int) -> None:
        """Send requests, as many at once as there are connections."""
        ids = {"context_id": CONTEXT, "id": self._shown}
        request = {"jsonrpc": "2.0", "id": 1, "method": "flow.status", "params": ids}
        left = iter(range(count))
        await asyncio.gather(*(_send(session, url, request, left) for _ in range(CONNECTIONS)))


async def _send(
    session: aiohttp.ClientSession, url: str, request: Mapping[str, Any], left: Iterator[int]
) -> None:
    """Send one request after another while some are left."""
    for _ in left:
        async with session.post(url, json=request) as response:
            reply = await response.json()
        if "error" in reply or response.status != 200:
            raise RuntimeError(f"{url} returns {reply}")


GROUP = Group(rows=(CHAIN, AT_ONCE, MANY_AT_ONCE, STATUS), opened=opened)
