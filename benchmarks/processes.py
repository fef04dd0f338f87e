"""The processes of a benchmark: how it starts and stops them, and what each has used."""

from __future__ import annotations

import asyncio
import itertools
import operator
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import temporalio

from benchmarks.counted import count_into, counted
from flowkit.local import Stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

OPTIMIZING = "-XX:TieredStopAtLevel=4"
"""Java option for MongoDB's stand-in. Under minutes of load, the optimizing compiler pays off for large documents."""

SHARED = "shared"
"""The side of a program that works for both sides, and of the servers."""
CLIENT = "client"
"""The name of the benchmark's own process, which starts the tasks of both sides."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A Python module that runs in a process of its own."""

    name: str
    """Programs of one side with the same name are counted together."""
    side: str
    module: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of the benchmark."""
    on_request: bool = False
    """Whether it runs samples on request (see `benchmarks.served`)."""


def command(*arguments: str) -> list[str]:
    """Return the command that runs `flowkit` in this virtual environment."""
    return [sys.executable, "-m", "flowkit", *arguments]


def flowkit(name: str, *arguments: str, side: str = "flowkit", **environment: str) -> Program:
    """Return a `flowkit` command as a program."""
    return Program(name=name, side=side, module="flowkit", arguments=arguments, environment=environment)


def by_hand(
    name: str, module: str, *arguments: str, side: str = "baseline", on_request: bool = False
) -> Program:
    """Return a hand-written program."""
    return Program(name=name, side=side, module=module, arguments=arguments, on_request=on_request)


@dataclass(frozen=True, kw_only=True)
class Used:
    """What processes have used: processor time in seconds, and what they have sent to MongoDB."""

    seconds: float = 0.0
    """User and system time, in nanoseconds where the system has such a clock."""
    user: float = 0.0
    system: float = 0.0
    commands: int = 0
    bytes: int = 0

    def __add__(self, other: Used) -> Used:
        return _by_field(operator.add, self, other)

    def __sub__(self, other: Used) -> Used:
        return _by_field(operator.sub, self, other)


def _by_field(operation: Callable[[Any, Any], Any], first: Used, second: Used) -> Used:
    pairs = ((each.name, getattr(first, each.name), getattr(second, each.name)) for each in fields(Used))
    return Used(**{name: operation(*values) for name, *values in pairs})


Place = tuple[str, str]
"""The side and the name of processes that are counted together."""
Usage = dict[Place, Used]


@dataclass(frozen=True, kw_only=True)
class Counted:
    """A process that is counted."""

    place: Place
    process: psutil.Process
    file: Path | None = None
    """Where it counts what it sends to MongoDB."""
    tree: bool = False
    """Whether the processes that it starts belong to it: PostgreSQL has one for each connection."""

    def used(self) -> Used:
        """Return what it has used since its start."""
        own = self.process.cpu_times()
        user, system, seconds = own.user, own.system, _seconds(self.process.pid, own)
        if self.tree:
            children = [child.cpu_times() for child in self.process.children(recursive=True)]
            more_user = sum(each.user for each in children) + own.children_user
            more_system = sum(each.system for each in children) + own.children_system
            user, system, seconds = user + more_user, system + more_system, seconds + more_user + more_system
        commands, size = counted(self.file) if self.file and self.file.exists() else (0, 0)
        return Used(seconds=seconds, user=user, system=system, commands=commands, bytes=size)


def _seconds(pid: int, times: Any) -> float:
    """Return the processor time of a process. Linux has a clock for it; `times` counts in steps of 10 ms."""
    if sys.platform == "linux":
        return time.clock_gettime((~pid << 3) | 2)  # As clock_getcpuclockid(3) does.
    return float(times.user + times.system)


class Processes:
    """The processes that are counted: the servers, the programs that run now, and the benchmark's own process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        """Where the processes count what they send to MongoDB."""
        self._numbers = itertools.count()
        self._counted: list[Counted] = []

    def count_client(self) -> None:
        """Count the benchmark's own process."""
        file = self._new_file()
        count_into(file)
        self._counted.append(Counted(place=(SHARED, CLIENT), process=psutil.Process(), file=file))

    @contextmanager
    def server(self, name: str, port: int, *, tree: bool = False) -> Iterator[None]:
        """Count the process that listens on this port of this machine for the block, unless the system hides it."""
        before = [*self._counted]
        for pid in _listening(port)[:1]:
            self._counted.append(Counted(place=(SHARED, name), process=psutil.Process(pid), tree=tree))
        try:
            yield
        finally:
            self._counted = before

    @contextmanager
    def running(self, *programs: Program) -> Iterator[list[subprocess.Popen[str]]]:
        """Run programs for the block, and count what they use."""
        before, started = [*self._counted], [self._start(program) for program in programs]
        try:
            yield started
        finally:
            self._counted = before
            for process in started:
                process.terminate()
            for process in started:
                process.wait(20)
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        pipe.close()

    def _start(self, program: Program) -> subprocess.Popen[str]:
        file = self._new_file()
        command = [sys.executable, "-m", "benchmarks.counted", str(file), program.module, *program.arguments]
        pipe = subprocess.PIPE if program.on_request else None
        variables = _with_bytecode({**os.environ, **program.environment})
        process = subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, text=True)
        place = (program.side, program.name)
        self._counted.append(Counted(place=place, process=psutil.Process(process.pid), file=file))
        return process

    def _new_file(self) -> Path:
        return self._folder / f"{next(self._numbers)}.counts"

    def usage(self) -> Usage:
        """Return what the processes have used since they started."""
        usage: Usage = {}
        for each in self._counted:
            usage[each.place] = usage.get(each.place, Used()) + each.used()
        return usage

    def pids(self, side: str) -> list[int]:
        """Return the ids of the processes of a side."""
        return [each.process.pid for each in self._counted if each.place[0] == side]

    async def idle(self, seconds: float) -> dict[Place, float]:
        """Return the processor time of the processes in one second in which nobody asks them for anything."""
        before, began = self.usage(), time.perf_counter()
        await asyncio.sleep(seconds)
        after, took = self.usage(), time.perf_counter() - began
        used = {place: after[place] - before[place] for place in after}
        return {place: each.seconds / took for place, each in used.items()}


@contextmanager
def counted_stack() -> Iterator[tuple[Processes, Path]]:
    """Run Temporal and MongoDB for the block. Yield what counts processes, and a folder for files."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.environ.setdefault("_JAVA_OPTIONS", OPTIMIZING)
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), keeps_data=False) as stack:
        processes = Processes(Path(folder))
        processes.count_client()
        os.environ.update(stack.exports)
        temporal = processes.server("Temporal", port_of(stack.temporal_address))
        with temporal, processes.server("MongoDB", port_of(stack.mongo_url)):
            yield processes, Path(folder)


def port_of(address: str) -> int:
    """Return the port of an address, such as `127.0.0.1:7233` or `mongodb://127.0.0.1:27017/?w=1`."""
    place = address.partition("//")[2] or address
    return int(place.partition("/")[0].rpartition(":")[2])


def _listening(port: int) -> list[int]:
    """Return the ids of the processes that listen on a port of this machine. The first one has started the others."""
    try:
        sockets: Any = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return []
    listening = (each for each in sockets if each.status == psutil.CONN_LISTEN and each.pid)
    return sorted(each.pid for each in listening if each.laddr.port == port)


def _with_bytecode(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without PYTHONDONTWRITEBYTECODE: both sides cache bytecode, as installed programs do.

    Without the cache, programs compile modules at each import, and a sandboxed workflow imports its own in every run.
    """
    return {name: value for name, value in environment.items() if name != "PYTHONDONTWRITEBYTECODE"}


def machine() -> str:
    """Return the machine, the versions and the time of the measurement."""
    versions = f"Python {platform.python_version()}, temporalio {temporalio.__version__}, load {os.getloadavg()[0]:.1f}"
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {versions}, {when}"
