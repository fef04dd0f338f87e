"""Random tasks on external workers under random faults of bridges, workers, Kafka and MongoDB, compared with a model.

`make chaos ONLY=external` runs only this test, `MINUTES=10` longer, and `SEED=n` repeats the tasks and faults of a run.
`TASKS=100` starts that many tasks, of six nodes each, and injects faults until the last one has started.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from flowkit.local import Kafka, MongoServer, TemporalServer
from flowkit.local.lifecycle import start_all, stop_all
from tests.integration.chaos.external.cluster import ExternalCluster
from tests.integration.chaos.external.faults import EXTERNAL
from tests.integration.chaos.external.owners import dispatch_problems, owner_problems
from tests.integration.chaos.external.plans import external_task_plan, large_task_plan
from tests.integration.chaos.run import DRAIN_SEC, Run, chosen_seed, show
from tests.integration.harness import Harness
from tests.integration.test_chaos import SUGGESTED_EVENTS
from tests.servers import copy_logs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.server

TASKS = int(os.environ.get("FLOWKIT_CHAOS_TASKS") or 0)
"""Number of tasks of six nodes; `make chaos TASKS=n` sets it. 0 starts tasks of random sizes until the time is over."""
SECONDS = 3600.0 if TASKS else 30 * float(os.environ.get("FLOWKIT_CHAOS_MINUTES") or 1)
"""Longest duration of the faults: half of what `make chaos MINUTES=n` sets, because these servers start more slowly."""
MOST_OPEN = 12
"""Tasks that are open at the same time."""


@pytest.fixture
async def cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[ExternalCluster]:
    """Servers and processes that only this test uses, so that it can kill them."""
    suggestion = {"limit.historyCount.suggestContinueAsNew": SUGGESTED_EVENTS}
    temporal = TemporalServer(tmp_path, dynamic_config=suggestion)
    mongo, kafka = MongoServer(tmp_path), Kafka(tmp_path)
    start_all([temporal, mongo, kafka])
    monkeypatch.setenv("TEMPORAL_ADDRESS", temporal.address)
    monkeypatch.setenv("MONGO_URL", mongo.url)
    harness = Harness(temporal=temporal.address, mongo=mongo.url)
    monkeypatch.setenv("MONGO_DATABASE", harness.database)
    made = ExternalCluster(harness, temporal, mongo, kafka, tmp_path)
    yield made
    made.close()
    await harness.close()
    stop_all([kafka, mongo, temporal])
    if request.session.testsfailed:
        copy_logs(tmp_path)


@pytest.mark.timeout(SECONDS * 2 + DRAIN_SEC + 180)
async def test_random_external_tasks_end_as_predicted_and_count_once_under_random_faults(
    cluster: ExternalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    seed, begun = chosen_seed(), time.monotonic()
    repeat = f"make chaos ONLY=external SEED={seed}{f' TASKS={TASKS}' if TASKS else ''}"
    show(capsys, f"seed {seed}; `{repeat}` repeats the tasks and the faults")
    run = Run(
        cluster,
        seed,
        plan_of=large_task_plan if TASKS else external_task_plan,
        fault_plan=EXTERNAL,
        most_open=MOST_OPEN,
        most_tasks=TASKS or None,
    )
    try:
        await run.run_under_faults(SECONDS)
        run.problems += await dispatch_problems(cluster)
        await run.compare()
        runs, unstopped = await owner_problems(cluster)
        run.problems += unstopped
        figures = run.figures
        figures.seconds["in all"] = time.monotonic() - begun
        accepted = sum(map(len, runs.accepted.values()))
        show(capsys, f"{accepted} external runs, {runs.taken_over} of them by a second worker of the epoch")
        assert not run.problems, "\n".join(run.problems)
        assert figures.tasks and figures.worker_lost <= figures.tasks // 20
    except BaseException as error:
        error.add_note(f"seed {seed}: repeat it with `{repeat}`")
        raise
    finally:
        show(capsys, str(run.figures))
