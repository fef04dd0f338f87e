"""Random tasks, some with inline nodes, under random faults of engines, workers, Temporal and MongoDB, compared with a model.

`make chaos ONLY=native` runs only this test, `MINUTES=10` longer, and `SEED=n` repeats the tasks and faults of a run.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from flowkit.local import MongoServer, TemporalServer
from tests.integration.chaos.cluster import Cluster
from tests.integration.chaos.histories import INLINE
from tests.integration.chaos.run import DRAIN_SEC, Run, chosen_seed, show
from tests.integration.harness import Harness
from tests.servers import copy_logs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.server

SECONDS = 60 * float(os.environ.get("FLOWKIT_CHAOS_MINUTES") or 1)
"""Duration of the faults; `make chaos MINUTES=n` sets it."""
SUGGESTED_EVENTS = 80
"""History length after which a task continues as a new run."""


@pytest.fixture
async def cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Cluster]:
    """Servers and processes that only this test uses, so that it can kill them."""
    suggestion = {"limit.historyCount.suggestContinueAsNew": SUGGESTED_EVENTS}
    with TemporalServer(tmp_path, dynamic_config=suggestion) as temporal, MongoServer(tmp_path) as mongo:
        monkeypatch.setenv("TEMPORAL_ADDRESS", temporal.address)
        monkeypatch.setenv("MONGO_URL", mongo.url)
        harness = Harness(temporal=temporal.address, mongo=mongo.url)
        monkeypatch.setenv("MONGO_DATABASE", harness.database)
        made = Cluster(harness, temporal, mongo, tmp_path)
        yield made
        made.close()
        await harness.close()
        if request.session.testsfailed:
            copy_logs(tmp_path)


@pytest.mark.timeout(SECONDS * 2 + DRAIN_SEC + 120)
async def test_random_tasks_end_as_predicted_and_count_once_under_random_faults(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    seed, begun = chosen_seed(), time.monotonic()
    show(capsys, f"seed {seed}; `make chaos ONLY=native SEED={seed}` repeats the tasks and the faults")
    run = Run(cluster, seed)
    try:
        await run.run_under_faults(SECONDS)
        await run.compare()
        figures = run.figures
        assert not run.problems, "\n".join(run.problems)
        assert figures.inline[INLINE], "no attempt ran inline"
        assert figures.tasks and figures.worker_lost <= figures.tasks // 20
    except BaseException as error:
        error.add_note(f"seed {seed}: repeat it with `make chaos ONLY=native SEED={seed}`")
        raise
    finally:
        run.figures.seconds["in all"] = time.monotonic() - begun
        show(capsys, str(run.figures))
