"""FlowKit's own processes, started through its command line and ended with the demo."""

from __future__ import annotations

import json
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from code_index.errors import DemoError
from flowkit.local.process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

DATABASE = "code_index"
HANDLERS = [f"code_index.handlers:{name}" for name in ("Indexer", "Enricher", "Grouper", "Analyzer")]

_READY = b"running"
"""What `flowkit` writes when it polls."""


class FlowkitProcess(ServerProcess):
    """`flowkit` as a child process; it finds the servers through the environment."""

    arguments: tuple[str, ...]

    def __init__(self, folder: Path, queue: str, settings: dict[str, Any]) -> None:
        super().__init__(folder)
        self._queue = queue
        self._settings = settings
        self._log_before = 0

    @classmethod
    def install(cls) -> None:
        """Nothing to do: `flowkit` comes with the package."""

    def command(self) -> list[str]:
        """The `flowkit` that belongs to this Python."""
        self._log_before = self.log.stat().st_size if self.log.exists() else 0
        config = self.folder / f"{self.name}.json"
        config.write_text(json.dumps(self._settings), encoding="utf-8")
        program = Path(sysconfig.get_path("scripts"), "flowkit")
        options = ["--queue", self._queue, "--database", DATABASE, "--config", str(config)]
        return [str(program), *self.arguments, *options]

    def is_ready(self) -> bool:
        """Whether this start has reported that it polls."""
        return _READY in self.log.read_bytes()[self._log_before :]


class Engine(FlowkitProcess):
    """Walks the graphs of tasks."""

    name = "engine"
    arguments = ("engine",)


class Worker(FlowkitProcess):
    """Serves all four roles, under an id of its own; its log lies in a folder of that name."""

    name = "worker"
    arguments = ("worker", *HANDLERS)

    def __init__(self, folder: Path, queue: str, number: int) -> None:
        self.worker_id = f"worker-{number}"
        super().__init__(folder / self.worker_id, queue, {"worker_id": self.worker_id})


class Crew:
    """An engine and workers, as a context manager: all are started at once, and all end with it.

    Workers are numbered from 1; the one that replaces a killed worker gets the next number.
    """

    def __init__(self, folder: Path, queue: str, workers: int, engine: dict[str, Any]) -> None:
        self._folder = folder
        self._queue = queue
        self._engine = Engine(folder, queue, engine)
        self._workers = {
            made.worker_id: made for made in (Worker(folder, queue, 1 + i) for i in range(workers))
        }
        self._hired = workers
        self._every = ExitStack()

    def __enter__(self) -> Self:
        """Start all. A DevServerError tells what did not start; nothing runs then."""
        members = self._members
        with ExitStack() as undo:
            for process in members:
                undo.callback(process.stop)
            with ThreadPoolExecutor(max_workers=len(members)) as threads:
                list(threads.map(ServerProcess.start, members))
            self._every = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._every.close()

    @property
    def _members(self) -> list[FlowkitProcess]:
        return [self._engine, *self._workers.values()]

    def has(self, worker_id: str) -> bool:
        """Whether this worker is one of ours, and was not killed."""
        return worker_id in self._workers

    def kill(self, worker_id: str) -> None:
        """End a worker with SIGKILL. It is a member no more."""
        self._workers.pop(worker_id).kill()

    def replacement(self) -> Worker:
        """A new worker, not started yet."""
        self._hired += 1
        return Worker(self._folder, self._queue, self._hired)

    def take_on(self, worker: Worker) -> None:
        """Start a worker and make it a member; a DevServerError tells why it did not start. Any thread may call."""
        self._every.callback(worker.stop)
        worker.start()
        self._workers[worker.worker_id] = worker

    def check(self) -> None:
        """A DemoError that names the member which has ended by itself, if one has."""
        check_all_run(self._members)


def check_all_run(processes: Sequence[ServerProcess]) -> None:
    """A DemoError that names the process which has ended by itself, if one has."""
    for process in processes:
        if not process.running:
            raise DemoError(f"{process.name} ended by itself; its log: {process.log}")
