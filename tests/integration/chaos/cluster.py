"""Processes and servers of the test, the faults injected into them, and helpers that wait."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pymongo.errors import PyMongoError
from temporalio.service import RPCError, RPCStatusCode

from flowkit.errors import FlowKitError
from flowkit.local.listeners import listening_process
from tests.integration.chaos.faults import (
    ENGINES,
    FREEZE_ENGINE,
    FREEZE_MONGO,
    FREEZE_TEMPORAL,
    FREEZE_WORKER,
    KILL_ENGINE,
    KILL_TEMPORAL,
    KILL_WORKER,
    LEASE_SEC,
    RESTART_MONGO,
    STOP_ENGINE,
    STOP_WORKER,
    WORKERS,
)
from tests.integration.chaos.plans import TOUCH
from tests.integration.harness import FLOWKIT, ROOT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence
    from pathlib import Path

    from flowkit.local import MongoServer, TemporalServer
    from tests.integration.chaos.faults import Fault
    from tests.integration.harness import Harness

T = TypeVar("T")

OUTAGE_TIMEOUT_SEC = 120.0
"""Longest outage of a server in seconds; far above what a restart takes."""
STOP_TIMEOUT_SEC = 20.0
HANDLERS = "tests.integration.chaos.handlers"
SETTINGS: dict[str, Any] = {"lease_ttl_sec": LEASE_SEC, "cancel_grace_sec": 3, "sweep_sec": 1}


class ManagedProcess:
    """A process that starts again whenever it ends."""

    program: tuple[str, ...] = (str(FLOWKIT),)
    """The start of its command."""

    def __init__(self, harness: Harness, folder: Path, name: str, *arguments: str) -> None:
        self.name = name
        self._arguments = arguments
        self.environment = dict(harness.environment)
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._back_at = 0.0

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
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), cwd=ROOT, env=self.environment, stdout=log, stderr=subprocess.STDOUT
            )

    def command(self) -> list[str]:
        """Return the command of the next start."""
        return [*self.program, *self._arguments]

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


Action = Callable[[ManagedProcess, float], None]


class Cluster:
    """The servers, engines and workers of one test."""

    settings: dict[str, Any] = SETTINGS
    """Settings of the engines."""

    def __init__(self, harness: Harness, temporal: TemporalServer, mongo: MongoServer, folder: Path) -> None:
        self.harness = harness
        self.injected: Counter[str] = Counter()
        """Number of injected faults, by kind."""
        self._suspensions: list[asyncio.Task[None]] = []
        harness.settings |= self.settings
        self.config_file = folder / "engine.json"
        """Settings of engines and bridges."""
        self.config_file.write_text(harness.config_json(), encoding="utf-8")
        self.restarts: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            KILL_TEMPORAL: (temporal.kill, temporal.start),
            RESTART_MONGO: (mongo.stop, mongo.start),
        }
        """How a server ends and starts again, by kind of fault."""
        self.freezes: dict[str, int] = {FREEZE_TEMPORAL: temporal.port, FREEZE_MONGO: mongo.port}
        """Ports of the servers that a fault freezes."""
        self.ends: dict[str, tuple[Sequence[ManagedProcess], Action]] = {}
        """The processes that a fault concerns, and what it does to one of them."""
        self.add_processes(folder)

    def add_processes(self, folder: Path) -> None:
        """Create engines and workers."""
        handlers = [f"{HANDLERS}:{name}" for name in ("READER", "BUILDER", "WRITER", "STAMPER")]
        worker = ("worker", "--concurrency", "6", *handlers)
        workers = [ManagedProcess(self.harness, folder, f"worker-{n}", *worker) for n in range(WORKERS)]
        engines = self.engines(folder, HANDLERS, "--role", f"{HANDLERS}:STAMPER")
        self.processes = [*engines, *workers]
        self.ends = {
            KILL_ENGINE: (engines, kill),
            STOP_ENGINE: (engines, stop),
            FREEZE_ENGINE: (engines, self.freeze),
            KILL_WORKER: (workers, kill),
            STOP_WORKER: (workers, stop),
            FREEZE_WORKER: (workers, self.freeze),
        }

    def engines(self, folder: Path, handlers: str, *options: str) -> list[ManagedProcess]:
        """Return the engines, with the user function of a module and further options."""
        arguments = ("engine", "--config", str(self.config_file), "--function", f"{TOUCH}={handlers}:touch")
        return [
            ManagedProcess(self.harness, folder, f"engine-{n}", *arguments, *options) for n in range(ENGINES)
        ]

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
            end, start = self.restarts[fault.kind]
            await asyncio.to_thread(end)
            await asyncio.sleep(fault.away)
            await asyncio.to_thread(start)
            self.restarted(fault.kind)
        elif fault.kind in self.freezes:
            await frozen(fault.away, partial(os.kill, pid_of(self.freezes[fault.kind])))
        else:
            processes, act = self.ends[fault.kind]
            act(processes[fault.place], fault.away)

    def restarted(self, kind: str) -> None:
        """Do what the operator does after a server was away. FlowKit's own processes need nothing."""

    def freeze(self, process: ManagedProcess, away: float) -> None:
        """Freeze a process for this time, in the background."""
        self._suspensions.append(asyncio.create_task(frozen(away, process.signal)))

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
            if known or time.monotonic() > end:
                raise
        await asyncio.sleep(0.2)


async def until(moment: float, look: Callable[[], bool]) -> bool:
    """Wait until `look` returns True, or until the time `moment`. Return whether it did."""
    while time.monotonic() < moment:
        if look():
            return True
        await asyncio.sleep(0.05)
    return False


async def after_delay(seconds: float, call: Callable[[], Awaitable[object]]) -> None:
    """Await `call` after a delay."""
    await asyncio.sleep(seconds)
    await call()


async def periodically(seconds: float, call: Callable[[], Awaitable[object]]) -> None:
    """Await `call` repeatedly, until cancelled."""
    while True:
        await call()
        await asyncio.sleep(seconds)
