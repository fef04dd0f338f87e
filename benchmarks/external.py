"""A chain of nodes that an external Kafka worker runs: FlowKit's bridge compared with a bare loop."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.bare_bridge import ROLE as BARE_ROLE
from benchmarks.processes import SHARED, Program, by_hand, flowkit, port_of
from benchmarks.rows import Group, Row, Setting, Side, Sides, Target, emptied
from benchmarks.served import Served
from flowkit import CoordinatorConfig
from flowkit.adapters.tasks.store import TaskStore
from flowkit.bridge.kafka.clients import KafkaConnection
from flowkit.bridge.kafka.topics import Provisioner
from flowkit.client import TaskClient
from flowkit.connection import connect
from flowkit.local import Kafka

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

ROLE = "external"
ROLES = (ROLE, BARE_ROLE)
QUEUE = "external-benchmark"
NODES, CHAINS = 20, 2
DATABASE = "external"
PARTITIONS = 4
ROW = Row(
    name=f"chain of {NODES} external nodes",
    unit="ms/node",
    items=NODES * CHAINS,
    targets={"flowkit": Target(ratio="<= 1.50")},
    rounds=5,
)


def programs(brokers: str, roles: Sequence[str] = ROLES) -> list[Program]:
    """Return the bare loop, the engine, which has a bridge, and the worker that serves both sides."""
    own = {"KAFKA_BOOTSTRAP_SERVERS": brokers, "WORKER_TYPES": ROLE, "MONGO_DATABASE": DATABASE}
    return [
        by_hand("loop", "benchmarks.bare_bridge", DATABASE, brokers, on_request=True),
        flowkit("engine and bridge", "engine", "--queue", QUEUE, **own),
        Program(
            name="external worker",
            side=SHARED,
            module="flowkit.testing.external",
            arguments=["--roles", ",".join(roles)],
            environment=own,
        ),
    ]


@asynccontextmanager
async def opened(
    setting: Setting,
    roles: Sequence[str] = ROLES,
    more: Callable[[str], Sequence[Program]] = lambda _: (),
) -> AsyncIterator[Mapping[str, Sides]]:
    """Start Kafka and the programs of both sides, and yield how they take samples.

    The external worker has these `roles`. `more` returns further programs, from the address of Kafka.
    """
    kafka, processes = Kafka(setting.folder), setting.processes
    with kafka, processes.server("Kafka", port_of(kafka.bootstrap_servers)):
        await _prepare(setting.mongo[DATABASE], kafka.bootstrap_servers, roles)
        tasks = TaskClient(await connect(), TaskStore(setting.mongo[DATABASE]), queue=QUEUE)
        all_ = (*programs(kafka.bootstrap_servers, roles), *more(kafka.bootstrap_servers))
        with processes.running(*all_) as (process, *_):
            bare = Served(process)

            async def loop() -> float:
                seconds = [await bare.ask({"nodes": NODES}) for _ in range(CHAINS)]
                return sum(seconds) / (NODES * CHAINS) * 1000

            sides = {
                "baseline": Side(run=loop, programs="baseline"),
                "flowkit": Side(run=partial(_chains, tasks), programs="flowkit"),
            }
            yield {ROW.name: Sides(sides=sides, clean=partial(emptied, setting.mongo, [DATABASE]))}


async def _prepare(db: Any, brokers: str, roles: Sequence[str]) -> None:
    """Create the topics before the worker starts, and the indexes."""
    config = CoordinatorConfig(kafka_bootstrap=brokers, kafka_cmd_partitions=PARTITIONS)
    provisioner = Provisioner(KafkaConnection.from_config(config), config)
    await provisioner.ensure([*roles])
    for role in roles:
        await provisioner.seed(role)
    for name in ("artifacts", "metrics_raw"):
        index = [("task_id", 1), ("node_id", 1), ("batch_uid", 1)]
        await db[name].create_index(index, unique=True, sparse=True)
    await db.tasks.create_index("id", unique=True)


async def _chains(tasks: TaskClient) -> float:
    """Run chains through the bridge, one after another, and return their milliseconds per node."""
    nodes = [
        {"node_id": f"n{i}", "type": ROLE, "depends_on": [f"n{i - 1}"] if i else []} for i in range(NODES)
    ]
    began = time.perf_counter()
    for _ in range(CHAINS):
        task_id = await tasks.create_task(params={}, graph={"nodes": nodes})
        await tasks.handle(task_id).result()
    return (time.perf_counter() - began) / (NODES * CHAINS) * 1000


GROUP = Group(rows=(ROW,), opened=opened)
