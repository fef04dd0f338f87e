"""`flowkit up` for tests: started with servers of its own or with those of the session, read, and ended."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from typing import TYPE_CHECKING, Any

from tests.integration.world import CEILING, FLOWKIT
from tests.local.processes import descendants, isolated_environment

from flowkit.local.ports import CANDIDATES, is_free

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
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


class Up:
    """One `flowkit up`, and what it prints."""

    def __init__(self, folder: Path, *arguments: str, env: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self.environment = dict(env)
        self.process = subprocess.Popen(
            [str(FLOWKIT), "up", *arguments],
            cwd=folder,
            env=self.environment,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        self.told: list[str] = []
        """Lines of stderr that were read so far."""
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=[self.process.stderr])
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def line(self, part: str) -> str:
        """The next line of stderr that holds this text."""
        while (line := self._lines.get(timeout=CEILING)) is not None:
            self.told.append(line)
            if part in line:
                return line
        raise AssertionError(f"{part!r} never came; what came:\n" + "\n".join(self.told))

    def exports(self) -> dict[str, str]:
        """What stdout told; the environment of other programs has it from then on."""
        self.line("logs: ")
        assert self.process.stdout is not None
        found: dict[str, str] = {}
        while not {"TEMPORAL_ADDRESS", "MONGO_URL"} <= found.keys() | self.environment.keys():
            name, _, value = self.process.stdout.readline().removeprefix("export ").strip().partition("=")
            found[name] = value
        self.environment |= found
        return found

    def family(self) -> set[int]:
        """All processes that belong to it."""
        return {self.process.pid, *descendants(self.process.pid)}

    def flowkit(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The answer of another command, in a terminal that knows the exports."""
        return subprocess.run(
            [str(FLOWKIT), *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=CEILING,
            check=False,
        )

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, read the rest, and answer the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        code = self.process.wait(CEILING)
        self._reader.join()
        self.told += [line for line in list(self._lines.queue) if line is not None]
        return code

    def close(self) -> None:
        """Whatever became of the test."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def four_ports() -> int:
    """The first of four free ports in a row."""
    start = int.from_bytes(os.urandom(4)) % (len(CANDIDATES) - 4)
    bases: Iterator[int] = iter([*CANDIDATES[start:-4], *CANDIDATES[:start]])
    return next(base for base in bases if all(is_free(port) for port in range(base, base + 4)))


def alone(folder: Path) -> dict[str, str]:
    """An environment in which no server runs."""
    return isolated_environment(folder / "tmp")


def graph_file(folder: Path) -> str:
    """The graph, as a file."""
    (folder / "shop.py").write_text(HANDLERS)
    file = folder / "graph.json"
    file.write_text(json.dumps(GRAPH))
    return str(file)


def listed(said: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The tasks in the answer of `flowkit list --json`."""
    assert said.returncode == 0, said.stderr
    tasks: list[dict[str, Any]] = json.loads(said.stdout)["tasks"]
    return tasks
