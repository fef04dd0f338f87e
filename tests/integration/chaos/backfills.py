"""Backfills with random ranges, orders and cancels under faults of engines and servers, compared with a model.

Each nominal time belongs to two backfills. One of them starts its task, and the other one leaves it as it is.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from flowkit.adapters.backfills import BackfillStore
from flowkit.backfills import BackfillRunStatus, BackfillState
from flowkit.errors import ConfigError
from flowkit.graph.scheduled import parse_nominal
from flowkit.worker import Batch, BatchResult, RoleHandler, RunContext
from tests.integration.chaos.cluster import (
    ManagedProcess,
    frozen,
    kill,
    periodically,
    pid_of,
    retry_until_available,
    stop,
)
from tests.integration.chaos.faults import (
    ENGINES,
    FREEZE_ENGINE,
    FREEZE_MONGO,
    KILL_ENGINE,
    KILL_TEMPORAL,
    STOP_ENGINE,
    Faults,
)
from tests.integration.harness import eventually, node, wait_seconds

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from flowkit.backfills import BackfillRun, Backfills
    from flowkit.local import MongoServer, TemporalServer
    from tests.integration.chaos.faults import Fault
    from tests.integration.harness import Harness

START = datetime(2026, 1, 1, tzinfo=UTC)
GRAPH: dict[str, Any] = {"nodes": [node("a", "hour", retry_policy={"max": 0})]}
AT = {"at": {"$cel": "task.scheduled_at"}}
BAD = "bad_hour"
ALL_FAULTS = (KILL_ENGINE, STOP_ENGINE, FREEZE_ENGINE, KILL_TEMPORAL, FREEZE_MONGO)
_BAD_EVERY = 7


def is_bad(at: datetime) -> bool:
    """Return whether the task of a nominal time fails."""
    return (at - START) // timedelta(hours=1) % _BAD_EVERY == 0


class Hour(RoleHandler):
    """Takes a moment, and fails for some nominal times."""

    role = "hour"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return one row."""
        assert ctx.scheduled_at is not None
        await wait_seconds(0.05)
        if is_bad(ctx.scheduled_at):
            return BatchResult(success=False, reason_code=BAD, permanent=True, error="no data")
        return BatchResult(success=True, metrics={"count": 1})


@dataclass(frozen=True, kw_only=True, slots=True)
class BackfillPlan:
    """A backfill of the run."""

    backfill_id: str
    start: datetime
    end: datetime
    order: str
    max_active: int
    cancel_after: float | None
    """After how many seconds it is cancelled; None if it is not."""
    stops_running: bool


def drawn(seed: int, prefix: str, count: int, times: int, within_sec: float) -> list[BackfillPlan]:
    """Return random backfills, each with so many nominal times, of which the next one has half. Some are cancelled
    within a time.
    """
    chance = random.Random(f"{seed}-backfills")
    return [
        BackfillPlan(
            backfill_id=f"{prefix}-{number}",
            start=(start := START + number * times // 2 * timedelta(hours=1)),
            end=start + times * timedelta(hours=1),
            order=chance.choice(["oldest", "newest"]),
            max_active=chance.randint(2, 10),
            cancel_after=chance.uniform(0, within_sec) if chance.random() < 0.3 else None,
            stops_running=chance.random() < 0.5,
        )
        for number in range(count)
    ]


@dataclass(kw_only=True, slots=True)
class Nemesis:
    """Runs backfills under faults."""

    harness: Harness
    temporal: TemporalServer
    mongo: MongoServer
    folder: Path
    seed: int
    kinds: Collection[str] = ALL_FAULTS
    injected: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)
    """Number of tasks by status."""
    seconds: float = 0.0
    engines: list[ManagedProcess] = field(default_factory=list)
    suspensions: list[asyncio.Task[None]] = field(default_factory=list)

    async def run(self, plans: list[BackfillPlan], faults_sec: float, drain_sec: float) -> None:
        """Run backfills while faults happen. Return when all have ended, or some time after the last fault."""
        self.harness.settings |= {"lease_ttl_sec": 6, "cancel_grace_sec": 3, "sweep_sec": 1}
        config = self.folder / "engine.json"
        config.write_text(self.harness.config_json(), encoding="utf-8")
        self.engines = [
            ManagedProcess(self.harness, self.folder, f"engine-{number}", "engine", "--config", str(config))
            for number in range(ENGINES)
        ]
        await self.harness.worker({"hour": Hour()}, concurrency=20)
        schedules = await self.harness.coordinator.schedules()
        await schedules.create(self.harness.queue, graph=GRAPH, params=AT, cron="0 * * * *")
        await schedules.pause(self.harness.queue)
        backfills = await self.harness.coordinator.backfills()
        await self._start_ended()  # The first start of a process takes seconds.
        background = [asyncio.create_task(periodically(0.1, self._start_ended))]
        try:
            begun = time.monotonic()
            work = [
                *(self._create(backfills, each) for each in plans),
                *(self._cancel(backfills, each) for each in plans if each.cancel_after is not None),
            ]
            await asyncio.gather(self._inject_until(backfills, plans, begun + faults_sec), *work)
            await asyncio.gather(*self.suspensions)
            await retry_until_available(self.harness.release_tasks)
            await self._await_ends(backfills, plans, drain_sec)
            self.seconds = time.monotonic() - begun
        finally:
            for each in background:
                each.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            for engine in self.engines:
                engine.signal(signal.SIGCONT)
                engine.close()

    async def _start_ended(self) -> None:
        for engine in self.engines:
            engine.ensure_started()

    async def _create(self, backfills: Backfills, plan: BackfillPlan) -> None:
        call = partial(
            backfills.create,
            self.harness.queue,
            start=plan.start,
            end=plan.end,
            order=plan.order,
            max_active=plan.max_active,
            backfill_id=plan.backfill_id,
        )
        await retry_until_available(call)

    async def _cancel(self, backfills: Backfills, plan: BackfillPlan) -> None:
        await wait_seconds(plan.cancel_after or 0.0)

        async def cancel() -> None:
            with suppress(ConfigError):  # It has ended, or is not created yet.
                await backfills.cancel(plan.backfill_id, running=plan.stops_running)

        await retry_until_available(cancel)

    async def _inject_until(self, backfills: Backfills, plans: list[BackfillPlan], until: float) -> None:
        for fault in Faults(kinds=self.kinds).drawn(self.seed):
            if time.monotonic() > until or not await self._open(backfills, plans):
                return
            await wait_seconds(fault.pause)
            self.injected[fault.kind] += 1
            await self._inject(fault)

    @property
    def figures(self) -> str:
        """What happened."""
        faults = ", ".join(f"{count} {kind}" for kind, count in self.injected.items())
        tasks = ", ".join(f"{count} {status}" for status, count in self.counted.items())
        return f"{self.seconds:.0f} s; faults: {faults}; tasks: {tasks}"

    async def _inject(self, fault: Fault) -> None:
        if fault.kind == KILL_TEMPORAL:
            await asyncio.to_thread(self.temporal.kill)
            await wait_seconds(fault.away)
            await asyncio.to_thread(self.temporal.start)
        elif fault.kind == FREEZE_MONGO:
            await frozen(fault.away, partial(os.kill, pid_of(self.mongo.port)))
        elif fault.kind == FREEZE_ENGINE:
            engine = self.engines[fault.place]
            self.suspensions.append(asyncio.create_task(frozen(fault.away, engine.signal)))
        else:
            (kill if fault.kind == KILL_ENGINE else stop)(self.engines[fault.place], fault.away)

    async def _open(self, backfills: Backfills, plans: list[BackfillPlan]) -> set[str]:
        """Return the ids of the backfills that have not ended."""
        listed = await retry_until_available(backfills.list_backfills)
        ended = {each.backfill.backfill_id for each in listed if each.backfill.state.ended}
        return {each.backfill_id for each in plans} - ended

    async def _await_ends(self, backfills: Backfills, plans: list[BackfillPlan], within_sec: float) -> None:
        async def all_ended() -> bool:
            return not await self._open(backfills, plans)

        with suppress(AssertionError):  # What is still open is among the problems.
            await eventually(all_ended, within_sec)

    async def problems(self, plans: list[BackfillPlan]) -> list[str]:
        """Return what differs from the model."""
        backfills, store = await self.harness.coordinator.backfills(), BackfillStore(self.harness.db)
        found: list[str] = []
        runs: dict[str, list[tuple[BackfillPlan, BackfillRun]]] = defaultdict(list)
        for plan in plans:
            view = await backfills.status(plan.backfill_id)
            state, total = view.backfill.state, view.counts.total
            wanted = (plan.end - plan.start) // timedelta(hours=1)
            may_be = {
                BackfillState.FINISHED,
                *([] if plan.cancel_after is None else [BackfillState.CANCELLED]),
            }
            if state not in may_be or view.counts.ended != total or total != wanted:
                found.append(f"{plan.backfill_id} is {state}, driven {view.is_driven}: {view.counts.text}")
            for status in BackfillRunStatus:
                for run in await store.runs(plan.backfill_id, status):
                    runs[run.task_id].append((plan, run))
        documents = {each["id"]: each async for each in self.harness.db.tasks.find({})}
        self.counted.update(each["status"] for each in documents.values())
        for task_id in {*runs, *documents}:
            found += task_problems(task_id, documents.get(task_id), runs[task_id])
        cut = Counter(_cut_start(documents.get(task_id), each) for task_id, each in runs.items())
        found += [
            f"{plan.backfill_id} has cancelled {cut[plan.backfill_id]} tasks as they started"
            for plan in plans
            if cut[plan.backfill_id] > plan.max_active  # of these, it starts as many at once
        ]
        return found + await self._started_twice()

    async def _started_twice(self) -> list[str]:
        client = await self.harness.client()
        query = f"WorkflowType = 'Task' AND TaskQueue = '{self.harness.queue}'"
        started = Counter([each.id async for each in client.list_workflows(query)])
        return [f"{task_id} has {count} workflow runs" for task_id, count in started.items() if count > 1]


def _cut_start(
    document: dict[str, Any] | None, runs: Sequence[tuple[BackfillPlan, BackfillRun]]
) -> str | None:
    """Return the id of the backfill that leaves running tasks, and has cancelled this one as it started."""
    stops = any(each.stops_running and each.cancel_after is not None for each, _ in runs)
    if document is None or document["status"] != "cancelled" or stops:
        return None
    cut = [each.backfill_id for each, run in runs if run.status is BackfillRunStatus.CANCELLED]
    return cut[0] if cut else None


def task_problems(
    task_id: str, document: dict[str, Any] | None, runs: Sequence[tuple[BackfillPlan, BackfillRun]]
) -> list[str]:
    """Return what is wrong with the task of a nominal time, and with what the backfills say of it."""
    statuses = Counter(run.status for _, run in runs)
    shown = f"{task_id}: {[(each.backfill_id, run.status.value, run.reason) for each, run in runs]}"
    if document is None:
        return [] if {*statuses} <= {BackfillRunStatus.CANCELLED} else [f"{shown}, and no document"]
    at = parse_nominal(document["scheduled_at"])
    assert at is not None
    status = "failed" if is_bad(at) else "finished"
    # A cancel that leaves running tasks still cancels the task of which the start was on its way.
    stopped = any(
        each.cancel_after is not None and (each.stops_running or run.status is BackfillRunStatus.CANCELLED)
        for each, run in runs
    )
    wanted = {status, *(["cancelled"] if stopped else [])}
    problems = []
    if document["status"] not in wanted or document["run_seq"] != 1:
        problems.append(
            f"the document is {document['status']} in run {document['run_seq']}, and not {wanted}"
        )
    ends = {"finished": BackfillRunStatus.SUCCEEDED, "failed": BackfillRunStatus.FAILED}
    for name, each in ends.items():
        if statuses[each] != (document["status"] == name):
            problems.append(f"the document is {document['status']}, and {statuses[each]} have {each}")
    if document["params"] != {"at": document["scheduled_at"]}:
        problems.append(f"the params are {document['params']}")
    return [f"{shown}: {problem}" for problem in problems]
