"""The other engines, each as a process that runs samples on request."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from benchmarks.peers.plan import Plan
from benchmarks.peers.postgres import missing as postgres_missing
from benchmarks.peers.postgres import postgres
from benchmarks.processes import Processes, Program, port_of
from benchmarks.served import Served
from flowkit.local.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from benchmarks.cases import Case

PACKAGES = ("dbos", "prefect")
SIDE = "peer"
"""The side of the other engine."""

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
    start: Callable[[Processes, Path], AbstractContextManager[Peer]]
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


class Peer(Served):
    """A process that runs samples of one engine."""

    async def sample(self, case: Case) -> float:
        """Run one sample and return the seconds per node. TookTooLong, and the process ends, after SAMPLE_SEC."""
        plan = Plan(nodes=case.nodes, wide=case.wide, tasks=case.tasks, repeats=case.repeats)
        try:
            seconds = await self.ask(dataclasses.asdict(plan), SAMPLE_SEC)
        except TimeoutError:
            raise TookTooLong(f"a sample of {case.name!r} took longer than {SAMPLE_SEC:.0f} s") from None
        return seconds / (case.nodes * case.tasks * case.repeats)


@contextmanager
def _peer(processes: Processes, name: str, *arguments: str, **environment: str) -> Iterator[Peer]:
    module = f"benchmarks.peers.{name.lower()}_side"
    program = Program(
        name=name, side=SIDE, module=module, arguments=arguments, environment=environment, on_request=True
    )
    with processes.running(program) as (process,):
        yield Peer(process)


def _dbos_on_sqlite(processes: Processes, folder: Path) -> AbstractContextManager[Peer]:
    return _peer(processes, "DBOS", f"sqlite:///{folder / 'dbos.sqlite'}")


@contextmanager
def _dbos_on_postgres(processes: Processes, _: Path) -> Iterator[Peer]:
    with (
        postgres() as url,
        processes.server("PostgreSQL", port_of(url), tree=True),
        _peer(processes, "DBOS", url) as peer,
    ):
        yield peer


@contextmanager
def _prefect(processes: Processes, folder: Path) -> Iterator[Peer]:
    """Run Prefect and its own server for the block."""
    port, log = free_port(), folder / "prefect-server.log"
    environment = {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_LOGGING_LEVEL": "ERROR",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    with (
        _prefect_server(port, log, environment),
        processes.server("Prefect's server", port, tree=True),
        _peer(processes, "Prefect", **environment) as peer,
    ):
        yield peer


@contextmanager
def _prefect_server(port: int, log: Path, environment: Mapping[str, str]) -> Iterator[None]:
    command = ["-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command], env={**os.environ, **environment}, stdout=output, stderr=output
        )
    try:
        _await_server(f"http://127.0.0.1:{port}/api/health", log)
        yield
    finally:
        process.terminate()
        process.wait(20)


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
