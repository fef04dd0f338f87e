"""A `flowkit up` process for tests, with its own servers or with those of the test session."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import threading
from typing import TYPE_CHECKING, Any

from tests.fork_server import fork_server
from tests.integration.harness import EVENT_TIMEOUT_SEC
from tests.local.processes import descendants, isolated_environment

from flowkit.local.ports import is_free

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import IO

HANDLERS = """
from flowkit.worker import BatchResult, RoleHandler

class Shop(RoleHandler):
    role = "shop"

    async def process_batch(self, batch, ctx):
        return BatchResult(success=True, metrics={"rows": 1})
"""
GRAPH = {"name": "shopping", "nodes": [{"node_id": "buy", "type": "shop"}]}

_PORTS = 15
_BASES = range(12_000, 20_000 - _PORTS, _PORTS)


class UpProcess:
    """A running `flowkit up` and its output."""

    def __init__(self, folder: Path, *arguments: str, env: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self.environment = dict(env)
        self.process = fork_server().start(
            ["up", *arguments], folder, self.environment, stdout=pipe, stderr=pipe
        )
        self._folder = folder
        self.lines: list[str] = []
        """Lines of stderr read so far."""
        self._unread: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=[self.process.stderr])
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._unread.put(line.rstrip("\n"))
        self._unread.put(None)

    def wait_for_line(self, part: str) -> str:
        """Read stderr until a line contains the text, and return that line."""
        while (line := self._unread.get(timeout=EVENT_TIMEOUT_SEC)) is not None:
            self.lines.append(line)
            if part in line:
                return line
        raise AssertionError(f"stderr has no line with {part!r}:\n" + "\n".join(self.lines))

    def exports(self, *names: str) -> dict[str, str]:
        """Read the `export` lines from stdout, and add them to the environment of other commands."""
        self.wait_for_line("logs: ")
        assert self.process.stdout is not None
        found: dict[str, str] = {}
        expected = set(names or ("TEMPORAL_ADDRESS", "MONGO_URL"))
        while not expected <= found.keys() | self.environment.keys():
            name, _, value = self.process.stdout.readline().removeprefix("export ").strip().partition("=")
            found[name] = value
        self.environment |= found
        return found

    def process_tree(self) -> set[int]:
        """Return the ids of the process and all its descendants."""
        return {self.process.pid, *descendants(self.process.pid)}

    def run_command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run another command with the exported variables, and return its result."""
        done = fork_server().run(arguments, self._folder, self.environment, EVENT_TIMEOUT_SEC)
        return subprocess.CompletedProcess(arguments, *done)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, read the remaining output, and return the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait until the process exits, and return its exit code."""
        code = self.process.wait(EVENT_TIMEOUT_SEC)
        self._reader.join()
        self.lines += [line for line in list(self._unread.queue) if line is not None]
        return code

    def close(self) -> None:
        """Kill the process and close its streams."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def free_port_base() -> int:
    """Return the first of as many consecutive free ports as `flowkit up` with one worker uses.

    They are below all that `free_port` chooses, which other processes may have reserved. Other test processes choose
    from others.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    bases = _BASES[number :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
    for base in random.SystemRandom().sample(bases, len(bases)):
        if all(is_free(port) for port in range(base, base + _PORTS)):
            return base
    raise AssertionError(f"no {_PORTS} consecutive ports are free")


def environment_without_servers(folder: Path) -> dict[str, str]:
    """Return an environment that configures no servers."""
    return isolated_environment(folder / "tmp")


def write_graph(folder: Path) -> str:
    """Write the graph and its handler, and return the path of the graph."""
    (folder / "shop.py").write_text(HANDLERS)
    file = folder / "graph.json"
    file.write_text(json.dumps(GRAPH))
    return str(file)


def listed_tasks(completed: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Return the tasks in the output of `flowkit list --json`."""
    assert completed.returncode == 0, completed.stderr
    tasks: list[dict[str, Any]] = json.loads(completed.stdout)["tasks"]
    return tasks
