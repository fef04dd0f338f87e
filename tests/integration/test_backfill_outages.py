"""Backfills under crashes: engines and Temporal are killed, MongoDB is frozen, and each nominal time has one task."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.integration.chaos.backfills import Nemesis, drawn
from tests.integration.chaos.run import show
from tests.integration.test_server_restarts import frail_servers, own

if TYPE_CHECKING:
    from pathlib import Path

    from flowkit.local import MongoServer, TemporalServer
    from tests.integration.harness import Harness

__all__ = ["frail_servers", "own"]

pytestmark = [pytest.mark.server, pytest.mark.nightly]

SEEDS = [int(each) for each in (os.environ.get("FLOWKIT_SEED") or "11,12").split(",")]
COUNT, TIMES = 20, 50
FAULTS_SEC, DRAIN_SEC = 120.0, 600.0


@pytest.mark.timeout(FAULTS_SEC + DRAIN_SEC + 300)
@pytest.mark.parametrize("seed", SEEDS)
async def test_backfills_are_exact_under_kills_stops_and_freezes(
    own: tuple[Harness, TemporalServer, MongoServer],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    seed: int,
) -> None:
    harness, temporal, mongo = own
    nemesis = Nemesis(harness=harness, temporal=temporal, mongo=mongo, folder=tmp_path, seed=seed)
    plans = drawn(seed, harness.queue, COUNT, TIMES, within_sec=60)
    await nemesis.run(plans, FAULTS_SEC, DRAIN_SEC)
    problems = await nemesis.problems(plans)
    show(capsys, f"seed {seed}: {nemesis.figures}")
    assert not problems, "\n".join(problems)
