"""Tasks on real servers: order, fan-in, retries, failures, documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowFailureError, WorkflowHistoryEventFilterType
from temporalio.exceptions import ApplicationError

from flowkit.errors import GraphError
from flowkit.models import TaskStatus
from tests.integration.handlers import ALL, Gated
from tests.integration.harness import node

if TYPE_CHECKING:
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

SOON = {"retry_policy": {"max": 2, "backoff_sec": 0.1}}


async def failure_of(harness: Harness, task_id: str) -> ApplicationError:
    """Return the error of a failed workflow."""
    with pytest.raises(WorkflowFailureError) as caught:
        await harness.result(task_id)
    assert isinstance(caught.value.cause, ApplicationError)
    return caught.value.cause


async def test_diamond_runs_in_order_and_its_document_shows_the_outcome(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(
        node("top", inline={"batches": 3}),
        node("left", "quick", "top"),
        node("right", "quick", "top"),
        node("bottom", "quick", "left", "right"),
    )
    result = await harness.result(task_id)
    assert result.status is TaskStatus.FINISHED
    document = await harness.document(task_id)
    assert document["status"] == "finished"
    assert [change["to"] for change in document["status_history"]] == ["queued", "running", "finished"]
    assert [entry["node_id"] for entry in document["result"]["nodes"]] == ["top", "left", "right", "bottom"]
    began = {n["node_id"]: n["started_at"] for n in document["graph"]["nodes"]}
    ended = {n["node_id"]: n["finished_at"] for n in document["graph"]["nodes"]}
    assert ended["top"] <= min(began["left"], began["right"])
    assert max(ended["left"], ended["right"]) <= began["bottom"]
    assert len(await harness.rows(task_id, "top")) == 3


async def test_pulling_node_gets_every_batch_of_its_source_once(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    pull = {"input_adapter": "pull.from_artifacts"}
    task_id = await harness.create(
        node("up", inline={"batches": 45}), node("down", "quick", "up", inline=pull)
    )
    await harness.result(task_id)
    assert sorted(row["batch_uid"] for row in await harness.rows(task_id, "down")) == sorted(
        f"b{i}" for i in range(45)
    )


async def test_transient_failure_is_retried_with_a_new_epoch_after_a_named_timer(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(
        node("a", "failing", inline={"failures": 2}, **SOON), node("b", "quick", "a")
    )
    await harness.result(task_id)
    assert (await harness.node(task_id, "a"))["attempt_epoch"] == 3
    history = await (await harness.handle(task_id)).fetch_history(
        event_filter_type=WorkflowHistoryEventFilterType.ALL_EVENT
    )
    timers = [e for e in history.events if e.HasField("timer_started_event_attributes")]
    assert [timer.user_metadata.summary.data for timer in timers] == [
        b'"a: retry 1 of 2 in 0.1 s, after flaky"',
        b'"a: retry 2 of 2 in 0.1 s, after flaky"',
    ]


async def test_waiting_node_makes_its_task_deferred_and_then_running_again(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    policy = {"max": 1, "backoff_sec": 1.0}
    task_id = await harness.create(node("a", "failing", inline={"failures": 1}, retry_policy=policy))
    document = await harness.until_status(task_id, "deferred")
    waiting = document["graph"]["nodes"][0]
    assert waiting["status"] == "deferred"
    assert waiting["last_error"].startswith("flaky: as ordered (worker ")
    assert waiting["next_retry_at_ms"] > 0
    await harness.result(task_id)
    history = [change["to"] for change in (await harness.document(task_id))["status_history"]]
    assert history == ["queued", "running", "deferred", "running", "finished"]


PERMANENT: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"failures": 9}, {"max": 1, "backoff_sec": 0.05}, 2),
    ({"failures": 9, "permanent": True}, {"max": 5, "backoff_sec": 0.05}, 1),
    ({"failures": 9, "code": "bad_input"}, {"max": 5, "backoff_sec": 0.05}, 1),
    ({"failures": 9, "code": "gone"}, {"max": 5, "backoff_sec": 0.05, "permanent_on": ["gone"]}, 1),
]
"""What `a` receives, its policy, and the number of its attempts: exhausted retries, and three permanent failures."""


async def test_permanent_failure_ends_the_task(harness: Harness) -> None:
    await harness.engine()
    await harness.worker(concurrency=8)
    tasks = [
        await harness.create(
            node("a", "failing", inline=inline, retry_policy=policy),
            node("below", "quick", "a"),
            node("aside", "paced", inline={"pause": 60}),
            node("later", "quick", "aside"),
        )
        for inline, policy, _ in PERMANENT
    ]
    for task_id, (inline, _, epochs) in zip(tasks, PERMANENT, strict=True):
        error = await failure_of(harness, task_id)
        assert (error.type, "'a' failed" in error.message) == ("task_failed", True)
        document = await harness.document(task_id)
        nodes = {n["node_id"]: n for n in document["graph"]["nodes"]}
        assert document["status"] == "failed"
        assert document["coordinator"]["cancel_reason"] == f"hard_fail:{inline.get('code', 'flaky')}"
        assert nodes["a"]["attempt_epoch"] == epochs
        assert (nodes["a"]["status"], nodes["aside"]["status"]) == ("failed", "cancelled")
        assert (nodes["below"]["status"], nodes["below"]["skip_reason"]) == ("skipped", "upstream_failed")
        assert (nodes["later"]["status"], nodes["later"]["skip_reason"]) == ("skipped", "task_failed")


async def test_independent_branches_finish_if_the_graph_continues_on_failure(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(
        node("a", "failing", inline={"failures": 9, "permanent": True}),
        node("below", "quick", "a"),
        node("aside", "paced", inline={"pause": 0.5}),
        node("later", "quick", "aside"),
        on_node_failure="continue",
    )
    await failure_of(harness, task_id)
    assert await harness.statuses(task_id) == {
        "a": "failed",
        "below": "skipped",
        "aside": "finished",
        "later": "finished",
    }
    assert (await harness.document(task_id))["status"] == "failed"


async def test_tolerated_failure_lets_the_task_finish_and_is_listed(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(
        node("a", "failing", inline={"failures": 9, "permanent": True}, allow_failure=True),
        node("b"),
        node("any", "quick", "a", "b", fan_in="any"),
        node("all", "quick", "a", "b"),
    )
    result = await harness.result(task_id)
    assert result.handled_failures == ["a"]
    assert await harness.statuses(task_id) == {
        "a": "failed",
        "b": "finished",
        "any": "finished",
        "all": "skipped",
    }
    assert (await harness.document(task_id))["result"]["handled_failures"] == ["a"]


async def test_count_of_n_starts_before_the_other_parents_have_finished(harness: Harness) -> None:
    gated = Gated()
    await harness.engine()
    await harness.worker({**ALL, "gated": gated})
    task_id = await harness.create(
        node("x"),
        node("y"),
        node("slow", "gated"),
        node("two", "quick", "x", "y", "slow", fan_in="count:2"),
    )
    await harness.until_node(task_id, "two", "finished")
    gated.gate.set()
    await harness.result(task_id)
    nodes = {n["node_id"]: n for n in (await harness.document(task_id))["graph"]["nodes"]}
    assert nodes["two"]["finished_at"] < nodes["slow"]["finished_at"]


async def test_node_that_exceeds_its_timeout_fails_with_the_timeout_code(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(
        node("a", "paced", inline={"pause": 60}, timeout_sec=0.5, retry_policy={"max": 1, "backoff_sec": 0.1})
    )
    error = await failure_of(harness, task_id)
    assert "timeout" in error.message
    assert (await harness.node(task_id, "a"))["attempt_epoch"] == 2


async def test_coordinator_functions_run_in_the_engine_and_fail_like_nodes(harness: Harness) -> None:
    called: list[tuple[str, dict[str, object]]] = []

    async def remember(task_id: str, **arguments: object) -> None:
        called.append((task_id, arguments))
        if arguments.get("fail"):
            raise ValueError("no such thing")

    await harness.engine(remember=remember)
    await harness.worker()
    call = {"fn": "remember", "fn_args": {"x": 1}}
    task_id = await harness.create(
        {"node_id": "f", "type": "coordinator_fn", "io": call},
        node("after", "quick", "f"),
        {"node_id": "n", "type": "coordinator_fn", "depends_on": ["after"]},
    )
    await harness.result(task_id)
    assert called == [(task_id, {"x": 1})]
    failing = await harness.create(
        {
            "node_id": "f",
            "type": "coordinator_fn",
            "io": {**call, "fn_args": {"fail": True}},
            "retry_policy": {"max": 0},
        }
    )
    assert "unexpected_error: ValueError: no such thing" in (await failure_of(harness, failing)).message


async def test_task_created_twice_with_one_id_runs_once(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    graph = {"nodes": [node("a", "paced", inline={"pause": 0.3})]}
    for _ in range(2):
        assert (
            await harness.coordinator.create_task(params={}, graph=graph, task_id=harness.queue)
            == harness.queue
        )
    await harness.result(harness.queue)
    await harness.coordinator.create_task(params={}, graph=graph, task_id=harness.queue)
    assert (await harness.document(harness.queue))["run_seq"] == 1


async def test_invalid_graph_is_rejected_by_create_task_without_a_write(harness: Harness) -> None:
    graph = {"nodes": [node("a", "quick", "ghost")]}
    with pytest.raises(GraphError, match="depends_on names 'ghost', which is not a node"):
        await harness.coordinator.create_task(params={}, graph=graph)
    assert await harness.db.tasks.count_documents({}) == 0


async def test_graph_of_the_caller_is_not_changed(harness: Harness) -> None:
    graph = {"nodes": [node("a")], "edges": []}
    before = {"nodes": [node("a")], "edges": []}
    await harness.coordinator.create_task(params={}, graph=graph)
    assert graph == before
