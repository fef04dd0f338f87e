"""`python -m benchmarks.external_load`: the load of a bridge with a thousand external nodes in flight.

The workers are synthetic: one consumer reads all commands, and one producer sends the events that a thousand workers
would send. The engine with its bridge is a process of its own, so its memory and CPU time are the bridge's and the
engine's alone.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from motor.motor_asyncio import AsyncIOMotorClient

from benchmarks.synthetic_workers import SyntheticWorkers
from flowkit import CoordinatorConfig
from flowkit.adapters.tasks.store import TaskStore
from flowkit.bridge.kafka.clients import KafkaConnection
from flowkit.bridge.kafka.topics import Provisioner
from flowkit.client import TaskClient
from flowkit.connection import connect
from flowkit.local import Kafka, Stack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ROLE = "loaded"
QUEUE = "external-load"
DATABASE = "external_load"
TASKS = 100
NODES = 10
"""Nodes of a task. They do not depend on each other, so all are in flight at once."""

PARTITIONS = 16
BATCHES = 4
"""Batches of a node."""

IDLE_SEC = 5.0
RSS_LIMIT_MB = 300
EVENTS_TARGET = 1_000
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a process has used since its start, and the time of the reading."""

    cpu_sec: float
    rss_mb: float
    at: float

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Read the usage of a process from Linux's `/proc`."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        rss = int(fields[21]) * resource.getpagesize() / 2**20
        return cls(cpu_sec=(int(fields[11]) + int(fields[12])) / _TICKS, rss_mb=rss, at=time.monotonic())


class Load:
    """One measurement: its engine process, its synthetic workers and its tasks."""

    def __init__(self, pid: int, db: Any, workers: SyntheticWorkers) -> None:
        self._pid = pid
        self._db = db
        self._workers = workers
        self._peak_mb = 0.0

    def usage(self) -> Usage:
        """Return the usage of the engine now."""
        found = Usage.of(self._pid)
        self._peak_mb = max(self._peak_mb, found.rss_mb)
        return found

    async def measure(self, tasks: TaskClient) -> None:
        """Run all phases, and print a line for each."""
        start = self.usage()
        ids = await self._dispatch(tasks)
        self._line("dispatched and accepted", TASKS * NODES, "nodes", start)
        await self._supervise()
        await self._backlog("heartbeats", lambda: self._workers.heartbeats(5))
        await self._backlog("batches", lambda: self._workers.batches(BATCHES))
        before = self.usage()
        await self._workers.done()
        await asyncio.gather(*(tasks.handle(task_id).result() for task_id in ids))
        self._line("finished", TASKS * NODES, "nodes", before)
        await self._check(ids)
        self._summary(start)

    async def _dispatch(self, tasks: TaskClient) -> list[str]:
        graph = {"nodes": [{"node_id": f"n{index}", "type": ROLE} for index in range(NODES)]}
        creating = (tasks.create_task(params={}, graph=graph) for _ in range(TASKS))
        ids = await asyncio.gather(*creating)
        await self._until(
            lambda: self._db.dispatches.count_documents({"lease": {"$ne": None}}), TASKS * NODES
        )
        return ids

    async def _supervise(self) -> None:
        before = self.usage()
        await asyncio.sleep(IDLE_SEC)
        used = self.usage().cpu_sec - before.cpu_sec
        _say(f"{'supervision without events':28} {used / IDLE_SEC:6.2f} CPU seconds a second")

    async def _backlog(self, name: str, produce: Callable[[], Awaitable[None]]) -> None:
        """Fill the status topic while the engine is stopped, and measure the CPU time that it needs afterwards."""
        sent = self._workers.sent
        os.kill(self._pid, signal.SIGSTOP)
        try:
            await produce()
        finally:
            os.kill(self._pid, signal.SIGCONT)
        before = self.usage()
        await self._until(self._workers.unread, 0)
        rate = self._line(name, self._workers.sent - sent, "events", before)
        verdict = "reached" if rate >= EVENTS_TARGET else "missed"
        _say(f"{'':28} aim: {EVENTS_TARGET:,} events for each CPU second, {verdict}")

    def _line(self, name: str, count: int, unit: str, before: Usage) -> float:
        """Print what the engine has used since `before`, and return the number for each CPU second."""
        now = self.usage()
        cpu, wall = now.cpu_sec - before.cpu_sec, now.at - before.at
        _say(
            f"{name:28} {count:6,} {unit} in {wall:5.1f} s, {cpu:5.1f} CPU s: {count / cpu:6,.0f} for each CPU second, "
            f"RSS {now.rss_mb:.0f} MB"
        )
        return count / cpu

    async def _check(self, ids: list[str]) -> None:
        """Fail if a batch is missing or stored twice."""
        rows = await self._db.metrics_raw.count_documents({"task_id": {"$in": ids}})
        if rows != TASKS * NODES * BATCHES:
            raise SystemExit(f"stored {rows:,} batches instead of {TASKS * NODES * BATCHES:,}")

    def _summary(self, start: Usage) -> None:
        per_node = (self.usage().cpu_sec - start.cpu_sec) / (TASKS * NODES)
        _say(f"CPU time of engine and bridge: {per_node * 1000:.1f} ms a node, with {BATCHES} batches each")
        _say(f"largest RSS seen: {self._peak_mb:.0f} MB (limit {RSS_LIMIT_MB} MB)")
        if self._peak_mb > RSS_LIMIT_MB:
            raise SystemExit("the engine uses too much memory")

    async def _until(self, count: Callable[[], Awaitable[int]], wanted: int) -> None:
        async with asyncio.timeout(240):
            while await count() != wanted:
                self.usage()
                await asyncio.sleep(0.1)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def _provision(bootstrap: str) -> None:
    config = CoordinatorConfig(kafka_bootstrap=bootstrap, kafka_cmd_partitions=PARTITIONS)
    provisioner = Provisioner(KafkaConnection.from_config(config), config)
    await provisioner.ensure([ROLE])
    await provisioner.seed(ROLE)


async def _run(pid: int, bootstrap: str) -> None:
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"])
    tasks = TaskClient(await connect(), TaskStore(mongo[DATABASE]), queue=QUEUE)
    async with SyntheticWorkers(bootstrap, ROLE) as workers:
        await Load(pid, mongo[DATABASE], workers).measure(tasks)


def main() -> None:
    """Start servers and an engine, and measure."""
    os.environ.setdefault("_JAVA_OPTIONS", "-XX:TieredStopAtLevel=4")
    with (
        tempfile.TemporaryDirectory() as folder,
        Stack(Path(folder), keeps_data=False) as stack,
        Kafka(Path(folder)) as kafka,
        ExitStack() as processes,
    ):
        os.environ.update(stack.exports)
        uvloop.run(_provision(kafka.bootstrap_servers))
        own = {
            "KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
            "WORKER_TYPES": ROLE,
            "MONGO_DATABASE": DATABASE,
        }
        command = [str(Path(sys.executable).parent / "flowkit"), "engine", "--queue", QUEUE]
        engine = subprocess.Popen(command, env={**os.environ, **own})
        processes.callback(engine.wait, 20)
        processes.callback(engine.terminate)
        uvloop.run(_run(engine.pid, kafka.bootstrap_servers))


if __name__ == "__main__":
    main()
