"""FlowKit's own processes, started through its command line and ended with the demo."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self

from code_index.errors import DemoError
from flowkit.local.flowkit_process import FlowkitProcess
from flowkit.local.lifecycle import start_all, stop_all

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from flowkit.local.process import ServerProcess

DATABASE = "code_index"
HANDLERS = [f"code_index.handlers:{name}" for name in ("Indexer", "Enricher", "Grouper", "Analyzer")]


class Crew:
    """An engine and workers, as a context manager: all are started at once, and all end with it.

    Workers are numbered from 1; the one that replaces a killed worker gets the next number.
    """

    def __init__(self, folder: Path, queue: str, workers: int, engine: dict[str, Any]) -> None:
        self._folder = folder
        self._environment = {"FLOWKIT_QUEUE": queue, "MONGO_DATABASE": DATABASE}
        self._size = workers
        self._engine_settings = engine
        self._hired = 0
        self._made: list[FlowkitProcess] = []
        self._members: dict[str, FlowkitProcess] = {}

    def __enter__(self) -> Self:
        """Start all. A DevServerError tells what did not start; nothing runs then."""
        self._process("engine", ["engine"], self._engine_settings)
        for _ in range(self._size):
            self.replacement()
        start_all(self._made)
        self._members = {process.name: process for process in self._made}
        return self

    def __exit__(self, *_: object) -> None:
        stop_all(self._made)

    def _process(self, name: str, arguments: Sequence[str], settings: dict[str, Any]) -> FlowkitProcess:
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder.resolve() / f"{name}.json"
        config.write_text(json.dumps(settings), encoding="utf-8")
        arguments = [*arguments, "--config", str(config)]
        self._made.append(FlowkitProcess(self._folder, name, arguments, self._environment))
        return self._made[-1]

    def has(self, worker_id: str) -> bool:
        """Whether this worker is one of ours, and was not killed."""
        return worker_id in self._members

    def kill(self, worker_id: str) -> None:
        """End a worker with SIGKILL. It is a member no more."""
        self._members.pop(worker_id).kill()

    def replacement(self) -> FlowkitProcess:
        """A new worker, not started yet; its name is its id. It serves all four roles."""
        self._hired += 1
        worker_id = f"worker-{self._hired}"
        return self._process(worker_id, ["worker", *HANDLERS], {"worker_id": worker_id})

    def take_on(self, worker: FlowkitProcess) -> None:
        """Start a worker and make it a member; a DevServerError tells why it did not start. Any thread may call."""
        worker.start()
        self._members[worker.name] = worker

    def check(self) -> None:
        """A DemoError that names the member which has ended by itself, if one has."""
        check_all_run([*self._members.values()])


def check_all_run(processes: Sequence[ServerProcess]) -> None:
    """A DemoError that names the process which has ended by itself, if one has."""
    for process in processes:
        if not process.running:
            raise DemoError(f"{process.name} ended by itself; its log: {process.log}")
