"""Processes and servers of the test, the faults injected into them, and helpers that wait."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pymongo.errors import PyMongoError
from temporalio.service import RPCError, RPCStatusCode

from flowkit.errors import FlowKitError, GraphError
from flowkit.local.ports import listening_process
from tests import clocks
from tests.fork_server import fork_server
from tests.integration.chaos.faults import (
    ENGINES,
    EXTERNAL_WORKERS,
    FREEZE_BRIDGE,
    FREEZE_ENGINE,
    FREEZE_EXTERNAL,
    FREEZE_KAFKA,
    FREEZE_MONGO,
    FREEZE_TEMPORAL,
    FREEZE_WORKER,
    HUGE_RECORD,
    KILL_BRIDGE,
    KILL_ENGINE,
    KILL_EXTERNAL,
    KILL_HISTORY,
    KILL_KAFKA,
    KILL_MATCHING,
    KILL_POSTGRES,
    KILL_TEMPORAL,
    KILL_WORKER,
    LEASE_SEC,
    RESTART_MONGO,
    STOP_BRIDGE,
    STOP_ENGINE,
    STOP_EXTERNAL,
    STOP_WORKER,
    WORKERS,
    Faults,
    clock_of,
)
from tests.integration.chaos.plans import EXTERNAL_ROLES, TOUCH
from tests.integration.chaos.typed import OF_PROCESSES, OF_WORKERS, VERSION_NAME
from tests.integration.harness import ROOT
from tests.temporal_cluster.services import HISTORY, MATCHING, TemporalCluster

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence
    from pathlib import Path

    from flowkit.local import Kafka, MongoServer, TemporalServer
    from tests.fork_server import ForkedProcess
    from tests.integration.chaos.faults import Fault
    from tests.integration.harness import Harness

T = TypeVar("T")

OUTAGE_TIMEOUT_SEC = 120.0
"""Longest outage of a server in seconds; far above what a restart takes."""
STOP_TIMEOUT_SEC = 20.0
HANDLERS, TYPED = "tests.integration.chaos.handlers", "tests.integration.chaos.typed"
ROLES_OF_WORKERS = (EXTERNAL_ROLES, EXTERNAL_ROLES[:1], EXTERNAL_ROLES[1:], EXTERNAL_ROLES)
"""Roles of the external workers, by number. Half of them serve several roles, so they drop commands (H2)."""
SESSION_MS = 6_000
PARTITIONS = 6
START_PAUSE_SEC = 1.0
"""Shortest time between two starts of an external worker, which exits by itself while a server is down."""
RESTART_SEC = 10.0
"""Longest time that an external worker may take to stop."""


class ManagedProcess:
    """A process that starts again whenever it ends. Each start has another version of the typed handlers."""

    module: str = "flowkit"
    """What it runs, as `python -m` does."""

    def __init__(self, harness: Harness, folder: Path, name: str, *arguments: str) -> None:
        self.name = name
        self._arguments = arguments
        self.environment = dict(harness.environment)
        self._log = folder / f"{name}.log"
        self._process: ForkedProcess | None = None
        self._back_at = 0.0
        self._starts = 0

    @property
    def runs(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The id of the process; None if it is not alive."""
        return self._process.pid if self._process is not None and self.runs else None

    def ensure_started(self) -> None:
        """Start the process unless it runs or its outage lasts.

        A process that starts while a server is down exits by itself.
        """
        if self.runs or time.monotonic() < self._back_at:
            return
        self._starts += 1
        environment = {**self.environment, VERSION_NAME: f"{self.name}.{self._starts}"}
        with self._log.open("ab") as log:
            file = log.fileno()
            self._process = fork_server().start(
                self.arguments(), ROOT, environment, module=self.module, stdout=file, stderr=file
            )

    def arguments(self) -> list[str]:
        """Return the arguments of the next start."""
        return [*self._arguments]

    def end(self, number: signal.Signals, away: float) -> None:
        """End the process with a signal. It restarts `away` seconds later."""
        self._back_at = time.monotonic() + away
        self.signal(number)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process is alive."""
        if self._process is not None and self.runs:
            self._process.send_signal(number)

    def close(self) -> None:
        """Kill the process and do not start it again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_SEC)


class ExternalProcess(ManagedProcess):
    """An external worker as a process. Half of them keep their worker id when they start again (H9)."""

    module = "flowkit.testing.external"

    def __init__(self, *arguments: Any, keeps_id: bool) -> None:
        super().__init__(*arguments)
        self.deaths: dict[str, list[float]] = defaultdict(list)
        """When the processes of each worker id ended, in seconds since the epoch."""
        self._keeps_id = keeps_id
        self._number = 0
        self._worker_id = ""
        self._started_at = 0.0
        self._stop_at: float | None = None

    def ensure_started(self) -> None:
        """Start the worker unless it runs. Kill one that takes too long to stop."""
        now = time.monotonic()
        if self.runs:
            if self._stop_at is not None and now > self._stop_at + RESTART_SEC:
                self.signal(signal.SIGKILL)
            return
        self._note_death()
        if now >= self._started_at + START_PAUSE_SEC:
            super().ensure_started()

    def arguments(self) -> list[str]:
        """Return the arguments of the next start."""
        self._number += 1
        self._started_at, self._stop_at = time.monotonic(), None
        self._worker_id = self.name if self._keeps_id else f"{self.name}-{self._number}"
        return [*super().arguments(), "--worker-id", self._worker_id]

    def end(self, number: signal.Signals, away: float) -> None:
        """End the process with a signal. It restarts `away` seconds later."""
        self._stop_at = time.monotonic()
        super().end(number, away)

    def close(self) -> None:
        """Kill the process and do not start it again."""
        super().close()
        self._note_death()

    def _note_death(self) -> None:
        if self._worker_id:
            self.deaths[self._worker_id].append(time.time())
            self._worker_id = ""


Action = Callable[[ManagedProcess, float], None]
Restart = tuple[Callable[[], None], Callable[[], None]]
"""How a server ends, and how it starts again."""


class Cluster:
    """The servers of one test; two engines, of which the first has a bridge; another bridge; native and
    external workers.
    """

    def __init__(
        self,
        harness: Harness,
        temporal: TemporalServer | TemporalCluster,
        mongo: MongoServer,
        kafka: Kafka,
        folder: Path,
        seed: int,
    ) -> None:
        self.harness = harness
        self.faults = Faults(on_cluster=isinstance(temporal, TemporalCluster))
        self.folder = folder
        self.kafka = kafka
        self.injected: Counter[str] = Counter()
        """Number of injected faults, by kind."""
        self._suspensions: list[asyncio.Task[None]] = []
        harness.settings |= {
            "lease_ttl_sec": LEASE_SEC,
            "cancel_grace_sec": 3,
            "sweep_sec": 1,
            "kafka_bootstrap": kafka.bootstrap_servers,
            "kafka_cmd_partitions": PARTITIONS,
        }
        self.config_file = folder / "engine.json"
        """Settings of engines and bridges."""
        self.config_file.write_text(harness.config_json(), encoding="utf-8")
        self.restarts: dict[str, Sequence[Restart]] = {
            KILL_TEMPORAL: [(temporal.kill, temporal.start)],
            KILL_KAFKA: [(kafka.kill, kafka.start)],
            RESTART_MONGO: [(mongo.stop, mongo.start)],
        }
        """How each of the servers of a kind of fault ends and starts again."""
        if isinstance(temporal, TemporalCluster):
            self.restarts |= restarts_of_cluster(temporal)
        self.freezes = {FREEZE_TEMPORAL: temporal.port, FREEZE_MONGO: mongo.port, FREEZE_KAFKA: kafka.port}
        """Ports of the servers that a fault freezes."""
        engines = self._engines(folder)
        bridge = self._process(folder, "bridge", "bridge", "--config", str(self.config_file), *EXTERNAL_ROLES)
        workers = self._workers(folder)
        self.external = [self._external(folder, number) for number in range(EXTERNAL_WORKERS)]
        self.processes: list[ManagedProcess] = [*engines, bridge, *workers, *self.external]
        if clocks.can_differ():
            for process in self.processes:
                process.environment |= clocks.ahead(clock_of(seed, process.name))
        self.ends: dict[str, tuple[Sequence[ManagedProcess], Action]] = {
            KILL_ENGINE: (engines, kill),
            STOP_ENGINE: (engines, stop),
            FREEZE_ENGINE: (engines, self.freeze),
            KILL_BRIDGE: ([bridge], kill),
            STOP_BRIDGE: ([bridge], stop),
            FREEZE_BRIDGE: ([bridge], self.freeze),
            KILL_WORKER: (workers, kill),
            STOP_WORKER: (workers, stop),
            FREEZE_WORKER: (workers, self.freeze),
            KILL_EXTERNAL: (self.external, kill),
            STOP_EXTERNAL: (self.external, stop),
            FREEZE_EXTERNAL: (self.external, self.freeze),
        }
        """The processes that a fault concerns, and what it does to one of them."""

    def _process(self, folder: Path, name: str, *arguments: str) -> ManagedProcess:
        return ManagedProcess(self.harness, folder, name, *arguments)

    def _engines(self, folder: Path) -> list[ManagedProcess]:
        """Return the engines, which host the inline role and have the user function."""
        inline = (f"{HANDLERS}:STAMPER", f"{TYPED}:printer")
        options = (
            "--function",
            f"{TOUCH}={HANDLERS}:touch",
            *(part for each in inline for part in ("--role", each)),
        )
        command = ("engine", "--config", str(self.config_file), *options)
        engines = [self._process(folder, f"engine-{number}", *command) for number in range(ENGINES)]
        engines[0].environment["WORKER_TYPES"] = ",".join(EXTERNAL_ROLES)
        return engines

    def _workers(self, folder: Path) -> list[ManagedProcess]:
        """Return the workers. The last one runs batches in separate processes."""
        untyped = [f"{HANDLERS}:{name}" for name in ("READER", "BUILDER", "WRITER", "STAMPER")]
        handlers = [*untyped, *(f"{TYPED}:{name}" for name in OF_WORKERS)]
        worker = ("worker", "--concurrency", "6")
        workers = [self._process(folder, f"worker-{n}", *worker, *handlers) for n in range(WORKERS - 1)]
        settings = folder / "processes.json"
        settings.write_text(json.dumps({"executor": "process", "process_workers": 1}), encoding="utf-8")
        processes = [f"{TYPED}:{name}" for name in OF_PROCESSES]
        last = self._process(folder, "processes", *worker, "--config", str(settings), *processes)
        return [*workers, last]

    def _external(self, folder: Path, number: int) -> ExternalProcess:
        options = {
            "--roles": ",".join(ROLES_OF_WORKERS[number % len(ROLES_OF_WORKERS)]),
            "--handler": f"{HANDLERS}:EXTERNAL",
            "--bootstrap-servers": self.kafka.bootstrap_servers,
        }
        settings = {"hb_interval_sec": 0.5, "lease_ttl_sec": LEASE_SEC, "announce_interval_sec": 2}
        consumer = {"session_timeout_ms": SESSION_MS, "heartbeat_interval_ms": 1_000}
        arguments = [
            *(part for option in options.items() for part in option),
            *(
                part
                for name, value in settings.items()
                for part in ("--setting", f"{name}={json.dumps(value)}")
            ),
            *(part for name, value in consumer.items() for part in ("--consumer", f"{name}={value}")),
        ]
        name = f"external-{number}"
        return ExternalProcess(self.harness, folder, name, *arguments, keeps_id=number % 2 == 0)

    async def supervise(self) -> None:
        """Start processes that ended, until cancelled."""
        while True:
            for process in self.processes:
                process.ensure_started()
            await asyncio.sleep(0.1)

    async def inject(self, fault: Fault) -> None:
        """Inject a fault. Returns when servers are up again; processes restart in the background."""
        await asyncio.sleep(fault.pause)
        self.injected[fault.kind] += 1
        if fault.kind in self.restarts:
            end, start = self.restarts[fault.kind][fault.place]
            await asyncio.to_thread(end)
            await asyncio.sleep(fault.away)
            await asyncio.to_thread(start)
            self.restarted(fault.kind)
        elif fault.kind == HUGE_RECORD:
            await self._send_huge_record()
        elif fault.kind in self.freezes:
            await frozen(fault.away, partial(os.kill, pid_of(self.freezes[fault.kind])))
        else:
            processes, act = self.ends[fault.kind]
            act(processes[fault.place], fault.away)

    async def _send_huge_record(self) -> None:
        """Send a record that decompresses to 300 MB to the bridges, between two small ones that are no messages."""
        batches: Any = importlib.import_module("tests.kafka_batches")
        raw = await asyncio.to_thread(batches.good_large_good, batches.Codec.gzip)
        await batches.send_batch(self.kafka.bootstrap_servers, f"status.{EXTERNAL_ROLES[0]}.v1", raw)

    def restarted(self, kind: str) -> None:
        """Restart the external workers, as operators do: an outage may leave them deaf (H1, H28, H33)."""
        if kind in {KILL_KAFKA, RESTART_MONGO}:
            for process in self.external:
                process.end(signal.SIGTERM, 0.0)

    def freeze(self, process: ManagedProcess, away: float) -> None:
        """Freeze a process for this time, in the background."""
        self._suspensions.append(asyncio.create_task(frozen(away, process.signal)))

    def died_after(self, worker_id: str, moment: float) -> bool:
        """Return whether the process of a worker ended after this time."""
        ends = (time for process in self.external for time in process.deaths.get(worker_id, ()))
        return any(time >= moment for time in ends)

    @property
    def pids(self) -> set[int]:
        """The ids of the living processes."""
        return {process.pid for process in self.processes if process.pid is not None}

    async def resumed(self) -> None:
        """Wait until every frozen process has resumed."""
        await asyncio.gather(*self._suspensions)

    def close(self) -> None:
        """Kill all processes."""
        for process in self.processes:
            process.close()


def restarts_of_cluster(temporal: TemporalCluster) -> dict[str, Sequence[Restart]]:
    """Return how the processes of a cluster of Temporal and its PostgreSQL are killed and start again."""
    killed = {KILL_HISTORY: HISTORY, KILL_MATCHING: MATCHING}
    services = {
        kind: [(temporal.services[name].kill, temporal.services[name].start) for name in names]
        for kind, names in killed.items()
    }
    return {**services, KILL_POSTGRES: [(temporal.postgres.kill, temporal.postgres.start)]}


def kill(process: ManagedProcess, away: float) -> None:
    """Kill a process. It restarts after this time."""
    process.end(signal.SIGKILL, away)


def stop(process: ManagedProcess, away: float) -> None:
    """Stop a process gracefully. It restarts after this time."""
    process.end(signal.SIGTERM, away)


async def frozen(seconds: float, send: Callable[[signal.Signals], object]) -> None:
    """Freeze a process for this time."""
    send(signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        send(signal.SIGCONT)


def pid_of(port: int) -> int:
    """Return the id of the process that listens on a port."""
    found = re.search(r"process (\d+)", listening_process(port))
    assert found is not None, f"nothing listens on {port}"
    return int(found[1])


async def retry_until_available(call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `call`; repeat the call while a server is down."""
    end = time.monotonic() + OUTAGE_TIMEOUT_SEC
    while True:
        try:
            return await call()
        except (RPCError, PyMongoError, FlowKitError, OSError) as error:
            known = isinstance(error, RPCError) and error.status is RPCStatusCode.NOT_FOUND
            if known or isinstance(error, GraphError) or time.monotonic() > end:
                raise
        await asyncio.sleep(0.2)


async def wait_before_retry() -> None:
    """Wait before a call that failed because a process was killed."""
    await asyncio.sleep(0.3)


async def until(look: Callable[[], bool]) -> None:
    """Wait until `look` returns True."""
    while True:
        if look():
            return
        await asyncio.sleep(0.05)


async def after_delay(seconds: float, call: Callable[[], Awaitable[object]]) -> None:
    """Await `call` after a delay."""
    await asyncio.sleep(seconds)
    await call()


async def periodically(seconds: float, call: Callable[[], Awaitable[object]]) -> None:
    """Await `call` repeatedly, until cancelled."""
    while True:
        await call()
        await asyncio.sleep(seconds)
