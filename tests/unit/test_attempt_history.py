"""`flowkit attempts` reads attempts from recorded histories, and adds what MongoDB knows."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from temporalio.client import WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import RPCError, RPCStatusCode

from flowkit.adapters.tasks.queries import LoggedAttempt
from flowkit.adapters.worker_registry import BRIDGE_PREFIX
from flowkit.models import FailureKind
from flowkit.reading.attempts import AttemptOutcome, AttemptView, merge, read_events, read_history

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from temporalio.client import Client

HISTORIES = Path(__file__).parents[1] / "replay" / "histories"

READ: list[tuple[str, str, list[tuple[str, str | None]]]] = [
    ("retry", "a", [("failed", "flaky"), ("failed", "flaky"), ("finished", None)]),
    ("native_loss", "a", [("lost", "lease_lost"), ("finished", None)]),
    ("yielding", "z", [("yielded", "yielded"), ("finished", None)]),
    ("cancel", "b", [("cancelled", None)]),
    ("functions", "refused", [("failed", "adapter_error")]),
    ("inline", "again", [("failed", "flaky"), ("finished", None)]),
    ("inline", "slow", [("handed over", "not_local"), ("finished", None)]),
]


@pytest.mark.parametrize(("name", "node_id", "expected"), READ)
async def test_history_has_the_outcome_of_each_attempt(
    name: str, node_id: str, expected: list[tuple[str, str | None]]
) -> None:
    text = (HISTORIES / f"{name}.json").read_text(encoding="utf-8")
    history = WorkflowHistory.from_json(name, text)
    found = merge((await read_events(history.events, pydantic_data_converter)).values(), [], {})
    own = [each for each in found if each.node_id == node_id]
    assert [(each.outcome.value, each.code) for each in own] == expected
    assert [each.attempt for each in own] == list(range(1, len(own) + 1))
    assert all(each.seconds(0) is not None for each in own if each.outcome is not AttemptOutcome.LOST)
    assert own[-1].worker in ("recorder", "engine")


def document(**node: Any) -> dict[str, Any]:
    """Return a task document with one node."""
    return {"graph": {"nodes": [{"node_id": "a", "attempt_epoch": 2, **node}]}}


def test_without_a_history_logs_and_the_document_describe_the_attempts() -> None:
    logged = [
        LoggedAttempt(node_id="a", epoch=1, worker="w-1", started_at=5.0),
        LoggedAttempt(node_id="a", epoch=1, worker="w-1", ended_at=7.0, finished=False, code="flaky"),
    ]
    at = datetime.fromtimestamp(9.0, UTC)
    latest = document(status="finished", lease={"worker_id": "w-2"}, started_at=at, finished_at=at)
    first, second = merge([], logged, latest)
    assert (first.outcome, first.worker, first.seconds(9.0), first.code) == (
        AttemptOutcome.FAILED,
        "w-1",
        2.0,
        "flaky",
    )
    assert (second.outcome, second.worker, second.seconds(9.0)) == (AttemptOutcome.FINISHED, "w-2", 0.0)


def test_worker_of_an_external_attempt_replaces_its_bridge() -> None:
    running = AttemptView(
        node_id="a", attempt=2, worker="flowkit-bridge-1", started_at=1.0, outcome=AttemptOutcome.RUNNING
    )
    lost = LoggedAttempt(
        node_id="a", epoch=2, worker="x-1", ended_at=4.0, finished=False, kind=FailureKind.LOSS
    )
    [seen] = merge([running], [lost], {})
    assert (seen.worker, seen.outcome, seen.seconds(9.0)) == ("x-1", AttemptOutcome.LOST, 3.0)


def test_attempt_that_no_worker_has_started_waits_until_the_document_says_that_it_runs() -> None:
    waiting = AttemptView(node_id="a", attempt=2, outcome=AttemptOutcome.WAITING)
    assert merge([waiting], [], document(status="queued"))[0].outcome is AttemptOutcome.WAITING
    assert merge([waiting], [], document(status="running"))[0].outcome is AttemptOutcome.RUNNING


def test_attempt_that_the_deadline_of_its_node_cancelled_says_so() -> None:
    cancelled = AttemptView(node_id="a", attempt=2, outcome=AttemptOutcome.CANCELLED)
    late = "deadline_exceeded: the node took longer than 30 s"
    [seen] = merge([cancelled], [], document(status="failed", last_error=late))
    assert (seen.outcome, seen.error) == (AttemptOutcome.CANCELLED, late)
    [stopped] = merge([cancelled], [], document(status="cancelled", last_error="flaky: an earlier attempt"))
    assert stopped.error is None


class LaterRuns:
    """A client of a Temporal that has deleted all runs of a task but the last one."""

    data_converter = pydantic_data_converter

    def __init__(self, name: str) -> None:
        self._name = name

    def get_workflow_handle(self, task_id: str, *, run_id: str | None) -> LaterRuns:
        """Return the handle of the task, or of one of its runs."""
        return LaterRuns("" if run_id else self._name)

    async def fetch_history_events(self) -> AsyncIterator[Any]:
        """Yield the events of the last run; raise RPCError for an earlier one."""
        if not self._name:
            raise RPCError("workflow execution not found for workflow ID", RPCStatusCode.NOT_FOUND, b"")
        text = (HISTORIES / f"{self._name}.json").read_text(encoding="utf-8")
        for event in WorkflowHistory.from_json("t", text).events:
            yield event


@pytest.mark.parametrize(("name", "complete"), [("retry", True), ("continue_as_new-2", False)])
async def test_history_is_whole_only_with_the_first_run(name: str, complete: bool) -> None:
    found, is_whole = await read_history(cast("Client", LaterRuns(name)), "t")
    assert found
    assert is_whole is complete


def test_an_epoch_that_a_reset_has_reserved_is_no_attempt() -> None:
    ran = AttemptView(node_id="a", attempt=1, scheduled_at=1.0, ended_at=2.0, outcome=AttemptOutcome.FINISHED)
    assert merge([ran], [], document(status="queued")) == [ran]
    skipped = document(status="skipped", finished_at=datetime.fromtimestamp(9.0, UTC))
    assert merge([ran], [], skipped) == [ran]
    waiting = AttemptView(node_id="a", attempt=2, outcome=AttemptOutcome.WAITING)
    assert [each.attempt for each in merge([ran, waiting], [], document(status="queued"))] == [1, 2]


def test_the_latest_attempt_has_the_times_from_which_its_node_has_its_duration() -> None:
    """Also if a decision about its failure has ended the node an hour later."""
    recorded = AttemptView(
        node_id="a", attempt=2, started_at=10.0, ended_at=14.9, outcome=AttemptOutcome.FAILED
    )
    at = partial(datetime.fromtimestamp, tz=UTC)
    times = {"started_at": at(10.4), "attempt_ended_at": at(14.5), "finished_at": at(3_600.0)}
    (shown,) = merge([recorded], [], document(status="failed", attempt_epoch=2, **times))
    assert (shown.began_at, shown.ended_at, shown.seconds(9_999.0)) == (10.4, 14.5, 4.1)


def test_an_external_attempt_begins_when_its_worker_accepts_it() -> None:
    waits = AttemptView(
        node_id="a", attempt=1, worker=f"{BRIDGE_PREFIX}1", started_at=10.0, outcome=AttemptOutcome.RUNNING
    )
    (accepted,) = merge([waits], [LoggedAttempt(node_id="a", epoch=1, worker="x-1", started_at=25.0)], {})
    assert (waits.began_at, waits.seconds(30.0)) == (None, None)
    assert (accepted.began_at, accepted.seconds(30.0)) == (25.0, 5.0)
