"""Keeps the engine, the bridge and the workers of `flowkit up` running: restarts those that exit, and
reloads their code."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from flowkit.cli.up.processes import write_config
from flowkit.core.user_code import shorten_path
from flowkit.errors import ConfigError
from flowkit.local.errors import DevServerError
from flowkit.local.process import start_all, stop_all
from flowkit.text import one_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from flowkit.cli.up.plan import UpPlan
    from flowkit.cli.up.processes import Processes
    from flowkit.local.process import FlowkitProcess

MAX_RESTARTS = 5
WINDOW_SEC = 60.0
"""A process that exits more than MAX_RESTARTS times within this time is not restarted again."""

MAX_NOTICES = 100


class CrashCounter:
    """Counts the crashes of each process within WINDOW_SEC."""

    def __init__(self) -> None:
        self._moments: dict[str, deque[float]] = {}

    def add(self, name: str, now: float) -> int:
        """Add a crash at `now`, in seconds of any clock. Return how many crashes the process had in WINDOW_SEC."""
        moments = self._moments.setdefault(name, deque())
        moments.append(now)
        while moments[0] < now - WINDOW_SEC:
            moments.popleft()
        return len(moments)


class Keeper:
    """Restarts the processes of one `flowkit up` that exit, and reloads those whose code has changed.

    Starts and stops run on threads. Call all methods on one event loop.
    """

    def __init__(self, plan: UpPlan, processes: Processes, folder: Path) -> None:
        self._plan = plan
        self._processes = processes
        self._folder = folder
        self._crashes = CrashCounter()
        self._jobs: dict[str, asyncio.Task[None]] = {}
        """The start or reload in progress, by the name of the process."""
        self._starting: set[str] = set()
        """Names of the processes that are down until their start has succeeded."""
        self._broken: set[str] = set()
        """Names of the processes that are down until the code changes, which they could not load."""
        self._changed = False
        self._watching = asyncio.create_task(self._watch()) if plan.options.reload else None
        self.notices: deque[str] = deque(maxlen=MAX_NOTICES)
        """What has happened, oldest first."""

    def is_starting(self, name: str) -> bool:
        """Return whether a process is being restarted, or waits for code that it can load."""
        return name in self._starting or name in self._broken

    def check(self) -> None:
        """Begin to restart the processes that have exited, and to reload changed code.

        Raise the error of a server that has exited, of a process that exited too often, or of one that reports a
        configuration error. The error keeps the data of `flowkit up`.
        """
        if self._watching is not None and self._watching.done():
            self._watching.result()
        for server in self._processes.servers:
            if not server.running:
                raise server.exit_error()
        for process in self._processes.flowkit:
            self._check_process(process)
        if self._changed and not self._jobs:
            self._changed = False
            reloading = asyncio.create_task(self._reload())
            self._jobs |= {process.name: reloading for process in self._with_code()}

    def _check_process(self, process: FlowkitProcess) -> None:
        job = self._jobs.get(process.name)
        if job is None:
            if not process.running and process.name not in self._broken:
                self._restart(process, process.exit_error())
        elif job.done():
            del self._jobs[process.name]
            self._starting.discard(process.name)
            error = job.exception()
            if isinstance(error, DevServerError):
                self._restart(process, error)
            elif error is not None:
                raise error

    def _restart(self, process: FlowkitProcess, error: DevServerError) -> None:
        if process.exit_code == process.usage_error_code and self._watching is not None:
            self._broken.add(process.name)
            cause = next(iter(error.log_lines[-1:]), str(error)).removeprefix("flowkit: ")
            self.notices.append(f"{process.name} is not running until the code changes: {cause}")
            return
        count = self._crashes.add(process.name, time.monotonic())
        if process.exit_code == process.usage_error_code or count > MAX_RESTARTS:
            error.keeps_data = True
            raise error
        self.notices.append(
            f"{process.name} exited with code {process.exit_code}; it is restarted "
            f"({count} of {MAX_RESTARTS} times within a minute)"
        )
        self._starting.add(process.name)
        self._jobs[process.name] = asyncio.create_task(self._start(process))

    async def _start(self, process: FlowkitProcess) -> None:
        await asyncio.to_thread(process.start)
        self.notices.append(f"{process.name} runs again")

    # --- reload -------------------------------------------------------------------------------------------------------

    def _with_code(self) -> list[FlowkitProcess]:
        """Return the processes that run code or settings of the user. A bridge has only settings."""
        options, engine, bridge = self._plan.options, self._processes.engine, self._processes.bridge
        found = [*self._processes.workers]
        if engine is not None and (options.functions or options.roles or options.flows or options.config):
            found.append(engine)
        if bridge is not None and options.config:
            found.append(bridge)
        return found

    async def _watch(self) -> None:
        """Note changes of the Python code and of `--config`, until cancelled."""
        watching = False
        async for paths in _watch_files(self._plan):
            if not watching:
                watching = True
                self.notices.append("reloads when Python code or --config changes")
            if paths:
                self.notices.append(f"changed: {', '.join(paths)}")
                self._changed = True

    async def _reload(self) -> None:
        """Restart the processes with the changed code: workers drain first.

        New processes load the code before the others stop, so that a file which changes meanwhile has no effect: the
        old code keeps running if the new one cannot be loaded.
        """
        processes, workers = self._with_code(), self._processes.workers
        try:
            if problem := await self._prepare(processes):
                self._note_old_code(processes, problem)
                return
            self._starting |= {process.name for process in processes}
            self._broken.clear()
            await asyncio.to_thread(stop_all, workers)
            await asyncio.to_thread(stop_all, [each for each in processes if each not in workers])
            await asyncio.to_thread(start_all, processes)
        finally:
            for process in processes:
                process.discard()
        self.notices.append(f"reloaded {names_of(processes)}")

    def _note_old_code(self, processes: Sequence[FlowkitProcess], problem: str) -> None:
        running = [each for each in processes if each.name not in self._broken]
        if running:
            self.notices.append(f"still running the old code in {names_of(running)}: {problem}")
        if len(running) < len(processes):
            stopped = [each for each in processes if each.name in self._broken]
            self.notices.append(f"still not running {names_of(stopped)}: {problem}")

    async def _prepare(self, processes: Sequence[FlowkitProcess]) -> str:
        """Let new processes load the changed code and settings. Return why they cannot; empty if they can."""
        try:
            write_config(self._plan, self._folder)
        except ConfigError as error:
            return one_line(error)
        loading = [each for each in processes if each is not self._processes.bridge]
        found = await asyncio.gather(*(asyncio.to_thread(each.prepare) for each in loading))
        return next(filter(None, found), "").removeprefix("flowkit: ")

    async def close(self) -> None:
        """Stop starts in progress and wait for them."""
        if self._watching is not None:
            self._watching.cancel()
        for process in self._processes.flowkit:
            if process.name in self._jobs:
                process.cancel_start()
        await asyncio.gather(*self._jobs.values(), return_exceptions=True)


def names_of(processes: Iterable[FlowkitProcess]) -> str:
    """Return the names of processes, for people."""
    return ", ".join(process.name for process in processes)


async def _watch_files(plan: UpPlan) -> AsyncIterator[list[str]]:
    """Yield the changed files, relative to the current folder if they are in it, twice a second.

    The first list, which may be empty, shows that the watch has begun.
    """
    from watchfiles import PythonFilter, awatch

    is_code = PythonFilter()
    folders, config = _find_watched(plan)
    async for changes in awatch(
        *folders,
        watch_filter=lambda change, path: is_code(change, path) or path == config,
        rust_timeout=500,
        yield_on_timeout=True,
    ):
        yield sorted({shorten_path(path) for _, path in changes})


def _find_watched(plan: UpPlan) -> tuple[list[Path], str | None]:
    """Return the folders to watch, and the absolute path of `--config`."""
    options = plan.options
    folders = find_folders([*options.handlers, *options.flows, *options.roles, *options.functions])
    if options.config is None:
        return folders, None
    config = Path(options.config).resolve()
    return [*folders, config.parent], str(config)


def find_folders(names: Iterable[str]) -> list[Path]:
    """Return the folders with the code that `[NAME=]module:name` texts name: the current one, and those of
    its packages.

    Installed packages are omitted, unless they are installed as links to their source.
    """
    here = Path.cwd()
    folders = [here]
    for name in names:
        package = name.rpartition("=")[2].partition(":")[0].partition(".")[0]
        spec = importlib.util.find_spec(package)
        places = [*(spec.submodule_search_locations or []), spec.origin or ""] if spec else []
        for place in filter(None, places):
            folder = Path(place) if Path(place).is_dir() else Path(place).parent
            if not folder.is_relative_to(here) and not folder.is_relative_to(sys.prefix):
                folders.append(folder)
    return folders
