"""FlowKit's own processes, started through its command line and ended with the demo."""

from __future__ import annotations

import sysconfig
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from code_index.errors import DemoError
from flowkit.local.process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

QUEUE = "code-index"
DATABASE = "code_index"
HANDLERS = [f"code_index.handlers:{name}" for name in ("Indexer", "Enricher", "Grouper", "Analyzer")]

_READY = b"running"
"""What `flowkit` writes when it polls."""


class FlowkitProcess(ServerProcess):
    """`flowkit` as a child process; it finds the servers through the environment."""

    arguments: tuple[str, ...]
    _log_before = 0

    @classmethod
    def install(cls) -> None:
        """Nothing to do: `flowkit` comes with the package."""

    def command(self) -> list[str]:
        """The `flowkit` that belongs to this Python."""
        self._log_before = self.log.stat().st_size if self.log.exists() else 0
        program = Path(sysconfig.get_path("scripts"), "flowkit")
        return [str(program), *self.arguments, "--queue", QUEUE, "--database", DATABASE]

    def is_ready(self) -> bool:
        """Whether this start has reported that it polls."""
        return _READY in self.log.read_bytes()[self._log_before :]


class Engine(FlowkitProcess):
    """Walks the graphs of tasks."""

    name = "engine"
    arguments = ("engine",)


class Worker(FlowkitProcess):
    """Serves all four roles."""

    name = "worker"
    arguments = ("worker", *HANDLERS)


def engine_and_workers(folder: Path, workers: int) -> list[ServerProcess]:
    """The processes that run tasks; each worker keeps its log in a folder of its own."""
    return [Engine(folder), *(Worker(folder / f"worker-{number}") for number in range(1, workers + 1))]


@contextmanager
def running(processes: Sequence[ServerProcess]) -> Iterator[None]:
    """Start all at once, stop all at the end, whatever happens. A DevServerError tells what did not start."""
    with ExitStack() as every:
        for process in processes:
            every.callback(process.stop)
        with ThreadPoolExecutor(max_workers=len(processes)) as threads:
            list(threads.map(ServerProcess.start, processes))
        yield


def check_all_run(processes: Sequence[ServerProcess]) -> None:
    """A DemoError that names the process which has ended by itself, if one has."""
    for process in processes:
        if not process.running:
            raise DemoError(f"{process.name} ended by itself; its log: {process.log}")
