"""What Temporal's Web UI shows of a run: names of events, and the current details."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import WorkflowFailureError

from flowkit.models import TaskStatus
from tests.integration.handlers import ALL, InlineQuick, Relay
from tests.integration.harness import eventually, node

if TYPE_CHECKING:
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server


async def details(harness: Harness, task_id: str) -> str:
    """Query the current details as the Web UI does."""
    handle = await harness.handle(task_id)
    reported = await handle.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)
    return str(reported.current_details)


async def names(harness: Harness, task_id: str) -> dict[str, list[str]]:
    """Return the names of a run's timers and activities, in the order of their start."""
    found: dict[str, list[str]] = {"timer": [], "activity": []}
    for event in (await (await harness.handle(task_id)).fetch_history()).events:
        summary = event.user_metadata.summary.data
        if event.HasField("timer_started_event_attributes"):
            found["timer"].append(json.loads(summary) if summary else "")
        if event.HasField("activity_task_scheduled_event_attributes"):
            found["activity"].append(json.loads(summary) if summary else "")
    return found


async def test_details_link_to_the_page_and_to_the_workers_of_a_running_role(harness: Harness) -> None:
    harness.settings["page_url"] = "http://127.0.0.1:9655/"
    await harness.engine()
    task_id = await harness.create(node("a", "nobody"), node("b", "quick", "a"))

    async def running() -> str | None:
        reported = await details(harness, task_id)
        return reported if "**running**" in reported else None

    reported = await eventually(running)
    assert f"[nobody](namespaces/default/task-queues/{harness.queue}.nobody)" in reported
    rows = ["| a | nobody | running | 1 |  |", "| b | quick | queued |  | waits for a |"]
    assert reported.rstrip().splitlines()[6:] == rows
    assert f"(http://127.0.0.1:9655/?task={task_id})" in reported.splitlines()[0]


async def test_details_of_a_large_graph_include_its_last_change(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    nodes = [node(f"n{number}") for number in range(50)]
    task_id = await harness.create(*nodes, node("last", "nobody", "n0", "n49"))

    async def reported() -> bool:
        return "1 running, 50 finished, of 51 nodes" in await details(harness, task_id)

    await eventually(reported)


async def test_details_of_a_large_graph_need_no_timer(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(*(node(f"n{number}", "quick") for number in range(50)))
    await (await harness.handle(task_id)).result()
    assert "50 finished, of 50 nodes" in await details(harness, task_id)
    assert (await names(harness, task_id))["timer"] == []


async def test_all_events_of_a_cancelled_run_have_names_and_the_details_show_the_reason(
    harness: Harness,
) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(node("a", "paced", inline={"pause": 600}), node("b", "quick", "a"))
    await harness.until_node(task_id, "a", "running")
    await harness.coordinator.cancel_task(task_id, reason="wrong day")
    with pytest.raises(WorkflowFailureError):
        await harness.result(task_id)
    assert (await details(harness, task_id)).startswith("Task **cancelled** (wrong day): ")
    reported = await names(harness, task_id)
    assert reported["timer"] == ["let the cancel flags reach MongoDB", "let the attempts stop"]
    assert reported["activity"] == [
        "a",
        "write to MongoDB: cancel flags, a cancelling",
        "close the task in MongoDB",
    ]


async def test_attempt_after_a_failure_shows_its_retry_number(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    retries = {"max": 1, "backoff_sec": 0.1}
    task_id = await harness.create(node("a", "failing", inline={"failures": 1}, retry_policy=retries))
    await harness.result(task_id)
    reported = await names(harness, task_id)
    assert [name for name in reported["activity"] if name.startswith("a")] == ["a", "a, retry 1 of 1"]


PULL = {"input_adapter": "pull.from_artifacts"}
EIGHT = [
    node("crawl", inline={"batches": 3}),
    node("thumbnails", "paced", inline={"pause": 60}, deadline_sec=2, allow_failure=True),
    {**node("index", "relay", "crawl"), "io": {"input_inline": PULL, "start_when": "first_batch"}},
    node("previews", "paced", "crawl", inline={"pause": 0.1}),
    node("stats", "inline", "crawl", inline={}),
    node("check", "failing", "index", inline={"failures": 1}, retry_policy={"max": 1, "backoff_sec": 0.1}),
    node("mail", "quick", "check", when="params.mail"),
    node("report", "quick", "index", "previews", "stats", "thumbnails", "mail", fan_in="all_done"),
]
MOST_EVENTS = 110
"""There are about 100 events, but an engine that is so busy that a local activity fails adds five."""


async def test_eight_nodes_with_limits_have_few_events_which_name_their_nodes(harness: Harness) -> None:
    harness.settings |= {"max_global_running": 4, "max_type_concurrency": {"paced": 1}}
    await harness.engine({"inline": InlineQuick()})
    await harness.worker({**ALL, "relay": Relay()})
    task_id = await harness.coordinator.create_task(params={"mail": False}, graph={"nodes": EIGHT})
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    events = (await (await harness.handle(task_id)).fetch_history()).events
    assert len(events) <= MOST_EVENTS
    named = {
        json.loads(event.user_metadata.summary.data) for event in events if event.HasField("user_metadata")
    }
    assert {
        "slot: node crawl of role quick, node thumbnails of role paced",
        "write to MongoDB: mail skipped",
        "condition of mail",
    } <= named
    kinds = {
        f"{kind}_event_attributes" for kind in ("marker_recorded", "timer_started", "activity_task_scheduled")
    }
    lines = [event for event in events if event.WhichOneof("attributes") in kinds]
    assert all(event.HasField("user_metadata") for event in lines)
