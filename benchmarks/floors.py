"""Floors: hand-written programs that promise what FlowKit promises, beside those that promise less, and FlowKit.

The programs are in `benchmarks.floors_by_hand`. The difference between a baseline and its floor is the price of the
promises, and that between a floor and FlowKit is the price of FlowKit's code. All three sides are measured in one row.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import actions, baseline, batches, external, flows, flows_by_hand, nodes
from benchmarks.cases import CASES, Case, by_workflow, sample
from benchmarks.floors_by_hand import (
    BATCHES_QUEUE,
    BRIDGE_QUEUE,
    BRIDGE_ROLE,
    DATABASE,
    PREFIX,
    RETRY_QUEUE,
    FencedRetried,
    ManyBatches,
)
from benchmarks.processes import Program, by_hand
from benchmarks.rows import Group, Row, Setting, Side, Sides, emptied
from flowkit.gateway.client import GatewayClient
from flowkit.local.ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from temporalio.client import Client

    from benchmarks.rows import Opened

SIDE = "floor"
FLOORED = tuple(case for case in CASES if case.name in {"chain of 30", "20 functions in a row"})
SIDES = ("baseline", "flowkit")
"""The sides of a row with which a floor is compared."""


def _program(name: str, *arguments: str, side: str = SIDE) -> Program:
    return by_hand(name, "benchmarks.floors_by_hand", *arguments, side=side)


def _group(
    rows: Sequence[Row], opened: Callable[[Setting], AbstractAsyncContextManager[Mapping[str, Sides]]]
) -> Group:
    """Return rows with a floor beside their sides, without targets."""
    shown = (replace(row, name=_name(row.name), targets={}, always=False, rounds=5) for row in rows)
    return Group(rows=tuple(shown), opened=opened)


def _name(row: str) -> str:
    return f"floor: {row}"


def _beside(
    setting: Setting, opened: Mapping[str, Opened], floors: Mapping[str, Side]
) -> Mapping[str, Sides]:
    """Return how the rows take their samples, with those of floors."""

    async def clean(before: Callable[[], Awaitable[None]]) -> None:
        await before()
        await emptied(setting.mongo, [DATABASE])

    found = {}
    for name, floor in floors.items():
        row = opened[name]
        assert isinstance(row, Sides)
        sides = {side: row.sides[side] for side in SIDES}
        found[_name(name)] = Sides(sides={**sides, SIDE: floor}, clean=partial(clean, row.clean))
    return found


# --- nodes and functions


@asynccontextmanager
async def nodes_opened(setting: Setting) -> AsyncIterator[Mapping[str, Sides]]:
    """Start the programs of all sides, and yield how the rows take samples."""
    run_one = by_workflow(await baseline.connect(), PREFIX)

    def side(case: Case) -> Side:
        async def run() -> float:
            return await sample(case, run_one) * 1000

        few = replace(case, repeats=1)
        programs = f"{SIDE} of functions" if case.functions else SIDE
        return Side(run=run, programs=programs, warm_up=lambda: sample(few, run_one))

    programs = (
        _program("engine", "workflows"),
        _program("worker", "activities"),
        _program("engine", "functions", side=f"{SIDE} of functions"),
    )
    async with nodes.opened(setting) as opened:
        with setting.processes.running(*programs):
            yield _beside(setting, opened, {case.name: side(case) for case in FLOORED})


# --- batches


@asynccontextmanager
async def batches_opened(setting: Setting) -> AsyncIterator[Mapping[str, Sides]]:
    """Start the programs of all sides, and yield how the row takes samples."""
    client, db = await baseline.connect(), setting.mongo[DATABASE]

    async def run() -> float:
        task = f"{PREFIX}batches-{time.monotonic_ns()}"
        plan = {"batches": batches.BATCHES}
        await client.execute_workflow(ManyBatches.run, plan, id=task, task_queue=BATCHES_QUEUE)
        return batches.BATCHES / await batches.seconds_of(db, task)

    programs = (_program("engine", "batch-workflows"), _program("worker", "batch-activities"))
    async with batches.opened(setting) as opened:
        with setting.processes.running(*programs):
            yield _beside(setting, opened, {batches.ROW.name: Side(run=run, programs=SIDE)})


# --- external nodes


@asynccontextmanager
async def external_opened(setting: Setting) -> AsyncIterator[Mapping[str, Sides]]:
    """Start the programs of all sides, and yield how the row takes samples."""
    client = await baseline.connect()

    async def run() -> float:
        began = time.perf_counter()
        for _ in range(external.CHAINS):
            plan = {"nodes": external.NODES, "wide": False}
            task = f"{PREFIX}external-{time.monotonic_ns()}"
            await client.execute_workflow(baseline.Baseline.run, plan, id=task, task_queue=BRIDGE_QUEUE)
        return (time.perf_counter() - began) / (external.NODES * external.CHAINS) * 1000

    def bridge(brokers: str) -> list[Program]:
        return [_program("engine and bridge", "bridge", external.DATABASE, brokers)]

    async with external.opened(setting, (*external.ROLES, BRIDGE_ROLE), bridge) as opened:
        yield _beside(setting, opened, {external.ROW.name: Side(run=run, programs=SIDE)})


# --- flows


class FloorFlows:
    """Runs flows that FlowKit's gateway has created on the floor."""

    def __init__(self, own: flows.Flows, gateway: GatewayClient, client: Client, mongo: Any) -> None:
        self._flows = own
        self._gateway = gateway
        self._client = client
        self._from, self._to = mongo[flows.DATABASE], mongo[DATABASE]
        self._created: list[int] = []

    async def create(self, levels: flows.Levels, count: int) -> None:
        """Create flows for the next sample, and move them."""
        for name in ("flow_contexts", "flow_jobs", "flow_runners"):
            await self._to[name].delete_many({})
            await self._to[name].insert_many(await self._from[name].find().to_list(None))
        self._created = await self._flows.create(levels, count)
        wanted = {"id": {"$in": self._created}}
        await self._to.flows.insert_many(await self._from.flows.find(wanted).to_list(None))
        await self._from.flows.delete_many(wanted)

    async def warm_up(self) -> None:
        """Run some flows at once."""
        await self.create(flows.DIAMOND, flows.WARM_UP_FLOWS)
        await self.at_once()

    async def chains(self) -> float:
        """Run the created flows one after another, and return the milliseconds per job."""
        began = time.perf_counter()
        for id in self._created:
            await self._run(id)
        return (time.perf_counter() - began) / flows.CHAINS / flows.CHAIN_JOBS * 1000

    async def at_once(self) -> float:
        """Run the created flows at once, and return the flows per second."""
        began = time.perf_counter()
        await asyncio.gather(*(self._run(id) for id in self._created))
        return len(self._created) / (time.perf_counter() - began)

    async def _run(self, id: int) -> None:
        started = await self._gateway.call("flow.start", {"context_id": flows_by_hand.CONTEXT, "id": id})
        await self._client.get_workflow_handle(started["run_id"]).result()


@asynccontextmanager
async def flows_opened(setting: Setting) -> AsyncIterator[Mapping[str, Sides]]:
    """Start the programs of all sides, and yield how the rows take samples."""
    port, status_port = free_port(), free_port()
    programs = (
        _program("engine", "job-workflows"),
        _program("worker", "job-activities"),
        _program("gateway", "gateway", str(port), DATABASE),
        _program("gateway", "gateway", str(status_port), flows.DATABASE, side=f"{SIDE} of the route"),
    )
    clean = partial(emptied, setting.mongo, [flows.DATABASE, flows_by_hand.DATABASE])
    async with flows.running(setting) as own:
        with setting.processes.running(*programs):
            async with GatewayClient(f"http://127.0.0.1:{port}") as gateway:
                floor = FloorFlows(own, gateway, await baseline.connect(), setting.mongo)
                yield _beside(setting, flows.sides_of(own, clean), _flow_sides(own, floor, status_port))


def _flow_sides(own: flows.Flows, floor: FloorFlows, status_port: int) -> dict[str, Side]:
    side = partial(Side, programs=SIDE, warm_up=floor.warm_up)
    at_once = partial(floor.create, flows.DIAMOND, flows.AT_ONCE.items)
    return {
        flows.CHAIN.name: side(
            run=floor.chains, prepare=partial(floor.create, flows.CHAIN_LEVELS, flows.CHAINS)
        ),
        flows.AT_ONCE.name: side(run=floor.at_once, prepare=at_once),
        flows.STATUS.name: Side(
            run=partial(own.requests, status_port),
            programs=f"{SIDE} of the route",
            warm_up=own.show_another,
        ),
    }


# --- actions


@asynccontextmanager
async def actions_opened(setting: Setting) -> AsyncIterator[Mapping[str, Sides]]:
    """Start the programs of all sides, and yield how the row takes samples."""
    client, db = await baseline.connect(), setting.mongo[DATABASE]
    written = actions.ByHand(client, db, FencedRetried.run, RETRY_QUEUE)
    programs = (_program("engine", "retry-workflows"), _program("worker", "retry-activities"))
    async with actions.opened(setting) as opened:
        with setting.processes.running(*programs):
            yield _beside(setting, opened, {actions.RETRY.name: Side(run=written.retries, programs=SIDE)})


GROUPS = (
    _group([nodes.row(case) for case in FLOORED], nodes_opened),
    _group([batches.ROW], batches_opened),
    _group([external.ROW], external_opened),
    _group([flows.CHAIN, flows.AT_ONCE, flows.STATUS], flows_opened),
    _group([actions.RETRY], actions_opened),
)
