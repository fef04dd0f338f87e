"""What tests of local servers share: a process that is a line of Python, and a look at the processes of others."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from flowkit.local.process import ServerProcess

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

TIMEOUT_SEC = 40.0
"""Seconds after which something that should have happened has not; far above what it takes."""

WAIT_FOREVER = "import threading; threading.Event().wait()"


class ScriptedProcess(ServerProcess):
    """A server that is a line of Python."""

    name = "scripted"

    def __init__(
        self, folder: Path, script: str, *ports: int, ready: bool | Path, name: str = "scripted"
    ) -> None:
        self.name = name
        super().__init__(folder, *ports)
        self._script, self._ready = script, ready

    @classmethod
    def install(cls) -> None:
        """Nothing to do."""

    def command(self) -> list[str]:
        """Python with that line."""
        return [sys.executable, "-c", self._script]

    def is_ready(self) -> bool:
        """As told, or once a file is there."""
        return self._ready.exists() if isinstance(self._ready, Path) else self._ready


def stdout_of(process: subprocess.Popen[str]) -> IO[str]:
    """A process's output."""
    assert process.stdout is not None
    return process.stdout


def wait_until(condition: Callable[[], bool], *, within: float = TIMEOUT_SEC) -> None:
    """Return as soon as the condition holds; fail if it does not in time."""
    deadline, never = time.monotonic() + within, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        never.wait(0.02)


def descendants(pid: int) -> set[int]:
    """The children of a process, theirs, and so on."""
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
    """Those of the processes that have not ended; a zombie has."""
    return {pid for pid in pids if _state(pid) not in ("", "Z")}


def _state(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def isolated_environment(folder: Path) -> dict[str, str]:
    """The environment without servers of others, and with temporary files of its own."""
    named = {"TEMPORAL_ADDRESS", "MONGO_URL", "TEMPORAL_NAMESPACE", "MONGO_DATABASE", "FLOWKIT_QUEUE"}
    folder.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name not in named}
    return {**kept, "TMPDIR": str(folder)}
