"""Child processes: a server of one of several sources, or an engine, bridge or worker; started, awaited,
stopped, killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from functools import cached_property
from typing import IO, TYPE_CHECKING, Self

from flowkit.core.ready_line import LOADED_LINE, find_summary
from flowkit.local.container import ContainerImage, container_name, find_engine, output_of
from flowkit.local.data_folder import folder_lock, make_folder, open_private
from flowkit.local.errors import (
    DevServerError,
    DiskFull,
    PortInUse,
    ProcessMisused,
    ServerEnded,
    ServerNotReady,
    log_tail,
    translate_write_errors,
)
from flowkit.local.install import mentions_full_disk
from flowkit.local.ports import HOST, is_free
from flowkit.local.process_guard import guarded
from flowkit.local.sources import Program, Source

if TYPE_CHECKING:
    from pathlib import Path

START_TIMEOUT_SECONDS = 60.0
POLL_INTERVAL_SECONDS = 0.02
MAX_LOG_BYTES = 1 << 18
_ERROR = "flowkit: "
"""The beginning of the line with which a command reports its error."""
MIN_FREE_BYTES = 1 << 20
"""With less free space, a startup failure is reported as a full disk: the server could not log the cause."""


class ServerProcess(ABC):
    """One server with a folder for its data and log. Its ports do not change during its lifetime.

    The server exits with the process that started it, even if that process is killed with SIGKILL. It
    then saves its data, and the next server on the folder waits until it has finished. Processes that
    the server started exit with it. Methods may be called from any thread, one at a time; `cancel_start`
    may be called at any time.
    """

    name: str
    usage_error_code: int = -1
    """The exit code that reports a wrong command line."""
    umask: int = -1
    """The permissions that new files of the process do not have; -1 for the umask of this process."""

    def __init__(self, folder: Path, *ports: int) -> None:
        self.folder = folder.resolve()
        self.log = self.folder / f"{self.name}.log"
        self.exit_code: int | None = None
        """The exit code, however the process ended; None while it has not exited."""
        self._ports = ports
        self._log_start = 0
        self._start_cancelled = threading.Event()
        self._guard: subprocess.Popen[bytes] | None = None

    @classmethod
    @abstractmethod
    def install(cls) -> None:
        """Install the server's program; return quickly if it is installed."""

    @abstractmethod
    def command(self) -> list[str]:
        """Return the command that runs the server in the foreground; may install the program first."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the server responds. Called repeatedly during the start, so it must not block for long."""

    def environment(self) -> Mapping[str, str]:
        """Return environment variables to add to those of the current process."""
        return {}

    def cleanup_command(self) -> Sequence[str]:
        """Return a command to run after the server has exited; empty for none."""
        return ()

    @property
    def running(self) -> bool:
        """Whether the server was started and has not exited."""
        if self._guard is None:
            return False
        code = self._guard.poll()
        if code is not None:
            self.exit_code = code
        return code is None

    def start(self) -> None:
        """Start the server and return when it is ready; do nothing if it is running.

        Raises a DevServerError if the server does not become ready; no process is left running then.
        """
        if self.running:
            return
        self._terminate()
        with translate_write_errors(self.folder, what=f"{self.name} cannot start"):
            make_folder(self.folder)
        with folder_lock(self.folder / f"{self.name}.lock", self._start_cancelled) as lock:
            self._check_ports()
            self._guard = self._launch(self.command(), lock)
            self._become_ready(self._guard)

    def stop(self) -> None:
        """Stop the server with SIGTERM, or SIGKILL after 15 seconds; return when it has exited."""
        self._start_cancelled.clear()
        self._terminate()

    def kill(self) -> None:
        """Stop the server with SIGKILL, like a crash, and return when it has exited."""
        self._start_cancelled.clear()
        self._terminate(force=True)

    def cancel_start(self) -> None:
        """Make a `start` in another thread fail soon with a DevServerError. `stop` allows new starts."""
        self._start_cancelled.set()

    def restart(self) -> None:
        """Stop the server if it is running, and start it on the same ports with the same data."""
        self.stop()
        self.start()

    def exit_error(self) -> ServerEnded:
        """Return the error for an unexpected exit."""
        return ServerEnded(name=self.name, code=self.exit_code, log=self.log, lines=log_tail(self.read_log()))

    def read_log(self) -> str:
        """Return the log since the last start; only the end of a long log."""
        with suppress(OSError), self.log.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - MAX_LOG_BYTES))
            return log.read().decode(errors="replace")
        return ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _become_ready(self, guard: subprocess.Popen[bytes]) -> None:
        """Wait until the server is ready. Stop it if it does not become so."""
        try:
            self._wait_until_ready(guard)
        except BaseException:
            self._terminate(force=True)
            raise

    def _check_ports(self) -> None:
        for port in self._ports:
            if not is_free(port):
                raise PortInUse(name=self.name, port=port)

    def _launch(self, command: list[str], *locks: int) -> subprocess.Popen[bytes]:
        self.exit_code = None
        with translate_write_errors(self.folder, what=f"{self.name} cannot start"):
            log = os.fdopen(open_private(str(self.log), os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")
        with log:
            self._log_start = log.tell()
            # In a new session, Ctrl-C reaches only the owner, which then stops its servers in order.
            return subprocess.Popen(
                guarded(command, cleanup=self.cleanup_command()),
                bufsize=0,
                env={**os.environ, **self.environment()},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=self.umask,
                pass_fds=locks,
            )

    def _wait_until_ready(self, guard: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self.is_ready():
            with suppress(subprocess.TimeoutExpired):
                self.exit_code = guard.wait(POLL_INTERVAL_SECONDS)
                raise self._startup_error(f"exited during startup with code {self.exit_code}")
            if self._start_cancelled.is_set():
                raise self._startup_error("was stopped before it was ready")
            if time.monotonic() > deadline:
                raise self._startup_error(f"was not ready within {START_TIMEOUT_SECONDS:.0f} seconds")

    def _startup_error(self, reason: str) -> DevServerError:
        text = self.read_log()
        lines = log_tail(text)
        if mentions_full_disk(text) or shutil.disk_usage(self.folder).free < MIN_FREE_BYTES:
            return DiskFull(what=f"{self.name} cannot start", folder=self.folder, log_lines=lines)
        kind = ProcessMisused if self.exit_code == self.usage_error_code else ServerNotReady
        return kind(name=self.name, reason=reason, log=self.log, lines=lines)

    def _terminate(self, *, force: bool = False) -> None:
        """Close the pipe, so that the guard stops its server, and wait for both to exit."""
        guard, self._guard = self._guard, None
        if guard is not None:
            self.exit_code = _end(guard, force=force)


def _end(guard: subprocess.Popen[bytes], *, force: bool) -> int:
    """Let a guard stop its server, and return the exit code of both."""
    pipe = _stdin_of(guard)
    if force:
        with suppress(BrokenPipeError):
            pipe.write(b"k")
    pipe.close()
    return guard.wait()


def _stdin_of(guard: subprocess.Popen[bytes]) -> IO[bytes]:
    assert guard.stdin is not None
    return guard.stdin


class LocalServer(ServerProcess):
    """Temporal or MongoDB, as a program or in a container."""

    umask = 0o077
    """Only this user can read the data of a server, which may be secret."""

    @abstractmethod
    def find_program(self) -> Program:
        """Return the program from the first source that has one. Raises InstallFailed or ConfigError."""

    @cached_property
    def program(self) -> Program:
        """The program, found once for the lifetime of this object."""
        return self.find_program()

    def cleanup_command(self) -> Sequence[str]:
        """Return the command that removes the server's container, if it has one."""
        container = self.program.container
        return container.removal_arguments(container_name(self.name, self.folder)) if container else ()

    def container_command(
        self,
        container: ContainerImage,
        program: str,
        ports: Mapping[int, int],
        data: Path,
        arguments: Sequence[str],
    ) -> list[str]:
        """Return the command that runs `program` of the image; first remove an earlier container."""
        name = container_name(self.name, self.folder)
        output_of(container.removal_arguments(name))
        return container.run_arguments(name, program=program, ports=ports, data=data, arguments=arguments)


def container_program(image: str) -> Program | None:
    """Return the image as a program, if a container engine is running."""
    engine = find_engine()
    if engine is None:
        return None
    container = ContainerImage(engine, image)
    description = f"{image} in {engine.name}"
    return Program(
        source=Source.CONTAINER, description=description, install=container.pull, container=container
    )


OnStarted = Callable[[ServerProcess], None]


def start_all(processes: Sequence[ServerProcess], on_started: OnStarted = lambda process: None) -> None:
    """Start all processes at the same time and return when all are ready.

    `on_started` runs for each process as soon as it is ready, on any thread. If a process does not
    start, or the caller is interrupted, all other processes are stopped and the first error is raised.
    """
    if not processes:
        return
    with ThreadPoolExecutor(len(processes), thread_name_prefix="start") as pool:
        starts = [pool.submit(_start, process, on_started) for process in processes]
        try:
            _wait_for(starts)
        except BaseException:
            for process in processes:
                process.cancel_start()
            wait(starts)
            stop_all(processes)
            raise


def stop_all(processes: Sequence[ServerProcess]) -> None:
    """Stop all processes at the same time and return when all have exited, even if one stop fails."""
    if not processes:
        return
    with ThreadPoolExecutor(len(processes), thread_name_prefix="stop") as pool, ExitStack() as stack:
        for process in processes:
            stack.callback(pool.submit(process.stop).result)


def _start(process: ServerProcess, on_started: OnStarted) -> None:
    process.start()
    on_started(process)


def _wait_for(starts: Sequence[Future[None]]) -> None:
    done, _ = wait(starts, return_when=FIRST_EXCEPTION)
    for start in starts:
        if start in done:
            start.result()


class FlowkitProcess(ServerProcess):
    """One `flowkit engine`, `flowkit bridge` or `flowkit worker`.

    `name` is unique within the folder and names its log file.

    The process is ready when it polls its task queue. `environment` adds to the environment of the
    current process; set `TEMPORAL_ADDRESS`, `MONGO_URL`, `FLOWKIT_QUEUE` and `MONGO_DATABASE` there to
    choose servers, queue and database.
    """

    usage_error_code = 2

    def __init__(
        self, folder: Path, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._arguments = list(arguments)
        self._environment = dict(environment or {})
        self.health_port: int | None = None
        """Where it serves its health and its metrics; None if it does not."""
        self.summary = ""
        """What the process reports that it runs, from its ready line; empty until it is ready."""
        self._successor: subprocess.Popen[bytes] | None = None
        """A process that has loaded its code, and starts when this one has exited."""
        self._successor_log = 0
        """Where its part of the log begins."""
        super().__init__(folder)

    @classmethod
    def install(cls) -> None:
        """Do nothing: `flowkit` is part of this package."""

    def command(self) -> list[str]:
        """Return the command that runs `flowkit` with this Python interpreter."""
        # -P keeps modules in the current folder from replacing modules of Python.
        return [sys.executable, "-P", "-m", "flowkit", *self._arguments]

    def prepare(self) -> str:
        """Start a process beside this one that loads handlers, functions and settings, which `start` then starts.

        Return why it cannot load them; empty if it can. This process keeps running. Only engines and workers can be
        prepared.
        """
        self.discard()
        kept, code = self._log_start, self.exit_code
        lock = str(self.folder / f"{self.name}.lock")
        guard = self._launch([*self.command(), "--after", lock])
        problem = self._wait_until_loaded(guard)
        if problem:
            _end(guard, force=True)
        else:
            self._successor = guard
        self._successor_log, self._log_start, self.exit_code = self._log_start, kept, code
        return problem

    def _wait_until_loaded(self, guard: subprocess.Popen[bytes]) -> str:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while LOADED_LINE not in self.read_log().splitlines():
            with suppress(subprocess.TimeoutExpired):
                code = guard.wait(POLL_INTERVAL_SECONDS)
                lines = self.read_log().strip().splitlines()
                return next(
                    (line for line in reversed(lines) if line.startswith(_ERROR)), f"exit code {code}"
                )
            if self._start_cancelled.is_set() or time.monotonic() > deadline:
                return f"loading takes longer than {START_TIMEOUT_SECONDS:.0f} seconds"
        return ""

    def discard(self) -> None:
        """Stop the process that `prepare` has started, if there is one."""
        successor, self._successor = self._successor, None
        if successor is not None:
            _end(successor, force=True)

    def start(self) -> None:
        """Start the process that is prepared, or else a new one, as any server."""
        if self._successor is None or self.running:
            super().start()
            return
        self._terminate()
        self._guard, self._successor = self._successor, None
        self._log_start, self.exit_code = self._successor_log, None
        self._become_ready(self._guard)

    def kill(self) -> None:
        """Stop the process with SIGKILL, and one that is prepared."""
        self.discard()
        super().kill()

    def environment(self) -> Mapping[str, str]:
        """Return the given variables; output is unbuffered, so that each log line appears at once."""
        health = {"FLOWKIT_HEALTH_HOST": HOST, "FLOWKIT_HEALTH_PORT": str(self.health_port)}
        return {
            "PYTHONUNBUFFERED": "1",
            **self._environment,
            **(health if self.health_port is not None else {}),
        }

    def is_ready(self) -> bool:
        """Whether the process has logged its ready line since its last start."""
        found = find_summary(self.read_log())
        self.summary = found or self.summary
        return bool(found)


def engine_process(
    folder: Path,
    *,
    functions: Sequence[str] = (),
    roles: Sequence[str] = (),
    flows: Sequence[str] = (),
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> FlowkitProcess:
    """Return an engine with these coordinator functions (`NAME=module:function`), hosted handlers, flows
    (`module:flow`) and command options.
    """
    given = [part for function in functions for part in ("--function", function)]
    given += [part for role in roles for part in ("--role", role)]
    return FlowkitProcess(folder, "engine", ["engine", *given, *options, *flows], environment)


def bridge_process(
    folder: Path,
    roles: Sequence[str],
    *,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> FlowkitProcess:
    """Return a bridge for these roles, with command options. `KAFKA_BOOTSTRAP_SERVERS` chooses the brokers."""
    return FlowkitProcess(folder, "bridge", ["bridge", *options, *roles], environment)


def worker_processes(
    folder: Path,
    handlers: Sequence[str],
    *,
    count: int = 1,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> list[FlowkitProcess]:
    """Return workers for the same handlers, named `worker-1`, `worker-2`, …, with these command options."""
    names = [f"worker-{number}" for number in range(1, count + 1)]
    return [FlowkitProcess(folder, name, ["worker", *options, *handlers], environment) for name in names]
