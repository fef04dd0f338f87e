"""Flows and jobs by JSON-RPC: the gateway compared with a hand-written workflow, and with a bare HTTP route."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
import uuid
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from benchmarks import baseline, flows_by_hand
from benchmarks.flows_by_hand import CALLER, CONTEXT, TIMEOUT_SEC
from benchmarks.processes import flowkit, process
from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskClient
from flowkit.connection import connect
from flowkit.gateway.client import GatewayClient, GatewayUnavailable
from flowkit.local.ports import free_port
from flowkit.models import TaskStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence

    from temporalio.client import Client

QUEUE = "benchmark-flows"
DATABASE = "flowkit"
ROUNDS = 3
CHAIN_JOBS, CHAINS = 20, 3
FLOWS, WARM_UP_FLOWS = 200, 40
REQUESTS, CONNECTIONS = 1_500, 16
PAYLOAD = "done"
_TRIES = 300

CHAIN = f"flows: chain of {CHAIN_JOBS} jobs"
AT_ONCE = f"flows: {FLOWS} of 5 jobs at once"
STATUS = "flows: flow.status beside a bare route"
NAMES = (CHAIN, AT_ONCE, STATUS)

_CHAIN = [[job] for job in range(1, CHAIN_JOBS + 1)]
_DIAMOND = [[1], [2, 3, 4], [5]]

Levels = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Ports:
    """The ports of the processes."""

    gateway: int = field(default_factory=free_port)
    websocket: int = field(default_factory=free_port)
    supervisor: int = field(default_factory=free_port)
    bare: int = field(default_factory=free_port)


def commands(ports: Ports) -> list[list[str]]:
    """Return the commands of the processes of both sides."""
    gateway = ("gateway", "--no-jobs", "--port", str(ports.gateway), "--websocket-port", str(ports.websocket))
    by_hand, bare = "benchmarks.flows_by_hand", "benchmarks.bare_status"
    supervisor = ("flowkit.testing.supervisor", "--port", str(ports.supervisor))
    return [
        flowkit("engine", "--queue", QUEUE),
        flowkit(*gateway, "--queue", QUEUE),
        flowkit("gateway", "jobs", "--queue", QUEUE, "--supervisor-networks", "loopback"),
        *(
            [sys.executable, "-m", *module]
            for module in (
                supervisor,
                (by_hand, "workflows"),
                (by_hand, "activities"),
                (bare, str(ports.bare)),
            )
        ),
    ]


@asynccontextmanager
async def running(mongo: Any) -> AsyncIterator[Flows]:
    """Start the processes of both sides, and yield what runs the samples."""
    ports = Ports()
    with ExitStack() as processes:
        for command in commands(ports):
            processes.enter_context(process(command))
        tasks = TaskClient(await connect(), TaskStore(mongo[DATABASE]), queue=QUEUE)
        async with GatewayClient(f"http://127.0.0.1:{ports.gateway}") as gateway:
            flows = Flows(gateway, tasks, await baseline.connect(), ports)
            await flows.prepare()
            await flows.warm_up()
            yield flows


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
        """Run some flows at once on both sides, which takes less time than a whole sample."""
        await self._by_hand(_DIAMOND, WARM_UP_FLOWS)
        await self._by_flowkit(_DIAMOND, WARM_UP_FLOWS)

    def chain(self) -> Mapping[str, Callable[[], Awaitable[float]]]:
        """Return functions that run chains one after another, and return the milliseconds per job."""

        async def by_hand() -> float:
            return await self._by_hand(_CHAIN, 1) / CHAIN_JOBS * 1000

        async def by_flowkit() -> float:
            return await self._by_flowkit(_CHAIN, 1) / CHAIN_JOBS * 1000

        return {"baseline": _mean(by_hand), "flowkit": _mean(by_flowkit)}

    def at_once(self) -> Mapping[str, Callable[[], Awaitable[float]]]:
        """Return functions that run many flows at once, and return the flows per second."""

        async def by_hand() -> float:
            return FLOWS / await self._by_hand(_DIAMOND, FLOWS)

        async def by_flowkit() -> float:
            return FLOWS / await self._by_flowkit(_DIAMOND, FLOWS)

        return {"baseline": by_hand, "flowkit": by_flowkit}

    async def _by_hand(self, levels: Levels, count: int) -> float:
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

    async def _by_flowkit(self, levels: Levels, count: int) -> float:
        """Return the seconds from the first `flow.start` to the end of the last flow. Create the flows before."""
        flows = await self._create(levels, count)
        began = time.perf_counter()
        await asyncio.gather(*(self._run(id) for id in flows))
        return time.perf_counter() - began

    async def _create(self, levels: Levels, count: int) -> list[int]:
        """Create flows, and return their ids."""
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
        return made

    async def _run(self, id: int) -> None:
        started = await self._gateway.call("flow.start", {"context_id": CONTEXT, "id": id})
        ended = await self._tasks.handle(started["run_id"]).result()
        if ended.status is not TaskStatus.FINISHED:
            raise RuntimeError(f"flow {id} has ended as {ended}")

    # --- flow.status

    async def show_another(self) -> None:
        """Run a flow whose status is asked for from now on."""
        (self._shown,) = await self._create(_CHAIN, 1)
        await self._run(self._shown)

    def status(self) -> Mapping[str, Callable[[], Awaitable[float]]]:
        """Return functions that ask for the status of a flow, and return the requests per second."""

        async def bare() -> float:
            return await self._requests(f"http://127.0.0.1:{self._ports.bare}/")

        async def gateway() -> float:
            return await self._requests(f"http://127.0.0.1:{self._ports.gateway}/")

        return {"baseline": bare, "flowkit": gateway}

    async def _requests(self, url: str) -> float:
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


def _mean(run: Callable[[], Awaitable[float]]) -> Callable[[], Awaitable[float]]:
    """Return a function that runs a short sample several times, and returns the mean."""

    async def repeated() -> float:
        samples: Sequence[float] = [await run() for _ in range(CHAINS)]
        return sum(samples) / CHAINS

    return repeated
