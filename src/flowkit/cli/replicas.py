"""`--processes N`: one command runs several processes of an engine or a worker, watches them and stops them.

One Python process uses one core, so a machine with several cores needs several processes. They share the task queues
like processes on different machines. If one of them exits, the others stop as well, and the command exits with its
code, so that an orchestrator restarts all of them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from flowkit import products
from flowkit.cli import output
from flowkit.cli.errors import Exit, exit_code_of, exit_process
from flowkit.cli.health import health_endpoint, health_file
from flowkit.cli.options import HealthOptions
from flowkit.cli.stop_signals import on_stop_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from flowkit.products import Metrics

_SIGNALLED = 128
"""Exit codes above this number report the signal that ended a process, as in a shell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicasHealth:
    """The health of several processes."""

    running: bool
    """Whether all of them have started and none has exited."""
    processes: tuple[dict[str, Any] | None, ...]
    """What each process last reported; None before its first report."""

    @property
    def ok(self) -> bool:
        """Return whether all processes run with all of their background loops."""
        return self.running and all(process is not None and process["ok"] for process in self.processes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaReports(HealthOptions):
    """Where one of several processes reports its health and its metrics: to their parent."""

    scrapes: Connection | None = None
    """On which the parent asks for the metrics; None if it does not."""

    @property
    def measures(self) -> bool:
        """Whether the parent asks for metrics."""
        return self.scrapes is not None


@contextmanager
def scraped(reports: HealthOptions, render: Callable[[], bytes] | None) -> Iterator[None]:
    """Let the parent of this process read its metrics during the block, if it has such a parent."""
    if isinstance(reports, ReplicaReports) and reports.scrapes is not None and render is not None:
        threading.Thread(target=_answer, args=(reports.scrapes, render), daemon=True).start()
    yield


def _answer(scrapes: Connection, render: Callable[[], bytes]) -> None:
    with suppress(EOFError, OSError):  # the parent has ended
        while True:
            number = scrapes.recv()
            scrapes.send((number, render()))


def run_processes(count: int, run: Callable[[HealthOptions, int], None], reports: HealthOptions) -> int:
    """Call `run` in `count` processes, or in this one if `count` is 1. Return the exit code when all have stopped.

    Its parameters are where the process reports its health, and its number, counted from 1; 0 if it is the only one.
    `run` must be picklable. The exit code is that of the process that failed first, or 0.
    """
    if count == 1:
        run(reports, 0)
        return 0
    with TemporaryDirectory(prefix="flowkit-health-") as folder:
        files = [Path(folder, f"{number}.json") for number in range(1, count + 1)]
        metrics = products.metrics() if reports.measures else None
        return _Replicas(run, files, metrics, reports.sdk_metrics).run(reports)


_SCRAPE_TIMEOUT_SEC = 3.0
"""How long the metrics of all processes may take. Prometheus waits for 5 seconds if it reads that often."""


@dataclass(slots=True)
class _Scrape:
    """Reads the metrics of one process, for one thread at a time. The others wait for their turn, but no longer."""

    connection: Connection
    lock: threading.Lock = field(default_factory=threading.Lock)
    number: int = 0

    def read(self) -> bytes | None:
        """Return the metrics; None if the process has not sent them in time, or has ended."""
        latest = time.monotonic() + _SCRAPE_TIMEOUT_SEC
        if not self.lock.acquire(timeout=_SCRAPE_TIMEOUT_SEC):
            return None
        try:
            return self._read(latest)
        except (EOFError, OSError):
            return None
        finally:
            self.lock.release()

    def _read(self, latest: float) -> bytes | None:
        self.number += 1
        self.connection.send(self.number)
        while self.connection.poll(max(0.0, latest - time.monotonic())):
            number, text = self.connection.recv()
            if number == self.number:  # else of an earlier request that took too long
                found: bytes = text
                return found
        return None


class _Replicas:
    """The child processes of one command."""

    def __init__(
        self,
        run: Callable[[HealthOptions, int], None],
        files: Sequence[Path],
        metrics: Metrics | None,
        sdk_metrics: bool,
    ) -> None:
        self._files = files
        self._metrics = metrics
        self._stopping: set[SpawnProcess] = set()
        self._killed = False
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() if metrics else (None, None) for _ in files]
        self._scrapes = [_Scrape(ours) for ours, _ in pipes if ours]
        self._children: list[SpawnProcess] = [
            context.Process(
                target=_run_replica,
                args=(run, ReplicaReports(file=str(file), scrapes=theirs, sdk_metrics=sdk_metrics), number),
            )
            for number, (file, (_, theirs)) in enumerate(zip(files, pipes, strict=True), 1)
        ]

    def run(self, reports: HealthOptions) -> int:
        """Start the processes, wait until one exits, stop the others. Return the exit code of the command."""
        on_stop_signals(self._stop, self._kill)
        with (
            health_endpoint(reports, self._health, self._render if self._metrics else None),
            health_file(reports.file, self._health),
        ):
            for child in self._children:
                child.start()
            wait([child.sentinel for child in self._children])
            first = [number for number, child in enumerate(self._children, 1) if child.exitcode is not None]
            self._stop()
            for child in self._children:
                child.join()
        return self._exit_code(first)

    def _stop(self) -> None:
        """Let the processes stop. Spare those that stop already: a signal could kill one at its end."""
        for child in self._children:
            if child.pid is not None and child.exitcode is None and child not in self._stopping:
                self._stopping.add(child)
                child.terminate()

    def _kill(self) -> None:
        """End the processes at once."""
        self._killed = True
        for child in self._children:
            if child.pid is not None:
                child.kill()

    def _exit_code(self, first: Sequence[int]) -> int:
        """Return the code of the first process that failed, and report it; 0 if all stopped gracefully."""
        if self._killed:
            return Exit.INTERRUPTED
        codes: list[int] = [_shell_code(child.exitcode) for child in self._children]
        order = [*first, *range(1, len(codes) + 1)]
        failed: int | None = next((number for number in order if codes[number - 1]), None)
        if failed is None:
            return 0
        code = codes[failed - 1]
        output.note(f"process {failed} of {len(codes)} exited with code {code}; the others were stopped")
        return code

    def _render(self) -> bytes:
        """Return the metrics of all processes that send them. Ask all at once, so that some may be suspended."""
        assert self._metrics is not None
        with ThreadPoolExecutor(len(self._scrapes)) as threads:
            found = enumerate(threads.map(_Scrape.read, self._scrapes), 1)
            return self._metrics.join({str(number): text for number, text in found if text is not None})

    def _health(self) -> ReplicasHealth:
        return ReplicasHealth(
            running=all(child.is_alive() for child in self._children),
            processes=tuple(_read(file) for file in self._files),
        )


def _shell_code(code: int | None) -> int:
    """Return an exit code as shells report it. None is that of a process that was never started."""
    if code is None:
        return 0
    return code if code >= 0 else _SIGNALLED - code


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found


def _run_replica(run: Callable[[HealthOptions, int], None], reports: HealthOptions, number: int) -> None:
    """Run one process, and exit with its code. It also stops when its parent has died."""
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    exit_process(exit_code_of(lambda: run(reports, number), as_json=False, verbose=False))


def _stop_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
