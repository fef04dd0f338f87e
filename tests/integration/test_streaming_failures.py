"""Streaming on real servers when attempts fail, processes are killed, and workflows continue in other runs."""

from __future__ import annotations

from typing import Any

import pytest
from temporalio.client import WorkflowFailureError

from flowkit.activities.batches import puller
from flowkit.models import TaskStatus
from flowkit.models.temporal_names import FIRST_BATCH
from tests.integration.harness import EVENT_TIMEOUT_SEC, Harness, eventually, node
from tests.integration.streaming import Sink, Source, assert_exact, signals, source, streaming
from tests.integration.test_cancel_terminate_reset import reset
from tests.integration.test_continue_as_new import chain, histories, replay
from tests.integration.test_large_graphs import run_ids
from tests.integration.test_streaming import finished, served

pytestmark = pytest.mark.server

LEASE_SEC = 4
"""Long enough for a busy machine, whose event loops stand still for a second or two."""


@pytest.mark.parametrize("fail_at", [1, 3])
async def test_totals_are_exact_when_the_parent_is_retried(harness: Harness, fail_at: int) -> None:
    parent = Source()
    await served(harness, parent, Sink())
    task_id = await harness.create(source(fail_at=fail_at), streaming("b", "sink", "a"))
    await harness.until_batches(task_id, "b", 1)
    parent.gates["a"].set()
    await finished(harness, task_id)
    await assert_exact(harness, task_id, "b", 5)
    assert (await harness.node(task_id, "a"))["attempt_epoch"] == 2
    (history,) = await histories(harness, task_id)
    assert signals(history) == [FIRST_BATCH]


async def test_totals_are_exact_when_the_child_is_retried(harness: Harness) -> None:
    parent, sink = Source(), Sink(fail_at=2)
    await served(harness, parent, sink)
    task_id = await harness.create(source(hold_at=3), streaming("b", "sink", "a"))
    await harness.until_node(task_id, "b", "running", epoch=2)
    assert (await harness.node(task_id, "a"))["status"] == "running"
    parent.gates["a"].set()
    await finished(harness, task_id)
    await assert_exact(harness, task_id, "b", 5)
    assert sink.read["b"].count(2) == 2


async def test_totals_are_exact_when_the_process_of_the_parent_is_killed(harness: Harness) -> None:
    harness.settings["lease_ttl_sec"] = LEASE_SEC
    await served(harness, Sink())
    killed = harness.worker_process("Paced")
    task_id = await harness.create(
        source(batches=12, role="paced", hold_at=6), streaming("b", "sink", "a"), streaming("c", "sink", "b")
    )
    await harness.until_batches(task_id, "c", 6)
    killed.kill()
    killed.wait(EVENT_TIMEOUT_SEC)
    await harness.worker()
    await finished(harness, task_id)
    for name in ("b", "c"):
        await assert_exact(harness, task_id, name, 12)
    assert (await harness.node(task_id, "a"))["attempt_epoch"] >= 2


async def test_totals_are_exact_when_the_process_of_the_child_is_killed(harness: Harness) -> None:
    harness.settings["lease_ttl_sec"] = LEASE_SEC
    parent = Source()
    await served(harness, parent)
    killed = harness.process("worker", "tests.integration.streaming:Sink")
    task_id = await harness.create(source(batches=12, hold_at=6), streaming("b", "sink", "a"))
    await harness.until_batches(task_id, "b", 3)
    killed.kill()
    killed.wait(EVENT_TIMEOUT_SEC)
    await harness.worker({"sink": Sink()})
    parent.gates["a"].set()
    await finished(harness, task_id)
    await assert_exact(harness, task_id, "b", 12)


async def test_parent_and_child_share_a_role_with_one_slot(harness: Harness) -> None:
    """The child takes the slot while its parent waits for its retry, and yields it after five seconds."""
    parent = Source()
    for name in ("a", "b"):
        parent.gates[name].set()
    await harness.engine()
    await harness.worker({"source": parent}, concurrency=1)
    first = source(fail_at=2)
    first["retry_policy"] = {"max": 1, "backoff_sec": 2}
    pull = {"input_adapter": "pull.from_artifacts", "input_args": {"poll_ms": 50}}
    task_id = await harness.create(first, streaming("b", "source", "a", inline=pull))
    await finished(harness, task_id)
    rows = await harness.rows(task_id, "b")
    assert sorted(row["batch_uid"] for row in rows) == [f"b{number}" for number in range(5)]
    assert (await harness.node(task_id, "a"))["attempt_epoch"] == 2
    assert (await harness.node(task_id, "b"))["attempt_epoch"] >= 2


BROKEN: dict[str, Any] = {"fail_at": 3, "failures": 9, "permanent": True}


@pytest.mark.parametrize("kept", ["held", "paused"])
async def test_child_of_a_parent_that_does_not_run_waits_without_attempts(
    harness: Harness, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puller, "_YIELD_AFTER_SEC", 0.1)
    parent = Source()
    await served(harness, parent, Sink())
    engine = await harness.engine()
    broken = BROKEN if kept == "held" else {}
    first = source(**broken) | {"hold_on_failure": True}
    task_id = await harness.create(first, streaming("b", "sink", "a"))
    await harness.until_batches(task_id, "b", 1)
    if kept == "held":
        parent.gates["a"].set()
    else:
        await engine.pause(task_id, ["node:a"], interrupt=True)
    handle = await harness.handle(task_id)

    async def look() -> dict[str, Any] | None:
        view = (await handle.query("status"))["nodes"][1]
        return view if view.get("waits_for") == "a to run" else None

    waiting = await eventually(look)
    assert (waiting["status"], waiting["next_retry_at"]) == ("deferred", None)
    if kept == "held":
        await engine.complete_node(task_id, "a")
    else:
        parent.gates["a"].set()
        await engine.resume(task_id)
    assert (await harness.until_node(task_id, "b", "finished"))["attempt_epoch"] > waiting["attempt_epoch"]
    await replay(await histories(harness, task_id))


async def test_child_drains_and_fails_when_its_parent_fails_for_good(harness: Harness) -> None:
    parent = Source()
    await served(harness, parent, Sink())
    task_id = await harness.create(
        source(**BROKEN),
        streaming("b", "sink", "a"),
        streaming("c", "sink", "b"),
        node("d", "quick", "c"),
        node("aside"),
        on_node_failure="continue",
    )
    await harness.until_batches(task_id, "c", 1)
    parent.gates["a"].set()
    with pytest.raises(WorkflowFailureError):
        await harness.result(task_id)
    document = await harness.document(task_id)
    nodes = {each["node_id"]: each for each in document["graph"]["nodes"]}
    assert [nodes[name]["status"] for name in ("a", "b", "c", "d", "aside")] == [
        *["failed"] * 3,
        "skipped",
        "finished",
    ]
    for name in ("b", "c"):
        assert nodes[name]["last_error"].startswith("upstream_failed: ")
        assert nodes[name]["attempt_epoch"] == 1
        await assert_exact(harness, task_id, name, 3)
    assert nodes["d"]["skip_reason"] == "upstream_failed"
    await replay(await histories(harness, task_id))


@pytest.mark.parametrize("tolerant", ["allow_failure", "routing"])
async def test_child_finishes_when_the_failure_of_its_parent_is_tolerated_or_routed(
    harness: Harness, tolerant: str
) -> None:
    parent = Source()
    await served(harness, parent, Sink())
    fields: dict[str, Any] = {"allow_failure": True}
    if tolerant == "routing":
        fields = {"routing": {"on_failure": ["remed"]}}
    task_id = await harness.create(
        {**source(**BROKEN), **fields}, node("remed"), streaming("b", "sink", "a"), node("c", "quick", "b")
    )
    await harness.until_batches(task_id, "b", 1)
    parent.gates["a"].set()
    result = await harness.result(task_id)
    assert (result.status, result.handled_failures) == (TaskStatus.FINISHED, ["a"])
    statuses = await harness.statuses(task_id)
    assert (statuses["a"], statuses["b"], statuses["c"]) == ("failed", "finished", "finished")
    await assert_exact(harness, task_id, "b", 3)
    await replay(await histories(harness, task_id))


async def test_hard_failure_of_the_parent_stops_the_child(harness: Harness) -> None:
    parent = Source()
    await served(harness, parent, Sink())
    task_id = await harness.create(source(**BROKEN), streaming("b", "sink", "a"))
    await harness.until_batches(task_id, "b", 1)
    parent.gates["a"].set()
    with pytest.raises(WorkflowFailureError):
        await harness.result(task_id)
    statuses = await harness.statuses(task_id)
    assert statuses["a"] == "failed"
    assert statuses["b"] in ("cancelled", "failed")
    await replay(await histories(harness, task_id))


async def test_gate_that_a_batch_opened_stays_open_in_a_new_run(short_runs: Harness) -> None:
    """Parent and child both wait for a retry while the history of other nodes ends the run."""
    parent, sink = Source(), Sink(fail_at=0)
    parent.gates["a"].set()
    await served(short_runs, parent, sink)
    later = {"max": 1, "backoff_sec": 6}
    nodes = [{**source(fail_at=2), "retry_policy": later}]
    nodes += [{**streaming("b", "sink", "a"), "retry_policy": later}, *chain(25)]
    task_id = await short_runs.create(*nodes)
    assert (await short_runs.result(task_id)).status is TaskStatus.FINISHED
    runs = await histories(short_runs, task_id)
    assert len(await run_ids(short_runs, task_id)) > 1
    assert [signals(run) for run in runs] == [[FIRST_BATCH], *[[] for _ in runs[1:]]]
    await assert_exact(short_runs, task_id, "b", 5)
    await replay(runs)


async def test_reset_replays_the_gates_that_batches_opened(harness: Harness) -> None:
    parent = Source()
    await served(harness, parent, Sink())
    task_id = await harness.create(source(), streaming("b", "sink", "a"), streaming("c", "sink", "b"))
    await harness.until_batches(task_id, "c", 1)
    for resets in (1, 2):
        await reset(harness, task_id, "c")
        await harness.until_node(task_id, "c", "running", epoch=resets + 1)
    parent.gates["a"].set()
    await finished(harness, task_id)
    for name in ("b", "c"):
        await assert_exact(harness, task_id, name, 5)


async def test_reset_to_the_start_of_the_parent_reads_every_batch_again(harness: Harness) -> None:
    parent = Source()
    await served(harness, parent, Sink())
    task_id = await harness.create(source(), streaming("b", "sink", "a"))
    await harness.until_batches(task_id, "b", 1)
    await reset(harness, task_id, "a")
    await harness.until_node(task_id, "a", "running", epoch=2)
    parent.gates["a"].set()
    await finished(harness, task_id)
    await assert_exact(harness, task_id, "b", 5)
