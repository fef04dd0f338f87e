"""An external worker for one role of the demo, with the Kafka broker and the bridge that it needs."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Self

from code_index.processes import DATABASE
from flowkit.local import Kafka
from flowkit.local.process import FlowkitProcess, bridge_process, start_all, stop_all

if TYPE_CHECKING:
    from pathlib import Path

    from flowkit.local.process import ServerProcess

EXTERNAL_ROLE = "grouper"
EXTERNAL_HANDLER = "code_index.flow:group"
WORKER_ID = "external-1"


class ExternalProcess(FlowkitProcess):
    """The external worker of FlowKit's tests. It receives its attempts through Kafka, without FlowKit's SDK."""

    def command(self) -> list[str]:
        """Return the command of the worker."""
        return [sys.executable, "-P", "-m", "flowkit.testing.external", *self._arguments]

    def is_ready(self) -> bool:
        """Return whether the worker has printed that it is ready."""
        return " is ready: " in self.read_log()


class External:
    """A context manager that runs a broker, a bridge and an external worker.

    If `KAFKA_BOOTSTRAP_SERVERS` is set, it uses that broker.
    """

    def __init__(self, folder: Path, queue: str) -> None:
        address = os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
        self._kafka = None if address else Kafka(folder)
        self.address = address or (self._kafka.bootstrap_servers if self._kafka else "")
        environment = {
            "FLOWKIT_QUEUE": queue,
            "MONGO_DATABASE": DATABASE,
            "KAFKA_BOOTSTRAP_SERVERS": self.address,
        }
        arguments = ["--roles", EXTERNAL_ROLE, "--handler", EXTERNAL_HANDLER, "--worker-id", WORKER_ID]
        self._bridge = bridge_process(folder, [EXTERNAL_ROLE], environment=environment)
        self._worker = ExternalProcess(folder, WORKER_ID, arguments, environment)

    @property
    def processes(self) -> list[ServerProcess]:
        """The processes, in start order."""
        return [*([self._kafka] if self._kafka else []), self._bridge, self._worker]

    @property
    def description(self) -> str:
        """What runs."""
        return f"role {EXTERNAL_ROLE} runs on {WORKER_ID}, through Kafka at {self.address}"

    def __enter__(self) -> Self:
        """Start all processes; raises DevServerError and stops them again if one does not start."""
        try:
            for process in self.processes:
                start_all([process])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes[::-1]:
            stop_all([process])
