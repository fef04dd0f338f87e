"""The faults that the chaos test injects, with Temporal as one process and as a cluster."""

from __future__ import annotations

from itertools import islice

import pytest
from tests.integration.chaos.faults import (
    HISTORY_PROCESSES,
    KILL_HISTORY,
    KILL_POSTGRES,
    OF_CLUSTER,
    Faults,
)

SEED, MANY = 7, 500


def test_only_a_cluster_of_temporal_loses_single_processes() -> None:
    kinds = {fault.kind for fault in islice(Faults(on_cluster=False).drawn(SEED), MANY)}
    assert not kinds & {*OF_CLUSTER}


def test_every_run_on_a_cluster_begins_with_the_loss_of_a_history_process_and_of_postgresql() -> None:
    faults = Faults(on_cluster=True)
    first = {fault.kind for fault in islice(faults.drawn(SEED), len(faults.first_round))}
    assert {KILL_HISTORY, KILL_POSTGRES} <= first


@pytest.mark.parametrize("kind", [KILL_HISTORY, KILL_POSTGRES])
def test_a_cluster_loses_each_history_process_and_postgresql_again_and_again(kind: str) -> None:
    drawn = [fault for fault in islice(Faults(on_cluster=True).drawn(SEED), MANY) if fault.kind == kind]
    assert len(drawn) > MANY / 20
    assert {fault.place for fault in drawn} == set(range(HISTORY_PROCESSES if kind == KILL_HISTORY else 1))
