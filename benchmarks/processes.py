"""The processes of a benchmark: how it starts and stops them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import temporalio

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

OPTIMIZING = "-XX:TieredStopAtLevel=4"
"""Java option for MongoDB's stand-in. Under minutes of load, the optimizing compiler pays off for large documents."""


def flowkit(*arguments: str) -> list[str]:
    """Return the command that runs the `flowkit` of this virtual environment."""
    return [str(Path(sys.executable).parent / "flowkit"), *arguments]


@contextmanager
def process(command: list[str], environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Run a command for the block, then stop it with SIGTERM."""
    started = subprocess.Popen(command, env=_with_bytecode(environment))
    try:
        yield
    finally:
        started.terminate()
        started.wait(20)


def _with_bytecode(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without PYTHONDONTWRITEBYTECODE: both sides cache bytecode, as installed programs do.

    Without the cache, programs compile modules at each import, and a sandboxed workflow imports its own in every run.
    """
    return {name: value for name, value in environment.items() if name != "PYTHONDONTWRITEBYTECODE"}


def machine() -> str:
    """Return the machine, the versions and the time of the measurement."""
    versions = f"Python {platform.python_version()}, temporalio {temporalio.__version__}, load {os.getloadavg()[0]:.1f}"
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {versions}, {when}"
