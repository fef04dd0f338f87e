"""A chain of nodes that an external Kafka worker runs: FlowKit's bridge compared with a bare loop."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.bare_bridge import ROLE as BARE_ROLE
from benchmarks.bare_bridge import BareBridge
from flowkit import CoordinatorConfig
from flowkit.adapters.tasks.store import TaskStore
from flowkit.bridge.kafka.clients import KafkaConnection
from flowkit.bridge.kafka.topics import Provisioner
from flowkit.client import TaskClient
from flowkit.connection import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

ROLE = "external"
QUEUE = "external-benchmark"
NODES = 20
ROUNDS = 9
"""Samples per side. One takes about a second, so a moment of other load changes its ratio, but not the median."""
DATABASE = "external"
PARTITIONS = 4


def environment(bootstrap: str) -> dict[str, str]:
    """Return the environment of the engine and the worker."""
    own = {"KAFKA_BOOTSTRAP_SERVERS": bootstrap, "WORKER_TYPES": ROLE, "MONGO_DATABASE": DATABASE}
    return {**os.environ, **own}


def commands() -> list[list[str]]:
    """Return the commands of the engine, which has a bridge, and of the worker that serves both sides."""
    return [
        [os.path.join(os.path.dirname(sys.executable), "flowkit"), "engine", "--queue", QUEUE],
        [sys.executable, "-m", "flowkit.testing.external", "--roles", f"{ROLE},{BARE_ROLE}"],
    ]


async def provision(bootstrap: str) -> None:
    """Create the topics before the worker starts."""
    config = CoordinatorConfig(kafka_bootstrap=bootstrap, kafka_cmd_partitions=PARTITIONS)
    provisioner = Provisioner(KafkaConnection.from_config(config), config)
    await provisioner.ensure([ROLE, BARE_ROLE])
    for role in (ROLE, BARE_ROLE):
        await provisioner.seed(role)


def by_flowkit(tasks: TaskClient) -> Callable[[], Awaitable[float]]:
    """Return a function that runs a chain through the bridge, and returns its milliseconds per node."""

    async def run() -> float:
        began = asyncio.get_running_loop().time()
        nodes = [
            {"node_id": f"n{i}", "type": ROLE, "depends_on": [f"n{i - 1}"] if i else []} for i in range(NODES)
        ]
        task_id = await tasks.create_task(params={}, graph={"nodes": nodes})
        await tasks.handle(task_id).result()
        return (asyncio.get_running_loop().time() - began) / NODES * 1000

    return run


def by_loop(bare: BareBridge) -> Callable[[], Awaitable[float]]:
    """Return a function that runs a chain in the bare loop, and returns its milliseconds per node."""

    async def run() -> float:
        return await bare.chain(NODES) / NODES * 1000

    return run


@asynccontextmanager
async def sides(mongo: Any, bootstrap: str) -> AsyncIterator[dict[str, Callable[[], Awaitable[float]]]]:
    """Yield a function for each side that runs a chain and returns its milliseconds per node."""
    tasks = TaskClient(await connect(), TaskStore(mongo[DATABASE]), queue=QUEUE)
    bare = await bare_loop(mongo, bootstrap)
    try:
        yield {"baseline": by_loop(bare), "flowkit": by_flowkit(tasks)}
    finally:
        await bare.stop()


async def bare_loop(mongo: Any, bootstrap: str) -> BareBridge:
    """Return a connected bare loop."""
    for name in ("artifacts", "metrics_raw"):
        index = [("task_id", 1), ("node_id", 1), ("batch_uid", 1)]
        await mongo[DATABASE][name].create_index(index, unique=True, sparse=True)
    await mongo[DATABASE].tasks.create_index("id", unique=True)
    bare = BareBridge(mongo[DATABASE], bootstrap)
    await bare.start()
    return bare
