"""Which faults are injected when, drawn from the seed and independent of the tasks."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

ENGINES, WORKERS, EXTERNAL_WORKERS = 2, 3, 4
HISTORY_PROCESSES = 2
LEASE_SEC = 4.0
"""Short, so that Temporal notices a loss soon."""
CLOCKS_SEC = 60
"""How many seconds the clock of each process of FlowKit is ahead or behind, at most."""

KILL_WORKER = "worker killed"
KILL_ENGINE = "engine killed"
KILL_BRIDGE = "bridge killed"
KILL_EXTERNAL = "external worker killed"
KILL_TEMPORAL = "Temporal killed"
KILL_HISTORY = "history process of Temporal killed"
KILL_MATCHING = "matching process of Temporal killed"
KILL_POSTGRES = "PostgreSQL killed"
KILL_KAFKA = "Kafka killed"
STOP_WORKER = "worker stopped"
STOP_ENGINE = "engine stopped"
STOP_BRIDGE = "bridge stopped"
STOP_EXTERNAL = "external worker stopped"
FREEZE_WORKER = "worker frozen"
FREEZE_ENGINE = "engine frozen"
FREEZE_BRIDGE = "bridge frozen"
FREEZE_EXTERNAL = "external worker frozen"
FREEZE_TEMPORAL = "Temporal frozen"
FREEZE_KAFKA = "Kafka frozen"
FREEZE_MONGO = "MongoDB frozen"
RESTART_MONGO = "MongoDB restarted"
HUGE_RECORD = "record of 300 MB"
"""It arrives among the events of external workers."""
WEIGHTS = {
    KILL_WORKER: 4,
    STOP_WORKER: 1,
    FREEZE_WORKER: 2,
    KILL_EXTERNAL: 6,
    STOP_EXTERNAL: 2,
    FREEZE_EXTERNAL: 4,
    KILL_ENGINE: 4,
    STOP_ENGINE: 1,
    FREEZE_ENGINE: 2,
    KILL_BRIDGE: 3,
    STOP_BRIDGE: 1,
    FREEZE_BRIDGE: 2,
    KILL_TEMPORAL: 2,
    FREEZE_TEMPORAL: 1,
    KILL_KAFKA: 2,
    FREEZE_KAFKA: 2,
    FREEZE_MONGO: 2,
    RESTART_MONGO: 2,
    HUGE_RECORD: 2,
}
OF_CLUSTER = {KILL_HISTORY: 6, KILL_MATCHING: 1, KILL_POSTGRES: 6}
"""Weights of the faults that need a cluster of Temporal."""
if sys.platform != "linux":
    # Other systems do not say which process listens on a port.
    del WEIGHTS[FREEZE_TEMPORAL], WEIGHTS[FREEZE_MONGO], WEIGHTS[FREEZE_KAFKA]
PLACES = {
    **dict.fromkeys((KILL_ENGINE, STOP_ENGINE, FREEZE_ENGINE), ENGINES),
    **dict.fromkeys((KILL_WORKER, STOP_WORKER, FREEZE_WORKER), WORKERS),
    **dict.fromkeys((KILL_EXTERNAL, STOP_EXTERNAL, FREEZE_EXTERNAL), EXTERNAL_WORKERS),
    KILL_HISTORY: HISTORY_PROCESSES,
}
"""Number of processes that a kind of fault can concern; 1 for the others."""
OUTAGE_SEC = {
    KILL_TEMPORAL: (0.0, LEASE_SEC),
    KILL_HISTORY: (0.0, 3 * LEASE_SEC),
    KILL_POSTGRES: (0.0, LEASE_SEC + 1),
    FREEZE_WORKER: (LEASE_SEC + 1, LEASE_SEC + 3),
    FREEZE_ENGINE: (LEASE_SEC + 1, 13.0),
    FREEZE_BRIDGE: (LEASE_SEC + 1, 13.0),
    FREEZE_EXTERNAL: (LEASE_SEC + 1, LEASE_SEC + 5),
    FREEZE_TEMPORAL: (0.5, LEASE_SEC),
    FREEZE_KAFKA: (0.5, LEASE_SEC + 1),
    FREEZE_MONGO: (0.5, LEASE_SEC + 1),
}
"""Shortest and longest outage in seconds. Many outlast a lease, so that another process takes the work over.

Temporal hands a workflow task or an activity of a frozen engine to another engine after ten seconds. Kafka removes a
frozen worker from its groups after six seconds, so that another one reads its commands. The other history process takes
over the shards of a killed one after some seconds.
"""
_ORDINARY_OUTAGE_SEC = (0.0, 2.0)
_KILLS = (
    *(KILL_WORKER, KILL_ENGINE, KILL_BRIDGE, KILL_EXTERNAL, KILL_TEMPORAL, KILL_HISTORY, KILL_POSTGRES),
    *(KILL_KAFKA, FREEZE_MONGO),
)
FIRST_PAUSE_SEC = (0.5, 1.5)
PAUSE_SEC = (2.0, 4.0)
_ROUND = 7
"""Faults in a row of which no two have the same kind, so that one minute covers most kinds."""


def clock_of(seed: int, process: str) -> int:
    """Return by how many seconds the clock of a process is ahead in a run. A negative number is behind."""
    return random.Random(f"{seed}-{process}-clock").randint(-CLOCKS_SEC, CLOCKS_SEC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    pause: float
    """Seconds to wait before it."""
    kind: str
    place: int
    """Index of the process."""
    away: float
    """Seconds until the process or server starts again, or resumes."""


class Faults:
    """What can happen to the processes of a run: weights of all kinds."""

    def __init__(self, *, on_cluster: bool = False, kinds: Collection[str] | None = None) -> None:
        """With `kinds`, only these happen."""
        weights = {**WEIGHTS, **(OF_CLUSTER if on_cluster else {})}
        self._weights = {kind: weight for kind, weight in weights.items() if kinds is None or kind in kinds}
        self.first_round = [kind for kind in _KILLS if kind in self._weights]
        """The faults with which every run begins, in random order and short succession."""

    def drawn(self, seed: int) -> Iterator[Fault]:
        """Yield faults without end.

        A node fails as `worker_lost` at its sixth loss. With seconds between two faults, several processes, and nodes
        that run for seconds, no node should get there.
        """
        chance = random.Random(f"{seed}-faults")
        for kind in chance.sample(self.first_round, len(self.first_round)):
            yield _fault(chance, kind, FIRST_PAUSE_SEC)
        while True:
            for kind in self._distinct(chance):
                yield _fault(chance, kind, PAUSE_SEC)

    def _distinct(self, chance: random.Random) -> Sequence[str]:
        kinds: list[str] = []
        while len(kinds) < min(_ROUND, len(self._weights)):
            [kind] = chance.choices([*self._weights], [*self._weights.values()])
            if kind not in kinds:
                kinds.append(kind)
        return kinds


def _fault(chance: random.Random, kind: str, pause_sec: tuple[float, float]) -> Fault:
    return Fault(
        pause=chance.uniform(*pause_sec),
        kind=kind,
        place=chance.randrange(PLACES.get(kind, 1)),
        away=chance.uniform(*OUTAGE_SEC.get(kind, _ORDINARY_OUTAGE_SEC)),
    )
