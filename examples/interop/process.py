"""External workers as processes of another Python environment."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from interop.handlers import HANDLERS

if TYPE_CHECKING:
    from collections.abc import Sequence

FOLDER = Path(__file__).parent


def worker_command(python: str, command: str) -> list[str]:
    """Return the command of the worker: the given one, the public worker of `python`, or FlowKit's own worker.

    `{name}` in a command becomes the worker's name.
    """
    if command:
        return shlex.split(command)
    if python:
        return [python, str(FOLDER / "public_worker.py")]
    handlers = [f"{role}=interop.handlers:{handler.__name__}" for role, handler in HANDLERS.items()]
    options = [part for handler in handlers for part in ("--handler", handler)]
    settings = ["--setting", "lease_ttl_sec=10", "--setting", "hb_interval_sec=2"]
    return [
        sys.executable,
        "-m",
        "flowkit.testing.external",
        "--worker-id",
        "{name}",
        "--roles",
        ",".join(HANDLERS),
        *options,
        *settings,
    ]


class WorkerProcess:
    """One process of an external worker."""

    def __init__(self, folder: Path, name: str, command: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        inherited = dict(os.environ)
        if command[0] != sys.executable:
            inherited["PYTHONPATH"] = str(FOLDER.parent)  # The handlers, but nothing of this FlowKit.
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [part.replace("{name}", name) for part in command],
                env={**inherited, **environment, "INTEROP_WORKER_ID": name},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End the process with SIGTERM, or after ten seconds with SIGKILL."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
