"""Random tasks of native, inline and external nodes under random faults of all processes and servers,
compared with a model.

Typed handlers run most of the native and inline nodes, in part in separate processes. Some graphs are JSON, and some
are flows. Each start of a process announces other versions and contracts of the typed handlers.

The clocks of the processes differ by up to a minute. Queries ask for the state of tasks, and must agree with it.

Operators send random actions to half of the tasks, by bare updates and by the client. Handlers exit, panic,
block, fork, and end their processes.

`make chaos` runs this test with a new seed, `MINUTES=10` longer, and `SEED=n` repeats the tasks and faults of a run.
`TASKS=500` starts that many tasks, and injects faults until the last one has started. With `CLUSTER=1`, Temporal is a
cluster on PostgreSQL, of which single processes are killed too.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from functools import cache
from typing import TYPE_CHECKING

import pytest

from flowkit.actions.table import ACTIONS
from flowkit.local import Kafka, TemporalServer
from tests.integration.chaos.cluster import Cluster
from tests.integration.chaos.histories import INLINE
from tests.integration.chaos.owners import dispatch_problems, owner_problems
from tests.integration.chaos.plans import BUILT, TYPED_ROLES
from tests.integration.chaos.run import DRAIN_SEC, START_SEC, Run, show
from tests.integration.harness import Harness
from tests.servers import copy_logs, stoppable_mongo
from tests.temporal_cluster.services import TemporalCluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.server

SHORT_SEC, SHORT_SEED = 6.0, 1
"""Duration of the faults and seed in `make test`."""
MINUTES = float(os.environ.get("FLOWKIT_CHAOS_MINUTES") or 0)
"""`make chaos MINUTES=n` sets it; 0 in `make test`."""
TASKS = int(os.environ.get("FLOWKIT_CHAOS_TASKS") or 0)
"""Number of tasks; `make chaos TASKS=n` sets it. 0 starts tasks until the time is over."""
ON_CLUSTER = bool(os.environ.get("FLOWKIT_CHAOS_CLUSTER"))
"""`make chaos CLUSTER=1` sets it."""
SECONDS = 7200.0 if TASKS else 60 * MINUTES or SHORT_SEC
UNFIT = "does not fit the input of role"
"""A part of the warning about roles whose contracts do not fit. Those of the typed handlers do."""
SUGGESTED_EVENTS = 80
"""History length after which a task continues as a new run."""


@cache
def chosen_seed() -> int:
    """Return the seed of tasks and faults: `FLOWKIT_SEED`, a random one for `make chaos`, or the one of `make test`."""
    return int(
        os.environ.get("FLOWKIT_SEED") or (secrets.randbelow(1_000_000) if MINUTES or TASKS else SHORT_SEED)
    )


@pytest.fixture
async def cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Cluster]:
    """Servers and processes that only this test uses, so that it can kill them."""
    suggestion = {"limit.historyCount.suggestContinueAsNew": SUGGESTED_EVENTS}
    temporal = (TemporalCluster if ON_CLUSTER else TemporalServer)(tmp_path, dynamic_config=suggestion)
    mongo, kafka = stoppable_mongo(tmp_path), Kafka(tmp_path)
    servers = (temporal, mongo, kafka)
    await asyncio.gather(*(asyncio.to_thread(server.start) for server in servers))
    monkeypatch.setenv("TEMPORAL_ADDRESS", temporal.address)
    monkeypatch.setenv("MONGO_URL", mongo.url)
    harness = Harness(temporal=temporal.address, mongo=mongo.url)
    monkeypatch.setenv("MONGO_DATABASE", harness.database)
    made = Cluster(harness, temporal, mongo, kafka, tmp_path, chosen_seed())
    yield made
    made.close()
    await harness.close()
    await asyncio.gather(*(asyncio.to_thread(server.stop) for server in servers))
    if request.session.testsfailed:
        copy_logs(tmp_path)


@pytest.mark.slow(60)
@pytest.mark.timeout(START_SEC + SECONDS * 2 + DRAIN_SEC + 180)
async def test_random_tasks_end_as_predicted_and_count_once_under_random_faults(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    seed, begun = chosen_seed(), time.monotonic()
    repeat = f"make chaos SEED={seed}{f' TASKS={TASKS}' if TASKS else ''}{' CLUSTER=1' if ON_CLUSTER else ''}"
    show(capsys, f"seed {seed}; `{repeat}` repeats the tasks and the faults")
    run = Run(cluster, seed, TASKS or None)
    try:
        await run.run_under_faults(SECONDS)
        run.problems += await dispatch_problems(cluster)
        await run.compare()
        runs, unstopped = await owner_problems(cluster)
        run.problems += unstopped
        accepted = sum(map(len, runs.accepted.values()))
        show(capsys, f"{accepted} external runs, {runs.taken_over} of them by a second worker of the epoch")
        run.problems += [each for each in caplog.messages if UNFIT in each]
        assert not run.problems, "\n".join(run.problems)
        assert accepted, "no attempt ran on an external worker"
        assert run.figures.inline[INLINE], "no attempt ran inline"
        assert run.figures.queries, "no query was answered"
        assert run.figures.roles, "no typed handler ran"
        assert run.figures.written[BUILT], "no graph was built by a flow"
        assert run.figures.versions > len(TYPED_ROLES), "no process announced a new version"
        assert any(run.figures.actions[name] for name in ACTIONS), "no action was applied"
        lost = run.figures.worker_lost
        assert len(lost) <= run.figures.tasks // 20, "\n".join(lost)
    except BaseException as error:
        error.add_note(f"seed {seed}: repeat it with `{repeat}`")
        raise
    finally:
        run.figures.seconds["in all"] = time.monotonic() - begun
        show(capsys, str(run.figures))
