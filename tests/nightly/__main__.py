"""`python -m tests.nightly`: what takes too long for `make test`, one step after the other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from flowkit.local.errors import DevServerError
from tests.nightly.newer_server import is_built, newer_server

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TOTALS = re.compile(r"\b\d+ (?:passed|failed|skipped|errors?|deselected)\b")
SUITE = "tests/integration"
NEEDS_CLIENT_COMMANDS = (
    "tests/integration/test_plain_client_start.py::test_temporal_cli_starts_a_task_that_completes"
)
"""The test that calls other commands than the one of a built server."""

console = Console(width=120, highlight=False)


@dataclass(frozen=True, slots=True)
class Step:
    """A command, and how to get what it needs from the environment."""

    command: tuple[str, ...]
    environment: Callable[[], Mapping[str, str]] = dict


@dataclass(frozen=True, slots=True)
class Ended:
    """How a step ended."""

    name: str
    code: int
    seconds: float
    totals: tuple[str, ...]


def main(
    minutes: Annotated[int, typer.Option(help="Minutes of `fuzz`, and of `chaos` on each server.")] = 10,
    sizes: Annotated[str, typer.Option(help="Numbers of nodes for `large`.")] = "1000,5000",
    jobs: Annotated[int, typer.Option(help="Test processes on the newer server and on the cluster.")] = 4,
    steps: Annotated[str, typer.Option(help="Run only these steps, comma-separated.")] = "",
    tests: Annotated[str, typer.Option(help="The tests that run on both.")] = SUITE,
) -> None:
    """Run the steps, print their totals, and exit with code 1 if one has failed."""
    known = all_steps(minutes, sizes, jobs, tests.split())
    chosen = [name.strip() for name in steps.split(",") if name.strip()] or list(known)
    if unknown := set(chosen) - set(known):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    ended = [_run(name, known[name]) for name in chosen]
    console.print(_summary(ended))
    sys.exit(1 if any(each.code for each in ended) else 0)


def all_steps(minutes: int, sizes: str, jobs: int, tests: list[str]) -> dict[str, Step]:
    """Return the steps in their order."""
    pytest = (
        str(Path(sys.executable).parent / "pytest"),
        "-q",
        "-n",
        str(jobs),
        "--dist",
        "worksteal",
    )
    on_cluster = (sys.executable, "-m", "tests.nightly.on_cluster")
    make = ("make", "--no-print-directory", f"MINUTES={minutes}", f"SIZES={sizes}")
    return {
        "long": Step((*pytest, "-m", "nightly")),
        "server": Step((*pytest, "-m", "not nightly", *tests), _on_newer_server),
        "drivers": Step((*pytest, "tests/contract"), lambda: {"FLOWKIT_ALL_DRIVERS": "1"}),
        "core": Step((sys.executable, "-m", "tests.nightly.core_alone", str(jobs))),
        "cluster": Step((*on_cluster, str(minutes), str(jobs), " ".join(tests))),
        **{name: Step((*make, name)) for name in ("fuzz", "chaos", "large")},
    }


def totals_of(output: str) -> tuple[str, ...]:
    """Return the totals of each run of pytest, from lines such as `2 failed, 3 passed in 1.2s`."""
    lines = [line for line in output.splitlines() if re.search(r" in \d+\.\d+s", line)]
    return tuple(", ".join(found) for line in lines if (found := TOTALS.findall(line)))


def _on_newer_server() -> dict[str, str]:
    """Return the environment of tests on the newer server."""
    program, options = newer_server(), os.environ.get("PYTEST_ADDOPTS", "")
    if is_built(program):
        options = f"{options} --deselect {NEEDS_CLIENT_COMMANDS}"
    return {"FLOWKIT_TEMPORAL_BIN": program, "FLOWKIT_SERVERS": "", "PYTEST_ADDOPTS": options}


def _run(name: str, step: Step) -> Ended:
    console.rule(f"{name}, since {time.strftime('%H:%M')}")
    began = time.monotonic()
    try:
        code, output = _shown(step)
    except DevServerError as error:
        console.print(str(error), style="red")
        code, output = 1, ""
    return Ended(name, code, time.monotonic() - began, totals_of(output))


def _shown(step: Step) -> tuple[int, str]:
    """Run the command, show its output as it comes, and return its exit code and its output."""
    environment = {**os.environ, **step.environment()}
    environment.pop("PYTHONPATH", None)  # with the root on it, Python loads modules a second time
    with subprocess.Popen(step.command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            lines.append(line)
    return process.returncode, "".join(lines)


def _summary(ended: list[Ended]) -> Table:
    table = Table("step", "result", "took", "tests", title="nightly")
    for each in ended:
        result = f"failed with code {each.code}" if each.code else "passed"
        table.add_row(each.name, result, f"{each.seconds / 60:.1f} min", "; ".join(each.totals))
    return table


if __name__ == "__main__":
    typer.run(main)
