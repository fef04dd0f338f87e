"""Helpers for tests of local servers: a scripted process, and queries about other processes."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tests.integration.harness import EVENT_TIMEOUT_SEC as TIMEOUT_SEC

from flowkit.local.process import ServerProcess

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable


WAIT_FOREVER = "import threading; threading.Event().wait()"


class ScriptedProcess(ServerProcess):
    """A server whose program is a Python script."""

    name = "scripted"

    def __init__(
        self, folder: Path, script: str, *ports: int, ready: bool | Path, name: str = "scripted"
    ) -> None:
        self.name = name
        super().__init__(folder, *ports)
        self._script, self._ready = script, ready

    @classmethod
    def install(cls) -> None:
        """Do nothing."""

    def command(self) -> list[str]:
        """Return the command that runs the script."""
        return [sys.executable, "-c", self._script]

    def is_ready(self) -> bool:
        """Return the given value, or whether the given file exists."""
        return self._ready.exists() if isinstance(self._ready, Path) else self._ready


def stdout_of(process: subprocess.Popen[str]) -> IO[str]:
    """Return the stdout of a process."""
    assert process.stdout is not None
    return process.stdout


def wait_until(condition: Callable[[], bool], *, within: float = TIMEOUT_SEC) -> None:
    """Return as soon as the condition is true; fail on a timeout."""
    deadline, never = time.monotonic() + within, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("the condition did not become true in time")
        never.wait(0.02)


def descendants(pid: int) -> set[int]:
    """Return the ids of all child processes, direct and indirect."""
    children: dict[int, set[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, set()).add(int(stat.parent.name))
    all_found: set[int] = set()
    unvisited = {pid}
    while unvisited:
        unvisited = {child for one in unvisited for child in children.get(one, set())} - all_found
        all_found |= unvisited
    return all_found


def still_running(pids: set[int]) -> set[int]:
    """Return those processes that have not exited. A zombie has exited."""
    return {pid for pid in pids if _state(pid) not in ("", "Z")}


def _state(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def isolated_environment(folder: Path) -> dict[str, str]:
    """Return the environment without configured servers, and with `folder` for temporary files."""
    servers = {"TEMPORAL_ADDRESS", "MONGO_URL", "KAFKA_BOOTSTRAP_SERVERS"}
    named = {*servers, "TEMPORAL_NAMESPACE", "MONGO_DATABASE", "FLOWKIT_QUEUE"}
    folder.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name not in named}
    return {**kept, "TMPDIR": str(folder)}


def create_program(path: Path) -> str:
    """Create an executable that does nothing, and return its path."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)
