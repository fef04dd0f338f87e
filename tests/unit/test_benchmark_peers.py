"""`make bench PEERS=1`: what it reports without the peers, and how it talks to a peer's process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(program: str) -> str:
    """Run a program that imports the benchmark, in a process of its own, and return what it prints.

    The folder `benchmarks` is not on the import path of the tests.
    """
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", f"from benchmarks.peers import compare\n{program}"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_missing_peers_are_named_with_the_command_that_installs_them() -> None:
    found = run("compare.PACKAGES = ('json', 'no_such_peer')\nprint(compare.missing())")
    assert found.startswith("the peers are not installed (no_such_peer): run ")
    assert found.strip().endswith("/bin/pip install --group peers")
    assert run("compare.PACKAGES = ('json',)\nprint(compare.missing())") == "None\n"


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
    peer = compare.Peer(process)
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


TABLE = """
from rich.console import Console
sides = {"flowkit": [8.0, 9.0, 10.0], "peer": [18.0, 18.0, 20.0]}
result = {"case": "chain of 30", "peer": compare.DBOS, "unit": "ms/node", "samples": sides, "load": 1.25}
medians = {"flowkit": 9.0, "peer": 18.0}
Console(width=200).print(compare.table([{**result, "median": medians, "ratio": 0.5}]))
"""


def test_table_compares_each_peer_with_flowkit() -> None:
    text = run(TABLE)
    for part in (
        "chain of 30",
        "DBOS (SQLite)",
        "18.0 (18.0..20.0) ms/node",
        "9.0 (8.0..10.0) ms/node",
        "0.500",
    ):
        assert part in text
