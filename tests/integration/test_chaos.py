"""Random tasks while engines, workers, Temporal and MongoDB die at random: each ends as a model tells, counted once.

`make chaos MINUTES=10` runs it longer, `SEED=…` repeats one.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from typing import TYPE_CHECKING

import pytest

from flowkit.local import MongoServer, TemporalServer
from tests.conftest import keep_logs
from tests.integration.chaos.run import CALM_SEC, Run
from tests.integration.chaos.world import Ground
from tests.integration.world import World

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.server

SECONDS = 60 * float(os.environ.get("FLOWKIT_CHAOS_MINUTES") or 1)
"""`make chaos MINUTES=…` sets it."""
SUGGESTED_EVENTS = 80
"""Length of a history after which a task goes on in a new run."""


@pytest.fixture
def seed() -> int:
    """What tasks and faults are drawn from."""
    return int(os.environ.get("FLOWKIT_SEED") or secrets.randbelow(1_000_000))


@pytest.fixture
async def ground(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Ground]:
    """Servers and processes that only this test uses, so that it may kill them."""
    suggestion = {"limit.historyCount.suggestContinueAsNew": SUGGESTED_EVENTS}
    with TemporalServer(tmp_path, dynamic_config=suggestion) as temporal, MongoServer(tmp_path) as mongo:
        monkeypatch.setenv("TEMPORAL_ADDRESS", temporal.address)
        monkeypatch.setenv("MONGO_URL", mongo.url)
        world = World(temporal=temporal.address, mongo=mongo.url)
        monkeypatch.setenv("MONGO_DATABASE", world.database)
        made = Ground(world, temporal, mongo, tmp_path)
        yield made
        made.close()
        await world.close()
        if request.session.testsfailed:
            keep_logs(tmp_path)


@pytest.mark.timeout(SECONDS * 2 + CALM_SEC + 120)
async def test_random_tasks_end_as_they_should_and_count_once_whatever_dies(
    ground: Ground, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    tell(capsys, f"seed {seed}; `make chaos SEED={seed}` repeats the tasks and the faults")
    run = Run(ground, seed)
    try:
        await run.rage(SECONDS)
        await run.compare()
        figures = run.figures
        assert not run.problems, "\n".join(run.problems)
        assert figures.tasks and figures.worn_out <= figures.tasks // 20
    except BaseException as error:
        error.add_note(f"seed {seed}: repeat it with `make chaos SEED={seed}`")
        raise
    finally:
        run.figures.seconds["in all"] = time.monotonic() - begun
        tell(capsys, str(run.figures))


def tell(capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Print even when the test passes."""
    with capsys.disabled():
        sys.stdout.write(f"\n  {text}\n")
