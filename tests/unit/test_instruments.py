"""What a process measures: attempts, batches, tasks, nodes, writes and updates."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from pymongo.errors import AutoReconnect, OperationFailure
from pymongo.monitoring import CommandFailedEvent, CommandSucceededEvent
from temporalio import activity
from temporalio.exceptions import ApplicationError
from tests.unit.bridge_records import record
from tests.unit.measured import measuring
from tests.unit.test_run_graph import PULL, Count, Split

from flowkit.adapters.dispatches import DispatchStore, Outcome, OutcomeKind
from flowkit.adapters.mongo import CommandTimes, translate_errors
from flowkit.adapters.tasks.open_tasks import OpenTasks
from flowkit.attempt.failures import failed_attempt, failure, handed_over, lost
from flowkit.attempt.supervision import outcome_of, which_try
from flowkit.core import instruments
from flowkit.errors import FlowKitError
from flowkit.models import AttemptFailure, AttemptInput, FailureKind
from flowkit.testing import memory_database, run_graph

ATTEMPT = AttemptInput(task_id="t", node_id="n", index=0, role="r", epoch=1)


async def test_a_task_counts_its_attempts_batches_items_and_nodes() -> None:
    split = {
        "node_id": "s",
        "type": "split",
        "io": {"input_inline": {"texts": ["a b", "c"], "breaks": 1}},
        "retry_policy": {"max": 3, "backoff_sec": 0},
    }
    with measuring() as measured:
        run = await run_graph(
            {"nodes": [split, {"node_id": "c", "type": "count", "depends_on": ["s"], "io": PULL}]},
            Split(),
            Count(),
        )
    run.assert_finished()
    assert measured.counted(instruments.TASKS_OPENED) == {(): 1}
    assert measured.counted(instruments.TASKS_CLOSED) == {("finished",): 1}
    assert measured.counted(instruments.NODES_CLOSED) == {("split", "finished"): 1, ("count", "finished"): 1}
    assert measured.counted(instruments.ATTEMPTS_STARTED) == {
        ("split", "first"): 1,
        ("split", "retry"): 1,
        ("count", "first"): 1,
    }
    assert measured.counted(instruments.ATTEMPTS_ENDED) == {
        ("split", "failed", "torn"): 1,
        ("split", "succeeded", ""): 1,
        ("count", "succeeded", ""): 1,
        # Prometheus needs the 0 to see the first loss.
        ("split", "lost", "lease_lost"): 0,
        ("count", "lost", "lease_lost"): 0,
    }
    assert {*measured.observed(instruments.ATTEMPT_TIME)} == {
        ("split", "failed"),
        ("split", "succeeded"),
        ("count", "succeeded"),
    }
    assert measured.counted(instruments.BATCHES) == {
        ("split", "failed"): 1,
        ("split", "stored"): 2,
        ("count", "stored"): 2,
        ("split", "set_aside"): 0,
        ("count", "set_aside"): 0,
    }
    assert measured.counted(instruments.ITEMS) == {("split",): 2, ("count",): 2}
    stored = measured.counted(instruments.STORED_BYTES)
    assert stored["artifacts",] > 0
    assert stored["metrics",] > 0
    assert {*measured.observed(instruments.GROUP_SIZE)} == {("attempts",), ("artifacts",), ("metrics",)}


async def test_a_failed_task_counts_the_nodes_that_never_ran() -> None:
    split = {
        "node_id": "s",
        "type": "split",
        "io": {"input_inline": {"texts": ["a"], "breaks": 9, "permanent": True}},
    }
    with measuring() as measured:
        await run_graph(
            {"nodes": [split, {"node_id": "c", "type": "count", "depends_on": ["s"], "io": PULL}]},
            Split(),
            Count(),
        )
    assert measured.counted(instruments.TASKS_CLOSED) == {("failed",): 1}
    assert measured.counted(instruments.NODES_CLOSED) == {("split", "failed"): 1, ("count", "skipped"): 1}


async def test_a_task_that_the_sweep_closes_counts_once() -> None:
    db = memory_database()
    nodes = [
        {"node_id": "a", "type": "x", "status": "running", "attempt_epoch": 1},
        {"node_id": "b", "type": "y", "status": "queued", "attempt_epoch": 0},
    ]
    await db.tasks.insert_one(
        {"id": "t", "run_id": "r", "status": "running", "finished_at": None, "graph": {"nodes": nodes}}
    )
    with measuring() as measured:
        closed = [await OpenTasks(db).close_orphan("t", "r", "gone", 1.0) for _ in range(2)]
    assert closed == [True, False]
    assert measured.counted(instruments.TASKS_CLOSED) == {("failed",): 1}
    assert measured.counted(instruments.NODES_CLOSED) == {("x", "cancelled"): 1, ("y", "skipped"): 1}


async def test_an_attempt_of_an_external_worker_counts_once_when_its_record_ends() -> None:
    dispatches = DispatchStore(memory_database())
    given = record(accepted_at=10.0)
    await dispatches.insert(given)
    outcome = Outcome(kind=OutcomeKind.FAILED, at=12.5, failure=failure("torn", "", permanent=True))
    with measuring() as measured:
        for _ in range(2):
            await dispatches.end(given.key, outcome)
    role = given.attempt.role
    assert measured.counted(instruments.ATTEMPTS_ENDED) == {(role, "failed", "torn"): 1}
    assert measured.observed(instruments.ATTEMPT_TIME) == {(role, "failed"): [2.5]}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "first"),
        ({"epoch": 2}, "retry"),
        ({"epoch": 8, "first_epoch": 7}, "rerun"),
        ({"epoch": 9, "first_epoch": 7}, "retry"),
        ({"epoch": 5, "shard": 5, "parallel": 8}, "first"),
        ({"epoch": 5, "shard": 2, "parallel": 8, "failures": 1}, "retry"),
    ],
)
def test_attempts_are_the_first_of_their_node_or_later_ones(changed: dict[str, Any], expected: str) -> None:
    assert which_try(replace(ATTEMPT, **changed)) == expected


CANCEL = asyncio.CancelledError()
DETAILS = activity.ActivityCancellationDetails


@pytest.mark.parametrize(
    ("error", "details", "expected"),
    [
        (failed_attempt(failure("torn", "", permanent=True)), None, ("failed", "torn")),
        (failed_attempt(lost("lease_lost", "")), None, ("lost", "lease_lost")),
        (failed_attempt(handed_over("")), None, ("handed_over", "worker_shutdown")),
        (
            failed_attempt(AttemptFailure(kind=FailureKind.EPOCH_TAKEN, code="epoch_taken")),
            None,
            ("fenced", "epoch_taken"),
        ),
        (ApplicationError("paused", type="worker_shutdown"), None, ("handed_over", "worker_shutdown")),
        (CANCEL, DETAILS(cancel_requested=True), ("cancelled", "")),
        (CANCEL, DETAILS(not_found=True), ("fenced", "")),
        (RuntimeError(), None, ("failed", "unexpected_error")),
    ],
)
def test_the_end_of_an_attempt_has_an_outcome_and_a_reason(
    error: BaseException, details: activity.ActivityCancellationDetails | None, expected: tuple[str, str]
) -> None:
    assert outcome_of(error, details) == expected


@pytest.mark.parametrize(
    ("error", "reason"),
    [(AutoReconnect("gone"), "mongo_unavailable"), (OperationFailure("bad", 2), "mongo_refused")],
)
async def test_failed_calls_to_mongodb_count_by_their_error(error: Exception, reason: str) -> None:
    @translate_errors
    async def call() -> None:
        raise error

    with measuring() as measured, pytest.raises(FlowKitError):
        await call()
    assert measured.counted(instruments.ERRORS) == {("mongodb", reason): 1}


def test_commands_to_mongodb_are_measured_by_their_kind_and_those_that_fail_too() -> None:
    given: tuple[timedelta, dict[str, Any]] = (timedelta(milliseconds=20), {})
    with measuring() as measured:
        times = CommandTimes()
        times.succeeded(CommandSucceededEvent(*given, "find", 1, ("h", 1), None, database_name="d"))
        times.succeeded(CommandSucceededEvent(*given, "listIndexes", 2, ("h", 1), None, database_name="d"))
        times.failed(CommandFailedEvent(*given, "find", 3, ("h", 1), None, database_name="d"))
    assert measured.observed(instruments.COMMAND_TIME) == {("find",): [0.02, 0.02], ("other",): [0.02]}


def test_instruments_follow_the_conventions_of_prometheus() -> None:
    names = Counter(each.name for each in instruments.ALL)
    assert max(names.values()) == 1
    for each in instruments.ALL:
        assert each.name.startswith("flowkit_")
        assert each.name.endswith("_total") == isinstance(each, instruments.Counter), each.name
        assert each.text.endswith(".")
        assert not {"task", "task_id", "worker", "worker_id", "batch", "uid", "process"} & {*each.labels}
        assert not {"le", "job", "instance"} & {*each.labels}
