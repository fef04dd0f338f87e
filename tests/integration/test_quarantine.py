"""Batches that fail are set aside (`on_batch_failure`), and the node continues."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowUpdateFailedError

from flowkit.activities import role_attempt
from flowkit.errors import ActionRejected
from flowkit.models import TaskStatus
from flowkit.worker import BatchResult
from flowkit.workflows.task import Task
from tests.integration.handlers import Quick
from tests.integration.harness import EVENT_TIMEOUT_SEC, Harness, eventually, node
from tests.integration.test_continue_as_new import histories, replay

if TYPE_CHECKING:
    from flowkit.worker import Batch
    from flowkit.worker.context import RunContext

pytestmark = pytest.mark.server


class Picky(Quick):
    """Fails for the batches in `bad`, for those in `flaky` only in the first try, and for those in `broken`
    for good.
    """

    role = "picky"

    def __init__(self) -> None:
        self.tries: Counter[str] = Counter()
        self.bad: set[str] = set()
        self.flaky: set[str] = set()
        self.broken: set[str] = set()
        self.until: dict[str, asyncio.Event] = {}
        """What batches wait for, by uid."""

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Fail, or return one metrics row."""
        uid = batch.batch_uid or ""
        self.tries[uid] += 1
        if uid in self.until:
            await self.until[uid].wait()
        if uid in self.bad:
            raise OSError(f"cannot read {uid}")
        if uid in self.broken or (uid in self.flaky and self.tries[uid] == 1):
            return BatchResult(
                success=False, reason_code="no_such_city", error="as ordered", permanent=uid in self.broken
            )
        return await super().process_batch(batch, ctx)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_attempt, "FIRST_PAUSE_SEC", 0.01)


def picky(limit: Any = 10, **more: Any) -> dict[str, Any]:
    """Return a node `p` that pulls from `a` and sets batches aside after two tries."""
    pull = {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": ["a"], "poll_ms": 50}}
    failing = {"attempts": 2, "then": "quarantine", "max": limit}
    return node("p", "picky", "a", inline=pull, on_batch_failure=failing, **more)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [1, 3])
async def test_failed_batches_are_set_aside_and_the_node_finishes(harness: Harness, parallel: int) -> None:
    engine, handler = await harness.engine(), Picky()
    handler.bad, handler.flaky, handler.broken = {"b3", "b7"}, {"b5"}, {"b9"}
    await harness.worker({"quick": Quick(), "picky": handler}, concurrency=4)
    task_id = await harness.create(
        node("a", inline={"batches": 12}), picky(parallel=parallel), node("end", "quick", "p")
    )
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    expected = {f"b{number}": 1 for number in range(12)} | {"b3": 2, "b7": 2, "b5": 2, "b9": 1}
    assert handler.tries == expected
    assert len(await harness.rows(task_id, "p")) == 12
    stored = {
        row["batch_uid"]: (row["quarantined"]["tries"], *row["quarantined"]["error"].split(", at "))
        async for row in harness.db.artifacts.find({"task_id": task_id, "node_id": "p"})
        if row.get("status") == "failed"
    }
    assert {uid: found[:2] for uid, found in stored.items()} == {
        "b3": (2, "OSError: cannot read b3"),
        "b7": (2, "OSError: cannot read b7"),
        "b9": (1, "as ordered"),
    }
    assert stored["b3"][-1].endswith("Picky.process_batch")
    assert (await harness.node(task_id, "p"))["failed_batches"] == 3
    result = await harness.result(task_id)
    assert result.failed_batches == {"p": 3}
    assert (await harness.document(task_id))["result"]["failed_batches"] == {"p": 3}
    printed = await harness.command("batches", task_id, "p", "--failed")
    assert re.search(
        r"b3 +failed +\d .*OSError: cannot read b3, at .*\(set aside after 2 tries\)", printed
    ), printed
    assert printed.splitlines()[-1] == "failed batches 1 to 3 of 3"
    assert "3 batches are set aside" in await harness.command("status", task_id)
    shown = f"3 batches are set aside in p: `flowkit batches {task_id} p --failed`"
    assert shown in await harness.command("result", task_id)
    details = await (await harness.handle(task_id)).query("__temporal_workflow_metadata")
    assert "3 batches are set aside" in str(details)
    await replay(await histories(harness, task_id))


@pytest.mark.parametrize(
    ("limit", "bad", "ends"),
    [(2, 2, True), (2, 3, False), ("25%", 3, True), ("20%", 3, False)],
)
async def test_more_than_the_limit_fail_the_node(harness: Harness, limit: Any, bad: int, ends: bool) -> None:
    engine, handler = await harness.engine(), Picky()
    handler.bad = {f"b{number}" for number in range(bad)}
    await harness.worker({"quick": Quick(), "picky": handler})
    task_id = await harness.create(node("a", inline={"batches": 12}), picky(limit))
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is (
        TaskStatus.FINISHED if ends else TaskStatus.FAILED
    )
    if not ends:
        entry = await harness.node(task_id, "p")
        limit_ = limit if isinstance(limit, int) else f"{limit} of 12"
        problem = "too_many_failed_batches: the node has set 3 batches aside, and on_batch_failure.max is"
        causes = r"unexpected_error 3; latest: unexpected_error: OSError: cannot read b\d"
        assert re.match(rf"{re.escape(problem)} {limit_}: {causes}", entry["last_error"])
        explained = " ".join((await harness.command("explain", task_id)).split())
        assert re.search(causes, explained)
        assert f"3 batches are set aside in p: `flowkit batches {task_id} p --failed`" in explained


async def test_status_and_explain_show_what_is_set_aside_while_the_node_runs(harness: Harness) -> None:
    engine, handler = await harness.engine(), Picky()
    handler.broken, handler.until["b1"] = {"b0"}, asyncio.Event()
    await harness.worker({"picky": handler})
    task_id = await harness.create(
        node("p", "picky", inline={"batches": 2}, on_batch_failure={"attempts": 1, "max": 5})
    )

    async def is_tried() -> bool:
        return bool(handler.tries["b1"])

    await eventually(is_tried)
    shown = "1 batch is set aside (no_such_city 1; latest: no_such_city: as ordered)"
    for command in ("status", "explain"):
        found = " ".join((await harness.command(command, task_id)).split())
        assert shown in found
        assert f"1 batch is set aside in p: `flowkit batches {task_id} p --failed`" in found
    handler.until["b1"].set()
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED


async def test_a_later_attempt_tries_batches_of_its_handler_again_and_keeps_those_that_it_pulls(
    harness: Harness,
) -> None:
    engine, handler = await harness.engine(), Picky()
    handler.bad = {"b1"}
    await harness.worker({"quick": Quick(), "picky": handler})
    own = node("own", "picky", inline={"batches": 3}, on_batch_failure={"attempts": 1})
    task_id = await harness.create(node("a", inline={"batches": 3}), picky(), own, node("open", "approval"))
    await harness.until_node(task_id, "p", "finished")
    await harness.until_node(task_id, "own", "finished")
    handler.bad = set()
    await engine.retry_node(task_id, "own")
    await engine.retry_node(task_id, "p")
    await harness.until_node(task_id, "own", "finished", epoch=3)
    await harness.until_node(task_id, "p", "finished", epoch=3)
    await engine.decide(task_id, "open", "approve")
    assert (await harness.result(task_id)).failed_batches == {}
    assert [(await harness.node(task_id, name))["failed_batches"] for name in ("p", "own")] == [0, 0]


@pytest.mark.slow
async def test_a_batch_that_ends_its_process_is_set_aside_after_three_losses(harness: Harness) -> None:
    harness.settings["lease_ttl_sec"] = 3
    engine = await harness.engine()
    await harness.worker({"quick": Quick()})
    pull = {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": ["a"], "poll_ms": 50}}
    task_id = await harness.create(
        node("a", inline={"batches": 6}),
        node("p", "poisoned", "a", inline=pull, parallel=2, on_batch_failure={"attempts": 3}),
    )
    ended = asyncio.create_task(engine.wait(task_id, EVENT_TIMEOUT_SEC))
    losses = -1
    while not ended.done():
        process, losses = harness.worker_process("Poisoned"), losses + 1

        async def is_over(process: Any = process) -> bool:
            return ended.done() or process.poll() is not None

        await eventually(is_over)
    assert await ended is TaskStatus.FINISHED
    assert losses == 3
    assert (await harness.result(task_id)).failed_batches == {"p": 1}
    aside = await harness.db.artifacts.find_one({"task_id": task_id, "node_id": "p", "batch_uid": "b3"})
    assert aside is not None
    assert (aside["error"], aside["quarantined"]["tries"]) == ("worker_process_died", 3)
    rows = await harness.rows(task_id, "p")
    assert sorted(row["batch_uid"] for row in rows if not row["failed"]) == ["b0", "b1", "b2", "b4", "b5"]


async def until_known(harness: Harness, task_id: str, node_id: str, epoch: int) -> None:
    """Wait until the workflow knows that a node has finished. The document may say so before."""
    handle = await harness.handle(task_id)

    async def look() -> bool:
        nodes = (await handle.query(Task.status))["nodes"]
        return any(
            (each["node_id"], each["status"], each["attempt_epoch"]) == (node_id, "finished", epoch)
            for each in nodes
        )

    await eventually(look)


def tried(handler: Picky) -> dict[str, int]:
    """Return how often batches were tried since the last call."""
    found = dict(handler.tries)
    handler.tries.clear()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [1, 3])
async def test_an_operator_tries_batches_again_and_skips_others(harness: Harness, parallel: int) -> None:
    engine, handler = await harness.engine(), Picky()
    handler.broken = {"b1", "b3", "b5"}
    await harness.worker({"quick": Quick(), "picky": handler}, concurrency=4)
    pull = {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": ["p"], "poll_ms": 50}}
    child = node("child", "quick", "p", inline=pull)
    task_id = await harness.create(
        node("a", inline={"batches": 8}), picky(parallel=parallel), child, node("open", "approval")
    )
    await until_known(harness, task_id, "child", 1)
    handler.tries.clear()
    handler.broken = {"b5"}
    with pytest.raises(ActionRejected, match="batch_uids has 'b2', which node 'p' has not set aside"):
        await engine.retry_batches(task_id, "p", ["b1", "b2"])
    before = await harness.node(task_id, "p")
    handle = await harness.handle(task_id)
    for name in ("retry_batches", "skip_batches"):
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await handle.execute_update(name, {"node_id": "p", "batch_uids": ["b1", "tpyo"]})
        assert "batch_uids has 'tpyo', which node 'p' has not set aside" in str(refused.value.cause)
    assert await harness.node(task_id, "p") == before
    result = await engine.retry_batches(task_id, "p", ["b1"], by="ada")
    assert [(each["node_id"], each["to"]) for each in result["affected"]] == [
        ("p", "queued"),
        ("child", "queued"),
    ]
    assert "node 'p' keeps its other batches" in result["notes"]
    await harness.until_node(task_id, "p", "finished", epoch=before["attempt_epoch"] + 2)
    await until_known(harness, task_id, "child", 3)
    assert tried(handler) == {"b1": 1}
    after = await harness.node(task_id, "p")
    assert (after["generation"], after.get("first_epoch"), after["failed_batches"]) == (0, None, 2)
    assert (await harness.node(task_id, "child"))["generation"] == 1
    result = await engine.skip_batches(task_id, "p", ["b3"])
    assert [(each["node_id"], each["from"], each["to"]) for each in result["affected"]] == [
        ("p", "finished", "finished")
    ]
    assert (await harness.node(task_id, "p"))["failed_batches"] == 1
    printed = await harness.command("batches", task_id, "p", "--failed")
    assert re.search(r"b3 +skipped ", printed), printed
    await engine.retry_batches(task_id, "p")
    await until_known(harness, task_id, "child", 5)
    assert tried(handler) == {"b5": 1}
    await engine.skip_batches(task_id, "p")
    with pytest.raises(ActionRejected, match="node 'p' has set no batch aside that is not skipped"):
        await engine.retry_batches(task_id, "p")
    await engine.decide(task_id, "open", "approve")
    assert (await harness.result(task_id)).failed_batches == {}
    rows = await harness.rows(task_id, "p")
    assert sorted(row["batch_uid"] for row in rows if row["failed"]) == ["b3", "b5"]
    await replay(await histories(harness, task_id))


@pytest.mark.parametrize("own", [False, True])
async def test_a_held_node_continues_without_batches_that_are_skipped(harness: Harness, own: bool) -> None:
    engine, handler = await harness.engine(), Picky()
    handler.broken = {"b1", "b2"}
    await harness.worker({"quick": Quick(), "picky": handler})
    limit = {"attempts": 1, "max": 1}
    held = (
        node("p", "picky", "a", inline={"batches": 4}, on_batch_failure=limit, hold_on_failure=True)
        if own
        else picky(1, hold_on_failure=True)
    )
    task_id = await harness.create(node("a", inline={"batches": 4}), held, node("end", "quick", "p"))
    await harness.until_node(task_id, "p", "deferred")
    await eventually(lambda: is_held(harness, task_id))
    await engine.skip_batches(task_id, "p")
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert (await harness.result(task_id)).failed_batches == {}
    assert sorted(row["batch_uid"] for row in await harness.rows(task_id, "p") if not row["failed"]) == [
        "b0",
        "b3",
    ]


async def is_held(harness: Harness, task_id: str) -> bool:
    return (await harness.node(task_id, "p")).get("held_until_ms") is not None


async def test_a_rerun_tries_only_the_batches_that_were_set_aside(harness: Harness) -> None:
    engine, handler = await harness.engine(), Picky()
    handler.broken = {"b1", "b3"}
    await harness.worker({"quick": Quick(), "picky": handler})
    task_id = await harness.create(
        node("a", inline={"batches": 5}), picky(), picky() | {"node_id": "q"}, node("end", "quick", "p")
    )
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    handler.broken = {"b3"}
    handler.tries.clear()
    with pytest.raises(ActionRejected, match="node 'a' has set no batch aside"):
        await engine.rerun(task_id, failed_batches_of=["a"])
    shown = await harness.command("rerun", task_id, "--failed-batches", "p")
    assert f"task {task_id} runs again as run 2, with 2 nodes" in shown
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert tried(handler) == {"b1": 1, "b3": 1}
    assert (await harness.result(task_id)).failed_batches == {"p": 1, "q": 2}
    assert len([row for row in await harness.rows(task_id, "p") if not row["failed"]]) == 4
