"""`make bench`: how the figures of a row follow from its samples, and how it counts what processes use."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]


def module(name: str) -> ModuleType:
    """Import a module of the benchmark, whose folder is not on the import path of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        return importlib.import_module(f"benchmarks.{name}")


figures, processes, rows = module("figures"), module("processes"), module("rows")
Used = processes.Used


def measured(unit: str, *sides: list[Any]) -> Any:
    """Return a row of 10 items with the samples of the baseline and of FlowKit."""
    target = rows.Target(ratio=">= 0.95" if unit.endswith("/s") else "<= 1.05")
    return rows.Measured(
        row=rows.Row(name="case", unit=unit, items=10, targets={"flowkit": target}),
        samples=dict(zip(("baseline", "flowkit"), sides, strict=True)),
        programs={"baseline": "baseline", "flowkit": "flowkit"},
        items={"baseline": 10, "flowkit": 10},
        idle={
            ("baseline", "engine"): 0.01,
            ("flowkit", "engine"): 0.01,
            ("flowkit", "worker"): 0.0,
            ("shared", "Temporal"): 0.02,
        },
        took_sec=1.0,
    )


def sample(figure: float, seconds: float, *, flowkit: float, baseline: float) -> Any:
    """Return a sample in which the processes of both sides and the server have used some time."""
    return rows.Sample(
        figure=figure,
        seconds=seconds,
        usage={
            ("baseline", "engine"): Used(seconds=baseline, user=baseline, commands=20, bytes=2_000),
            ("flowkit", "engine"): Used(seconds=flowkit, user=flowkit, commands=30, bytes=3_000),
            ("flowkit", "worker"): Used(seconds=flowkit, system=flowkit),
            ("shared", "Temporal"): Used(seconds=0.32, user=0.30),
        },
    )


def test_processor_time_is_that_of_the_programs_of_a_side_without_their_idle_time() -> None:
    by_hand = sample(20.0, 2.0, flowkit=0.02, baseline=0.22)
    ours = sample(30.0, 1.0, flowkit=0.15, baseline=0.01)
    found = figures.result(measured("ms/node", [by_hand], [ours]))
    baseline, flowkit = found["sides"]["baseline"], found["sides"]["flowkit"]
    assert baseline["own"] == pytest.approx(20.0)
    assert baseline["all"] == pytest.approx(20.0 + 28.0)
    assert {name: used["ms"] for name, used in flowkit["processes"].items()} == pytest.approx(
        {"engine": 14.0, "worker": 15.0, "Temporal": 30.0}
    )
    assert (flowkit["commands"], flowkit["bytes"]) == (3.0, 300.0)
    ratios = {kind: ratio for kind, (ratio,) in found["ratios"]["flowkit"].items()}
    assert ratios == pytest.approx({"wall": 1.5, "own": 29.0 / 20.0, "all": 59.0 / 48.0})


def test_ratios_of_a_rate_have_the_sense_of_its_target() -> None:
    by_hand, ours = sample(100.0, 0.0, flowkit=0, baseline=0.1), sample(50.0, 0.0, flowkit=0.1, baseline=0)
    found = figures.result(measured("nodes/s", [by_hand], [ours]))
    assert found["ratios"]["flowkit"]["wall"] == [0.5]
    assert found["ratios"]["flowkit"]["own"] == pytest.approx([0.5])


@pytest.mark.parametrize(
    ("walls", "decides"), [((1.00, 1.09), "wall"), ((1.00, 1.12), "all"), ((0.9, 1.0), "all")]
)
def test_processor_time_decides_where_the_wall_times_of_two_runs_differ(
    walls: tuple[float, float], decides: str
) -> None:
    runs = [
        {"ratios": {"flowkit": {"wall": [wall], "own": [2.0], "all": [1.02]}}, "targets": {}}
        for wall in walls
    ]
    kind, ratio = figures.decides(runs, "flowkit")
    assert kind == decides
    assert ratio == pytest.approx(1.02 if kind == "all" else sum(walls) / 2)
    streaming = [{**run, "targets": {"flowkit": {"decided_by_wall": True}}} for run in runs]
    assert figures.decides(streaming, "flowkit")[0] == "wall"


@pytest.mark.parametrize(
    ("target", "ratio", "met"),
    [("<= 1.05", 1.05, True), ("<= 1.05", 1.06, False), (">= 0.95", 0.95, True), (">= 0.95", 0.94, False)],
)
def test_bar_of_a_target_is_within_it(target: str, ratio: float, met: bool) -> None:
    assert figures.is_met(target, ratio) is met


@pytest.mark.parametrize(("seconds", "code"), [(0.31, 0), (0.40, 1)])
def test_two_runs_agree_if_their_processor_times_do(tmp_path: Path, seconds: float, code: int) -> None:
    agreement, files = module("agreement"), [tmp_path / "first.json", tmp_path / "second.json"]
    for file, flowkit in zip(files, (0.30, seconds), strict=True):
        by_hand, ours = (sample(20.0, 0.0, flowkit=flowkit, baseline=0.3) for _ in range(2))
        file.write_text(json.dumps([figures.result(measured("ms/node", [by_hand], [ours]))]))
    with agreement.console.capture() as printed, pytest.raises(typer.Exit) as end:
        agreement.main(*map(str, files))
    assert end.value.exit_code == code
    assert "<= 1.05: met by wall 1.00" in printed.get()
    assert ("case, flowkit: the ratios of processor time differ by 29%" in printed.get()) is bool(code)


WORKS = """
import sys
from unittest.mock import Mock
from pymongo.synchronous.pool import Connection
connection = object.__new__(Connection)
connection.max_bson_size = None
connection.conn = Mock()
for size in (100, 250):
    connection.send_message(bytes(size), 0)
print("ready", flush=True)
sys.stdin.readline()
"""


def test_process_counts_what_it_sends_and_its_processor_time_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "works.py").write_text(WORKS)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    counting = processes.Processes(tmp_path)
    program = processes.Program(name="worker", side="flowkit", module="works", on_request=True)
    with counting.running(program) as (process,):
        assert process.stdout.readline() == "ready\n"
        used = counting.usage()[("flowkit", "worker")]
        assert (used.commands, used.bytes) == (2, 350)
        assert used.seconds > 0.0
        assert used.seconds == pytest.approx(used.user + used.system, abs=0.1)
    assert ("flowkit", "worker") not in counting.usage()


def test_server_is_the_process_that_listens_on_its_port(tmp_path: Path) -> None:
    program = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    counting, pipe = processes.Processes(tmp_path), subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe) as server:
        port = int(server.stdout.readline())  # type: ignore[union-attr]
        with counting.server("Temporal", port):
            assert counting.usage()[("shared", "Temporal")].seconds > 0.0
        server.stdin.close()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("address", "port"),
    [
        ("127.0.0.1:7233", 7233),
        ("mongodb://127.0.0.1:27017", 27017),
        ("postgresql://u@127.0.0.1:5/postgres", 5),
    ],
)
def test_port_of_an_address(address: str, port: int) -> None:
    assert processes.port_of(address) == port
