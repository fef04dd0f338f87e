"""Which faults are injected when, drawn from the seed and independent of the tasks."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ENGINES, WORKERS = 2, 3
LEASE_SEC = 4.0
"""Short, so that Temporal notices a loss soon."""

KILL_WORKER = "worker killed"
KILL_ENGINE = "engine killed"
KILL_TEMPORAL = "Temporal killed"
STOP_WORKER = "worker stopped"
STOP_ENGINE = "engine stopped"
FREEZE_WORKER = "worker frozen"
FREEZE_ENGINE = "engine frozen"
FREEZE_TEMPORAL = "Temporal frozen"
FREEZE_MONGO = "MongoDB frozen"
RESTART_MONGO = "MongoDB restarted"
ENGINE_FAULTS = {KILL_ENGINE, STOP_ENGINE, FREEZE_ENGINE}
WEIGHTS = {
    KILL_WORKER: 6,
    KILL_ENGINE: 4,
    KILL_TEMPORAL: 3,
    STOP_WORKER: 2,
    STOP_ENGINE: 1,
    FREEZE_WORKER: 2,
    FREEZE_ENGINE: 1,
    FREEZE_TEMPORAL: 1,
    FREEZE_MONGO: 2,
    RESTART_MONGO: 2,
}
if sys.platform != "linux":
    # Other systems do not say which process listens on a port.
    del WEIGHTS[FREEZE_TEMPORAL], WEIGHTS[FREEZE_MONGO]
OUTAGE_SEC = {
    KILL_TEMPORAL: (0.0, LEASE_SEC),
    FREEZE_WORKER: (LEASE_SEC + 1, LEASE_SEC + 3),
    FREEZE_ENGINE: (LEASE_SEC + 1, 13.0),
    FREEZE_TEMPORAL: (0.5, LEASE_SEC),
    FREEZE_MONGO: (0.5, LEASE_SEC + 1),
}
"""Shortest and longest outage in seconds. Many outlast a lease, so that another process takes the work over.

Temporal hands a workflow task or an activity of a frozen engine to another engine after ten seconds.
"""
_ROUND = 7
"""Faults in a row of which no two have the same kind, so that one minute covers most kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    pause: float
    """Seconds to wait before it."""
    kind: str
    place: int
    """Index of the engine or worker."""
    away: float
    """Seconds until the process or server starts again, or resumes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Which faults a test injects."""

    weights: Mapping[str, int]
    places: Mapping[str, int]
    """Number of processes that a kind of fault can concern; 1 by default."""
    outages: Mapping[str, tuple[float, float]]
    """Shortest and longest outage in seconds."""


def faults(seed: int, plan: FaultPlan) -> Iterator[Fault]:
    """Yield faults without end.

    A node fails as `worker_lost` at its sixth loss. With seconds between two faults, several processes, and nodes that
    run for seconds, no node should get there.
    """
    chance = random.Random(f"{seed}-faults")
    while True:
        kinds: list[str] = []
        while len(kinds) < _ROUND:
            [kind] = chance.choices([*plan.weights], [*plan.weights.values()])
            if kind not in kinds:
                kinds.append(kind)
        for kind in kinds:
            yield Fault(
                pause=chance.uniform(2.0, 4.0),
                kind=kind,
                place=chance.randrange(plan.places.get(kind, 1)),
                away=chance.uniform(*plan.outages.get(kind, (0.0, 2.0))),
            )


WORKER_FAULTS = {KILL_WORKER, STOP_WORKER, FREEZE_WORKER}
NATIVE = FaultPlan(
    weights=WEIGHTS,
    places=dict.fromkeys(ENGINE_FAULTS, ENGINES) | dict.fromkeys(WORKER_FAULTS, WORKERS),
    outages=OUTAGE_SEC,
)
"""Faults of engines, native workers, Temporal and MongoDB."""
