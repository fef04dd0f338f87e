"""Start an engine and workers with the `flowkit` command, and stop them with the demo."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self

from code_index.errors import DemoError
from code_index.flow import flow
from flowkit.local.process import FlowkitProcess, start_all, stop_all

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from flowkit.local.process import ServerProcess

DATABASE = "code_index"


class ProcessGroup:
    """A context manager that starts an engine and workers together, and stops all of them at its end.

    The workers run all roles except `without`. Workers are numbered from 1. The
    worker that replaces a killed one gets the next number.
    """

    def __init__(
        self, folder: Path, queue: str, workers: int, engine: dict[str, Any], *, without: str | None = None
    ) -> None:
        self._folder = folder
        self._environment = {"FLOWKIT_QUEUE": queue, "MONGO_DATABASE": DATABASE}
        self._workers = workers
        self._engine_settings = engine
        self._roles = [f"--role={role}" for role in flow.handlers if role != without]
        self._worker_number = 0
        self._processes: list[FlowkitProcess] = []
        self._running: dict[str, FlowkitProcess] = {}

    def __enter__(self) -> Self:
        """Start all processes; raises DevServerError and stops them again if one does not start."""
        self._process("engine", ["engine"], self._engine_settings)
        for _ in range(self._workers):
            self.new_worker()
        start_all(self._processes)
        self._running = {process.name: process for process in self._processes}
        return self

    def __exit__(self, *_: object) -> None:
        stop_all(self._processes)

    def _process(self, name: str, arguments: Sequence[str], settings: dict[str, Any]) -> FlowkitProcess:
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder.resolve() / f"{name}.json"
        config.write_text(json.dumps(settings), encoding="utf-8")
        arguments = [*arguments, "--config", str(config)]
        self._processes.append(FlowkitProcess(self._folder, name, arguments, self._environment))
        return self._processes[-1]

    def has(self, worker_id: str) -> bool:
        """Return whether this worker belongs to the group and was not killed."""
        return worker_id in self._running

    def kill(self, worker_id: str) -> None:
        """Kill a worker with SIGKILL and remove it from the group."""
        self._running.pop(worker_id).kill()

    def new_worker(self) -> FlowkitProcess:
        """Return a new worker that is not started yet; its name is its worker id."""
        self._worker_number += 1
        worker_id = f"worker-{self._worker_number}"
        return self._process(
            worker_id, ["worker", "code_index.flow:flow", *self._roles], {"worker_id": worker_id}
        )

    def start_worker(self, worker: FlowkitProcess) -> None:
        """Start a worker and add it to the group; raises DevServerError if it does not start. Thread-safe."""
        worker.start()
        self._running[worker.name] = worker

    def ensure_running(self) -> None:
        """Raise DemoError if a process of the group has ended by itself."""
        ensure_running([*self._running.values()])


def ensure_running(processes: Sequence[ServerProcess]) -> None:
    """Raise DemoError, with the name of the process, if a process has ended by itself."""
    for process in processes:
        if not process.running:
            raise DemoError(f"{process.name} exited unexpectedly; its log: {process.log}")
