"""Engines with bridges, external workers, one native worker, and the servers of the test, Kafka included."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from tests.integration.chaos import cluster
from tests.integration.chaos.cluster import ManagedProcess, kill, stop
from tests.integration.chaos.external.faults import (
    EXTERNAL_WORKERS,
    FREEZE_BRIDGE,
    FREEZE_EXTERNAL,
    FREEZE_KAFKA,
    KILL_BRIDGE,
    KILL_EXTERNAL,
    KILL_KAFKA,
    STOP_BRIDGE,
    STOP_EXTERNAL,
)
from tests.integration.chaos.external.plans import EXTERNAL_ROLES
from tests.integration.chaos.faults import (
    FREEZE_ENGINE,
    FREEZE_WORKER,
    KILL_ENGINE,
    KILL_WORKER,
    LEASE_SEC,
    RESTART_MONGO,
    STOP_ENGINE,
    STOP_WORKER,
)

if TYPE_CHECKING:
    from pathlib import Path

    from flowkit.local import Kafka, MongoServer, TemporalServer
    from tests.integration.harness import Harness

HANDLERS = "tests.integration.chaos.external.handlers"
ROLES_OF_WORKERS = (EXTERNAL_ROLES, EXTERNAL_ROLES[:1], EXTERNAL_ROLES[1:], EXTERNAL_ROLES)
"""Roles of the external workers, by number. Half of them serve several roles, so they drop commands (H2)."""
SESSION_MS = 6_000
PARTITIONS = 6
START_PAUSE_SEC = 1.0
"""Shortest time between two starts of an external worker, which exits by itself while a server is down."""
RESTART_SEC = 10.0
"""Longest time that an external worker may take to stop."""


class ExternalProcess(ManagedProcess):
    """An external worker as a process. Half of them keep their worker id when they start again (H9)."""

    program = (sys.executable, "-m", "flowkit.testing.external")

    def __init__(self, *arguments: Any, keeps_id: bool) -> None:
        super().__init__(*arguments)
        self.deaths: dict[str, list[float]] = defaultdict(list)
        """When the processes of each worker id ended, in seconds since the epoch."""
        self._keeps_id = keeps_id
        self._number = 0
        self._worker_id = ""
        self._started_at = 0.0
        self._stop_at: float | None = None

    def ensure_started(self) -> None:
        """Start the worker unless it runs. Kill one that takes too long to stop."""
        now = time.monotonic()
        if self.runs:
            if self._stop_at is not None and now > self._stop_at + RESTART_SEC:
                self.signal(signal.SIGKILL)
            return
        self._note_death()
        if now >= self._started_at + START_PAUSE_SEC:
            super().ensure_started()

    def command(self) -> list[str]:
        """Return the command of the next start."""
        self._number += 1
        self._started_at, self._stop_at = time.monotonic(), None
        self._worker_id = self.name if self._keeps_id else f"{self.name}-{self._number}"
        return [*super().command(), "--worker-id", self._worker_id]

    def end(self, number: signal.Signals, away: float) -> None:
        """End the process with a signal. It restarts `away` seconds later."""
        self._stop_at = time.monotonic()
        super().end(number, away)

    def close(self) -> None:
        """Kill the process and do not start it again."""
        super().close()
        self._note_death()

    def _note_death(self) -> None:
        if self._worker_id:
            self.deaths[self._worker_id].append(time.time())
            self._worker_id = ""


class ExternalCluster(cluster.Cluster):
    """The servers, engines with bridges, and workers of one test."""

    def __init__(
        self, harness: Harness, temporal: TemporalServer, mongo: MongoServer, kafka: Kafka, folder: Path
    ) -> None:
        harness.settings |= {
            "kafka_bootstrap": kafka.bootstrap_servers,
            "kafka_cmd_partitions": PARTITIONS,
        }
        self.kafka = kafka
        self.external: list[ExternalProcess] = []
        super().__init__(harness, temporal, mongo, folder)
        self.restarts[KILL_KAFKA] = (kafka.kill, kafka.start)
        self.freezes[FREEZE_KAFKA] = kafka.port

    def add_processes(self, folder: Path) -> None:
        """Create two engines, of which the first has a bridge, another bridge, external workers and a native worker."""
        engines = self.engines(folder, HANDLERS)
        engines[0].environment["WORKER_TYPES"] = ",".join(EXTERNAL_ROLES)
        bridge = ManagedProcess(
            self.harness, folder, "bridge", "bridge", "--config", str(self.config_file), *EXTERNAL_ROLES
        )
        native = ManagedProcess(
            self.harness, folder, "worker", "worker", "--concurrency", "6", f"{HANDLERS}:NATIVE"
        )
        self.external = [self._external(folder, number) for number in range(EXTERNAL_WORKERS)]
        self.processes = [*engines, bridge, native, *self.external]
        self.ends = {
            KILL_ENGINE: (engines, kill),
            STOP_ENGINE: (engines, stop),
            FREEZE_ENGINE: (engines, self.freeze),
            KILL_BRIDGE: ([bridge], kill),
            STOP_BRIDGE: ([bridge], stop),
            FREEZE_BRIDGE: ([bridge], self.freeze),
            KILL_WORKER: ([native], kill),
            STOP_WORKER: ([native], stop),
            FREEZE_WORKER: ([native], self.freeze),
            KILL_EXTERNAL: (self.external, kill),
            STOP_EXTERNAL: (self.external, stop),
            FREEZE_EXTERNAL: (self.external, self.freeze),
        }

    def _external(self, folder: Path, number: int) -> ExternalProcess:
        options = {
            "--roles": ",".join(ROLES_OF_WORKERS[number % len(ROLES_OF_WORKERS)]),
            "--handler": f"{HANDLERS}:EXTERNAL",
            "--bootstrap-servers": self.kafka.bootstrap_servers,
        }
        settings = {"hb_interval_sec": 0.5, "lease_ttl_sec": LEASE_SEC, "announce_interval_sec": 2}
        consumer = {"session_timeout_ms": SESSION_MS, "heartbeat_interval_ms": 1_000}
        arguments = [
            *(part for option in options.items() for part in option),
            *(
                part
                for name, value in settings.items()
                for part in ("--setting", f"{name}={json.dumps(value)}")
            ),
            *(part for name, value in consumer.items() for part in ("--consumer", f"{name}={value}")),
        ]
        name = f"external-{number}"
        return ExternalProcess(self.harness, folder, name, *arguments, keeps_id=number % 2 == 0)

    def restarted(self, kind: str) -> None:
        """Restart the external workers, as operators do: an outage may leave them deaf (H1, H28, H33)."""
        if kind in {KILL_KAFKA, RESTART_MONGO}:
            for process in self.external:
                process.end(signal.SIGTERM, 0.0)

    def died_after(self, worker_id: str, moment: float) -> bool:
        """Return whether the process of a worker ended after this time."""
        ends = (time for process in self.external for time in process.deaths.get(worker_id, ()))
        return any(time >= moment for time in ends)
