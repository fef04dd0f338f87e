"""Clocks of other processes that are wrong, by a small library in C that the programs of the fork server load.

Only Linux has it, and it needs a C compiler. Tests that use it are skipped elsewhere.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("clock_ahead.c")
_VARIABLE = "CLOCK_AHEAD_SEC"
_PRELOAD = "LD_PRELOAD"


def ahead(seconds: int) -> dict[str, str]:
    """Return variables with which a program of the fork server has a clock that is so many seconds ahead.

    A negative number is behind. Its own processes, such as those of a pool, have the same clock. Skip the test where
    this is not possible.
    """
    if not _library():
        pytest.skip("the clock of a process can be wrong only on Linux, with a C compiler")
    return {_VARIABLE: str(seconds), **preloaded()}


def can_differ() -> bool:
    """Return whether programs can have wrong clocks."""
    return bool(_library())


def preloaded() -> dict[str, str]:
    """Return the variable with which a process can have another clock, or nothing where it cannot."""
    others = os.environ.get(_PRELOAD, "").split()
    library = _library()
    return {_PRELOAD: " ".join(dict.fromkeys([*others, library]))} if library else {}


@cache
def _library() -> str:
    """Return the path of the compiled library, which the test processes of a run share; empty if there is none."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if sys.platform != "linux" or compiler is None:
        return ""
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    made = Path(tempfile.gettempdir(), f"flowkit-clock-{os.getuid()}-{digest}.so")
    if not made.exists():
        beside = made.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(beside), str(_SOURCE), "-ldl"]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            return ""
        beside.rename(made)
    return str(made)
