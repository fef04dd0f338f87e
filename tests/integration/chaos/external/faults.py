"""Which faults the test of external workers injects."""

from __future__ import annotations

import sys

from tests.integration.chaos.faults import (
    ENGINE_FAULTS,
    ENGINES,
    FREEZE_ENGINE,
    FREEZE_MONGO,
    FREEZE_WORKER,
    KILL_ENGINE,
    KILL_TEMPORAL,
    KILL_WORKER,
    LEASE_SEC,
    OUTAGE_SEC,
    RESTART_MONGO,
    STOP_ENGINE,
    FaultPlan,
)

EXTERNAL_WORKERS = 4

KILL_EXTERNAL = "external worker killed"
STOP_EXTERNAL = "external worker stopped"
FREEZE_EXTERNAL = "external worker frozen"
KILL_BRIDGE = "bridge killed"
STOP_BRIDGE = "bridge stopped"
FREEZE_BRIDGE = "bridge frozen"
KILL_KAFKA = "Kafka killed"
FREEZE_KAFKA = "Kafka frozen"
EXTERNAL_FAULTS = (KILL_EXTERNAL, STOP_EXTERNAL, FREEZE_EXTERNAL)
WEIGHTS = {
    KILL_EXTERNAL: 6,
    STOP_EXTERNAL: 2,
    FREEZE_EXTERNAL: 4,
    KILL_ENGINE: 3,
    STOP_ENGINE: 1,
    FREEZE_ENGINE: 2,
    KILL_BRIDGE: 3,
    STOP_BRIDGE: 1,
    FREEZE_BRIDGE: 2,
    KILL_WORKER: 1,
    FREEZE_WORKER: 1,
    KILL_KAFKA: 3,
    FREEZE_KAFKA: 3,
    RESTART_MONGO: 2,
    FREEZE_MONGO: 2,
    KILL_TEMPORAL: 1,
}
if sys.platform != "linux":
    # Other systems do not say which process listens on a port.
    del WEIGHTS[FREEZE_KAFKA], WEIGHTS[FREEZE_MONGO]

EXTERNAL = FaultPlan(
    weights=WEIGHTS,
    places=dict.fromkeys(ENGINE_FAULTS, ENGINES) | dict.fromkeys(EXTERNAL_FAULTS, EXTERNAL_WORKERS),
    outages={
        **OUTAGE_SEC,
        FREEZE_BRIDGE: OUTAGE_SEC[FREEZE_ENGINE],
        FREEZE_EXTERNAL: (LEASE_SEC + 1, LEASE_SEC + 5),
        FREEZE_KAFKA: (0.5, LEASE_SEC + 1),
    },
)
"""Faults of engines, bridges, external workers, the native worker, Kafka, MongoDB and Temporal.

Kafka removes a frozen worker from its groups after six seconds, so that another one reads its commands.
"""
