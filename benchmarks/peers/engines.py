"""The other engines, each as a process that runs samples on request."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any

from benchmarks.peers.plan import Plan
from benchmarks.peers.postgres import missing as postgres_missing
from benchmarks.peers.postgres import postgres
from flowkit.local.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from benchmarks.cases import Case

PACKAGES = ("dbos", "prefect")

SAMPLE_SEC = 240.0
"""Longest time of a sample. A peer that takes longer is left out of the remaining cases."""

_START_SEC = 120.0
"""Longest time that Prefect's server may take to start."""

_LOG_CHARS = 2_000


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Another engine: how it is called, where it writes, and how to start it."""

    name: str
    database: str
    """Its MongoDB database."""
    start: Callable[[Path], AbstractContextManager[Peer]]
    judged: bool = False
    """Whether the table states a target for FlowKit's ratio to this engine."""
    most_tasks: int = 1_000
    """Largest number of tasks of a case at once."""
    missing: Callable[[], str | None] = lambda: None
    """Returns the sentence that says why the engine cannot run here, or None."""


def missing() -> str | None:
    """Return an error text if a package is not installed, or None."""
    absent = [name for name in PACKAGES if find_spec(name) is None]
    if not absent:
        return None
    return (
        f"the peers are not installed ({', '.join(absent)}): run {sys.prefix}/bin/pip install --group peers"
    )


class TookTooLong(RuntimeError):
    """A sample took longer than SAMPLE_SEC."""


class Peer:
    """A process that runs samples of one engine."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answer("ready")

    async def sample(self, case: Case) -> float:
        """Run one sample and return the seconds per node. TookTooLong, and the process ends, after SAMPLE_SEC."""
        plan = Plan(nodes=case.nodes, wide=case.wide, tasks=case.tasks, repeats=case.repeats)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(plan)) + "\n")
        self._process.stdin.flush()
        answer = asyncio.ensure_future(asyncio.to_thread(self._answer, "seconds"))
        done, _ = await asyncio.wait({answer}, timeout=SAMPLE_SEC)
        if not done:
            self._process.kill()
            await asyncio.wait({answer})
            answer.exception()
            raise TookTooLong(f"a sample of {case.name!r} took longer than {SAMPLE_SEC:.0f} s")
        return float(answer.result()) / (case.nodes * case.tasks * case.repeats)

    def _answer(self, word: str) -> str:
        """Return the text after `word` in the next line that starts with it. Libraries may print other lines."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise RuntimeError(f"{self._process.args!r} ended; its error is above")


@contextmanager
def _dbos(url: str) -> Iterator[Peer]:
    with _process(["-m", "benchmarks.peers.dbos_side", url], os.environ) as process:
        yield Peer(process)


def _dbos_on_sqlite(folder: Path) -> AbstractContextManager[Peer]:
    return _dbos(f"sqlite:///{folder / 'dbos.sqlite'}")


@contextmanager
def _dbos_on_postgres(_: Path) -> Iterator[Peer]:
    with ExitStack() as stack:
        yield stack.enter_context(_dbos(stack.enter_context(postgres())))


@contextmanager
def _prefect(folder: Path) -> Iterator[Peer]:
    """Run Prefect and its own server for the block."""
    port, log = free_port(), folder / "prefect-server.log"
    environment = {
        **os.environ,
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_LOGGING_LEVEL": "ERROR",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    serve = ["-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui"]
    with log.open("w") as output, _process(serve, environment, output):
        _await_server(f"http://127.0.0.1:{port}/api/health", log)
        with _process(["-m", "benchmarks.peers.prefect_side"], environment) as process:
            yield Peer(process)


ENGINES = (
    Engine(name="DBOS (SQLite)", database="peer_dbos", start=_dbos_on_sqlite, judged=True),
    Engine(
        name="DBOS (PostgreSQL)",
        database="peer_dbos",
        start=_dbos_on_postgres,
        judged=True,
        missing=postgres_missing,
    ),
    # A hundred flows at once exceed the timeouts of Prefect's server on SQLite.
    Engine(name="Prefect (SQLite)", database="peer_prefect", start=_prefect, most_tasks=1),
)


@contextmanager
def _process(
    arguments: list[str], environment: Mapping[str, str], log: IO[str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    output: Any = {"stdout": subprocess.PIPE} if log is None else {"stdout": log, "stderr": log}
    process = subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdin=subprocess.PIPE, text=True, **output
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def _await_server(url: str, log: Path) -> None:
    end = time.monotonic() + _START_SEC
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    shown = log.read_text()[-_LOG_CHARS:]
    raise RuntimeError(
        f"Prefect's server did not respond at {url} within {_START_SEC:.0f} s. Its log ends:\n{shown}"
    )
