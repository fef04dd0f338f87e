"""Tasks stay within Temporal's limits, on a real server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from temporalio import activity
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from flowkit.models import TaskStatus
from flowkit.worker import BatchResult
from flowkit.workflows import document, state_codec
from tests.integration.handlers import ConcurrencyCounter, Quick
from tests.integration.harness import Harness, node
from tests.integration.test_continue_as_new import histories, replay
from tests.integration.test_large_graphs import run_ids

if TYPE_CHECKING:
    from temporalio.api.history.v1 import ActivityTaskScheduledEventAttributes
    from temporalio.client import WorkflowHistory

    from flowkit.worker import Batch, RoleHandler
    from flowkit.worker.context import RunContext

pytestmark = pytest.mark.server

OWN = {"open_task", "record", "close_task"}
MOST = 8
FOUR_BYTE_CHARACTER = "\U0001f600"
FAILING_NODES = 250
"""Together, this many errors of 8 kB exceed the size of one payload."""


def most_in_flight(history: WorkflowHistory) -> int:
    """Return the largest number of attempts in flight. On a slow machine, some are lost and run again."""
    open_attempts: set[int] = set()
    most = 0
    for event in history.events:
        scheduled = event.activity_task_scheduled_event_attributes
        if scheduled.activity_id and scheduled.activity_type.name not in OWN:
            open_attempts.add(event.event_id)
        for end in (
            event.activity_task_completed_event_attributes,
            event.activity_task_failed_event_attributes,
            event.activity_task_timed_out_event_attributes,
            event.activity_task_canceled_event_attributes,
        ):
            open_attempts.discard(end.scheduled_event_id)
        most = max(most, len(open_attempts))
    return most


def activities(history: WorkflowHistory, name: str) -> int:
    """Return the number of activities of this name in a history."""
    return sum(each.activity_type.name == name for each in scheduled(history))


def scheduled(history: WorkflowHistory) -> list[ActivityTaskScheduledEventAttributes]:
    return [event.activity_task_scheduled_event_attributes for event in history.events]


async def test_attempts_of_many_roles_stay_within_the_limit_in_flight(harness: Harness) -> None:
    harness.settings["max_in_flight"] = MOST
    await harness.engine()
    handlers: dict[str, RoleHandler] = {f"role{i}": ConcurrencyCounter(f"role{i}") for i in range(12)}
    await harness.worker(handlers, concurrency=10)
    task_id = await harness.create(*(node(f"n{i}", f"role{i % 12}") for i in range(120)))
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    (history,) = await histories(harness, task_id)
    assert most_in_flight(history) == MOST
    await replay([history])


class Verbose(Quick):
    """Fails permanently with a long error."""

    role = "verbose"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Fail."""
        return BatchResult(
            success=False, reason_code="broken", permanent=True, error=f"{ctx.node_id} " + "é" * 900
        )


async def test_write_that_is_too_large_is_split_without_loss(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "REPORT_BYTES", 4_000)
    await harness.engine()
    await harness.worker({"verbose": Verbose(), "paced": ConcurrencyCounter("paced")})
    task_id = await harness.create(
        node("a", "verbose", allow_failure=True),
        *(node(f"below{i}", "paced", "a") for i in range(60)),
        node("aside", "paced"),
    )
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    statuses = await harness.statuses(task_id)
    assert [statuses[f"below{i}"] for i in range(60)] == ["skipped"] * 60
    (history,) = await histories(harness, task_id)
    written = [
        {each["node_id"] for each in json.loads(event.input.payloads[0].data)["nodes"]}
        for event in scheduled(history)
        if event.activity_type.name == "record"
    ]
    ends = {"a", *(f"below{i}" for i in range(60))}
    assert not any(ends <= nodes for nodes in written)
    assert sum(bool(ends & nodes) for nodes in written) > 1
    await replay([history])


async def test_nodes_that_do_not_fit_into_the_close_are_written_before(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "REPORT_BYTES", 4_000)
    await harness.engine()
    names = [f"n{i}" for i in range(60)]
    task_id = await harness.create(node("a", "absent"), *(node(name, "absent", "a") for name in names))
    await harness.until_status(task_id, "running")
    await (await harness.handle(task_id)).cancel()
    await harness.until_status(task_id, "cancelled")
    assert await harness.statuses(task_id) == {"a": "cancelled", **dict.fromkeys(names, "skipped")}
    (history,) = await histories(harness, task_id)
    assert activities(history, "record") > 2
    await replay([history])


async def test_errors_truncated_for_a_new_run_stay_complete_in_the_document(
    short_runs: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_codec, "CARRIED_STATE_BYTES", 6_000)
    await short_runs.engine()
    await short_runs.worker({"verbose": Verbose(), "quick": Quick()})
    failing = [f"a{i}" for i in range(20)]
    chain = [node("n0", "quick"), *(node(f"n{i}", "quick", f"n{i - 1}") for i in range(1, 30))]
    task_id = await short_runs.create(
        *(node(name, "verbose", allow_failure=True) for name in failing), *chain
    )
    assert (await short_runs.result(task_id)).handled_failures == failing
    runs = await run_ids(short_runs, task_id)
    assert len(runs) > 1
    for name in failing:
        error = (await short_runs.node(task_id, name))["last_error"]
        assert error.startswith(f"broken: {name} " + "é" * 900 + " (worker ")
    client = await short_runs.client()
    seen: dict[str, Any] = await client.get_workflow_handle(task_id).query("status")
    reported = [each["last_error"] for each in seen["nodes"][:20]]
    assert all(text.endswith("…") and len(text.encode()) < 400 for text in reported)
    await replay(await histories(short_runs, task_id))


class LongErrors(Quick):
    """Fails permanently with the longest possible error, of four-byte characters."""

    role = "shouting"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Fail."""
        error = ctx.node_id + FOUR_BYTE_CHARACTER * 5_000
        return BatchResult(success=False, reason_code="broken", permanent=True, error=error)


async def test_longest_errors_of_many_nodes_survive_new_runs_queries_and_the_close(
    short_runs: Harness,
) -> None:
    await short_runs.engine()
    await short_runs.worker({"shouting": LongErrors(), "quick": Quick()}, concurrency=30)
    failing = [f"{i:03}" + FOUR_BYTE_CHARACTER * 197 for i in range(FAILING_NODES)]
    chain = [node("n0", "quick"), *(node(f"n{i}", "quick", f"n{i - 1}") for i in range(1, 30))]
    last = node("last", "quick", "n29", *failing, fan_in=f"count:{len(failing)}", allow_failure=True)
    task_id = await short_runs.create(
        *(node(name, "shouting", allow_failure=True) for name in failing), *chain, last
    )
    assert (await short_runs.result(task_id)).handled_failures == failing
    assert len(await run_ids(short_runs, task_id)) > 1
    nodes = (await short_runs.document(task_id))["graph"]["nodes"]
    assert {(each["status"], len(each["last_error"])) for each in nodes[:FAILING_NODES]} == {
        ("failed", 2_000)
    }
    client = await short_runs.client()
    seen: dict[str, Any] = await client.get_workflow_handle(task_id).query("status")
    assert (seen["nodes_omitted"], seen["errors_cut"]) == (0, FAILING_NODES)


async def test_explicit_empty_source_list_ends_the_node_without_batches(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    pull = {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": []}}
    task_id = await harness.create(
        node("up", inline={"batches": 3}),
        node("down", "quick", "up", inline=pull),
        node("alone", inline=pull),
    )
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert [len(await harness.rows(task_id, name)) for name in ("up", "down", "alone")] == [3, 0, 0]


async def test_unknown_failure_formats_of_a_newer_worker_do_not_stop_a_task(harness: Harness) -> None:
    calls: list[int] = []

    @activity.defn(name="newer")
    async def newer(attempt: dict[str, Any]) -> Any:
        calls.append(attempt["epoch"])
        if len(calls) == 1:
            raise ApplicationError("later", {"kind": "quota", "retry_after": 3}, type="q", non_retryable=True)
        if len(calls) == 2:
            raise ApplicationError("m" * 9_000, {"kind": ["loss"], "code": 7}, type="q", non_retryable=True)
        return ["a result of another form"]

    await harness.engine()
    client = await harness.client()
    async with Worker(client, task_queue=f"{harness.queue}.newer", activities=[newer]):
        task_id = await harness.create(node("a", "newer", retry_policy={"max": 2, "backoff_sec": 0.1}))
        assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert calls == [1, 2, 3]
