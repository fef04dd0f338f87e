"""The processes of a deployment that a play kills, and the servers that it has."""

from __future__ import annotations

import asyncio
import time
from enum import StrEnum
from typing import TYPE_CHECKING

from flowkit.local.ports import free_port
from tests.integration.flow_model.limits import Era
from tests.integration.harness import EVENT_TIMEOUT_SEC

if TYPE_CHECKING:
    from tests.fork_server import ForkedProcess
    from tests.integration.harness import Harness


class Part(StrEnum):
    """A process."""

    GATEWAY = "gateway"
    JOBS = "gateway that dispatches jobs"
    ENGINE = "engine"


class Cluster:
    """Two gateways, of which one dispatches jobs, and an engine, each in a process of its own."""

    def __init__(self, harness: Harness, mycelium_url: str) -> None:
        self.harness = harness
        self._mycelium_url = mycelium_url
        self._ports = {part: free_port() for part in (Part.GATEWAY, Part.JOBS)}
        self._running: dict[Part, ForkedProcess] = {}
        self.eras: list[Era] = []
        """The engines, one after the other."""

    @property
    def urls(self) -> list[str]:
        """The addresses of the gateways, always the same."""
        return [f"http://127.0.0.1:{port}" for port in self._ports.values()]

    def start(self, part: Part, limit: int | None = None) -> None:
        """Start a process. An engine has this limit of attempts of jobs in flight."""
        if part is Part.ENGINE:
            self.harness.settings["max_type_concurrency"] = {} if limit is None else {"job": limit}
            self.eras.append(Era(limit=limit, begun=time.monotonic()))
            self._running[part] = self.harness.engine_process()
            return
        jobs = "--jobs" if part is Part.JOBS else "--no-jobs"
        ports = ("--port", str(self._ports[part]), "--websocket-port", str(free_port()))
        options = ("--supervisor-networks", "loopback", "--mycelium-url", self._mycelium_url)
        self._running[part] = self.harness.process("gateway", jobs, *ports, *options)

    async def kill(self, part: Part, away: float, limit: int | None) -> None:
        """Kill a process, and start it again after this time. An engine then has this limit."""
        if part is Part.ENGINE:
            self.eras[-1].ended = time.monotonic()
        self._running[part].kill()
        self._running[part].wait(EVENT_TIMEOUT_SEC)
        await asyncio.sleep(away)
        if part is Part.ENGINE:
            await self.harness.release_tasks()
        self.start(part, limit)
