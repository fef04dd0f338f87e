"""Run the cases of the benchmark in DBOS and Prefect too, in turns with FlowKit."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.cases import CASES, Case, sample
from benchmarks.peers.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

PACKAGES = ("dbos", "prefect")
DATABASES = ("peer_dbos", "peer_prefect")
DBOS, PREFECT = "DBOS (SQLite)", "Prefect (SQLite)"
ROUNDS = 3
"""Largest number of samples per side. Prefect takes up to a minute for one."""

_START_SEC = 120.0
"""Longest time that Prefect's server may take to start."""

_LOG_CHARS = 2_000


def missing() -> str | None:
    """Return an error text if a peer is not installed, or None."""
    absent = [name for name in PACKAGES if find_spec(name) is None]
    if not absent:
        return None
    return (
        f"the peers are not installed ({', '.join(absent)}): run {sys.prefix}/bin/pip install --group peers"
    )


class Peer:
    """A process that runs samples of one peer."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answer("ready")

    async def sample(self, case: Case) -> float:
        """Run one sample and return the seconds per node."""
        plan = Plan(nodes=case.nodes, wide=case.wide, tasks=case.tasks, repeats=case.repeats)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(plan)) + "\n")
        self._process.stdin.flush()
        seconds = await asyncio.to_thread(self._answer, "seconds")
        return float(seconds) / (case.nodes * case.tasks * case.repeats)

    def _answer(self, word: str) -> str:
        """Return the text after `word` in the next line that starts with it. Libraries may print other lines."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise RuntimeError(f"{self._process.args!r} ended; its error is above")


@contextmanager
def dbos(folder: Path) -> Iterator[Peer]:
    """Run DBOS for the block."""
    with _process(["-m", "benchmarks.peers.dbos_side", str(folder)], os.environ) as process:
        yield Peer(process)


@contextmanager
def prefect(folder: Path) -> Iterator[Peer]:
    """Run Prefect and its own server for the block."""
    port, log = _free_port(), folder / "prefect-server.log"
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


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


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


def _started(name: str, folder: Path) -> AbstractContextManager[Peer]:
    return dbos(folder) if name == DBOS else prefect(folder)


async def measure(
    folder: Path,
    only: str,
    rounds: int,
    by_flowkit: Callable[[Case], Awaitable[None]],
    clean: Callable[[], Awaitable[None]],
) -> list[dict[str, Any]]:
    """Measure the cases of roles on FlowKit and on each peer in turn. `clean` empties the collections.

    Only one peer runs at a time, because Prefect's server needs the processor even when no flow runs.
    """
    cases = [case for case in CASES if only in case.name and not case.functions]
    results = []
    for name in (DBOS, PREFECT) if cases else ():
        with _started(name, folder) as peer:
            for case in (each for each in cases if _bears(name, each)):
                sides = {"flowkit": partial(sample, case, by_flowkit), "peer": partial(peer.sample, case)}
                results.append(await _measured(case, name, sides, min(rounds, ROUNDS), clean))
    return results


async def _measured(
    case: Case,
    peer: str,
    sides: Mapping[str, Callable[[], Awaitable[float]]],
    rounds: int,
    clean: Callable[[], Awaitable[None]],
) -> dict[str, Any]:
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds + 1):
        for name, run in sides.items():
            await clean()
            seconds = await run()
            if round_:  # the first round warms up both sides
                samples[name].append(seconds * 1_000 if case.per_node else 1 / seconds)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "case": case.name,
        "peer": peer,
        "unit": "ms/node" if case.per_node else "nodes/s",
        "samples": samples,
        "median": medians,
        "ratio": medians["flowkit"] / medians["peer"],
        "load": os.getloadavg()[0],
    }


def _bears(peer: str, case: Case) -> bool:
    """Return whether a peer can run a case. A hundred flows at once exceed the timeouts of Prefect on SQLite."""
    return peer != PREFECT or case.tasks == 1


def table(results: list[dict[str, Any]]) -> Table:
    """Return one row for each case and peer, with the ratio of FlowKit's median to the peer's."""
    title = "FlowKit compared with other engines that make the same writes per node"
    shown = Table("case", "peer", "its figure", "FlowKit", "ratio", "load", title=title)
    for result in results:
        cells = [_cell(result, name) for name in ("peer", "flowkit")]
        load = f"{result['load']:.1f}"
        shown.add_row(result["case"], result["peer"], *cells, f"{result['ratio']:.3f}", load)
    return shown


def _cell(result: dict[str, Any], name: str) -> str:
    values = result["samples"][name]
    return f"{result['median'][name]:.1f} ({min(values):.1f}..{max(values):.1f}) {result['unit']}"
