"""`make bench PEERS=1`: what it reports without the peers, and how it talks to a peer's process."""

from __future__ import annotations

import importlib
import io
import os
import runpy
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]


def benchmark() -> dict[str, ModuleType]:
    """Import the modules of the benchmark, whose folder is not on the import path of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        peers = {
            name: importlib.import_module(f"benchmarks.peers.{name}")
            for name in ("compare", "engines", "postgres")
        }
        return {
            **peers,
            **{name: importlib.import_module(f"benchmarks.{name}") for name in ("processes", "rows")},
        }


def run(program: str, **variables: str) -> str:
    """Run a program that may change the modules of the benchmark, and return what it prints."""
    modules: dict[str, Any] = dict(benchmark())
    printed = io.StringIO()
    with ExitStack() as stack:
        for module in modules.values():
            stack.enter_context(mock.patch.dict(vars(module)))
        stack.enter_context(mock.patch.dict(os.environ, variables))
        stack.enter_context(redirect_stdout(printed))
        file = stack.enter_context(NamedTemporaryFile("w", suffix=".py", encoding="utf-8"))
        file.write(program)
        file.flush()
        runpy.run_path(file.name, init_globals=modules)
    return printed.getvalue()


def test_missing_peers_are_named_with_the_command_that_installs_them() -> None:
    found = run("engines.PACKAGES = ('json', 'no_such_peer')\nprint(engines.missing())")
    assert found.startswith("the peers are not installed (no_such_peer): run ")
    assert found.strip().endswith("/bin/pip install --group peers")
    assert run("engines.PACKAGES = ('json',)\nprint(engines.missing())") == "None\n"


SAMPLES = """
import asyncio, subprocess, sys
from benchmarks.cases import Case
ECHO = '''
import json, sys
print("a line of a library")
print("ready", flush=True)
for line in sys.stdin:
    plan = json.loads(line)
    print("seconds", plan["nodes"] * plan["tasks"] * plan["repeats"] * 2, flush=True)
'''
pipe = subprocess.PIPE
with subprocess.Popen([sys.executable, "-c", ECHO], stdin=pipe, stdout=pipe, text=True) as process:
    peer = engines.Peer(process)
    for case in (Case(name="c", nodes=30, repeats=3), Case(name="t", nodes=10, tasks=100)):
        print(asyncio.run(peer.sample(case)))
    process.stdin.close()
    try:
        peer._answer("seconds")
    except RuntimeError as error:
        print(str(error).partition(" ended")[1:])
"""


def test_sample_of_a_peer_is_its_time_per_node_and_its_end_an_error() -> None:
    assert run(SAMPLES).splitlines() == ["2.0", "2.0", "(' ended', '; its error is above')"]


SLOW = """
import asyncio, subprocess, sys
from benchmarks.cases import Case
engines.SAMPLE_SEC = 0.05
pipe = subprocess.PIPE
program = "import sys; print('ready', flush=True); sys.stdin.readline(); sys.stdin.readline()"
with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True) as process:
    try:
        asyncio.run(engines.Peer(process).sample(Case(name="chain", nodes=30)))
    except engines.TookTooLong as error:
        print(error)
"""


def test_sample_that_takes_too_long_ends_with_its_process() -> None:
    assert run(SLOW) == "a sample of 'chain' took longer than 0 s\n"


MEASURE = """
import asyncio, contextlib
from pathlib import Path

import pytest

class Fake:
    async def sample(self, case):
        if case.wide:
            raise engines.TookTooLong("too slow")
        counts.append(compare.documents(case))
        return 0.02

@contextlib.contextmanager
def started(processes, folder):
    yield Fake()

rows.IDLE_SEC = rows.SETTLE_SEC = 0.0

async def one(case):
    if len(ran) % (case.tasks * case.repeats) == 0:
        counts.append(compare.documents(case))
    ran.append(case.name)

async def clean():
    counts.clear()
    ran.clear()

async def count(database):
    return counts[-1] | {"tasks": counts[-1]["tasks"] + LESS}

counts, ran = [], []
compare.ENGINES = [
    engines.Engine(name="absent", database="peer", start=started, missing=lambda: "it is not here"),
    engines.Engine(name="fake", database="peer", start=started, judged=True, most_tasks=1),
]
own = processes.Processes(Path("."))
sides = {"ordinary": one, "inline": one, "clean": clean, "count": count}
setting = compare.Setting(processes=own, folder=Path("."), say=print, **sides)
for result in asyncio.run(compare.measure_all(setting, "", "", 2)):
    print(result["case"], result["rounds"], *result["sides"], result["targets"]["inline"]["processor"])
"""


def test_engine_that_is_absent_or_too_slow_is_skipped_with_a_sentence() -> None:
    *said, result = run(f"LESS = 0\n{MEASURE}").splitlines()
    assert said == [
        "it is not here",
        "fake, chain of 30: 0 s",
        "skipping the remaining cases of fake: too slow",
    ]
    assert result == "chain of 30 beside fake 2 baseline flowkit inline <= 0.90"


def test_side_that_makes_other_writes_is_an_error() -> None:
    program = MEASURE.replace("for result", "try:\n  for result").replace(
        "    print(result", "      print(result"
    )
    found = run(f"LESS = -1\n{program}except RuntimeError as error:\n  print(error)")
    assert "after a sample of 'chain of 30', " in found
    assert "holds {'tasks': 1, 'finished_nodes': 60, 'metrics_raw': 60, 'artifacts': 120}, not" in found


def test_without_postgresql_the_sentence_says_how_to_get_it(tmp_path: Path) -> None:
    program = "postgres.DEBIAN = 'nowhere/*'\nprint(postgres.missing())"
    found = run(program, PATH=str(tmp_path), POSTGRES_URL="")
    assert found.startswith("skipping DBOS on PostgreSQL: POSTGRES_URL is not set, and neither PATH nor ")
    assert "install the package postgresql, or set the variable" in found


def test_postgresql_of_the_variable_is_used(tmp_path: Path) -> None:
    program = "with postgres.postgres() as url: print(postgres.missing(), url)"
    url = "postgresql://someone@example/test"
    assert run(program, PATH=str(tmp_path), POSTGRES_URL=url) == f"None {url}\n"


@pytest.mark.slow
def test_temporary_postgresql_accepts_connections_until_the_end_of_the_block() -> None:
    if run("print(postgres.missing())", POSTGRES_URL="") != "None\n":
        pytest.skip("this machine has no PostgreSQL")
    program = """
import socket
from urllib.parse import urlsplit
with postgres.postgres() as url:
    address = urlsplit(url).hostname, urlsplit(url).port
    socket.create_connection(address).close()
try:
    socket.create_connection(address).close()
except ConnectionRefusedError:
    print("ended")
"""
    assert run(program, POSTGRES_URL="") == "ended\n"
