"""Nodes with `map`: a node processes the items of a list, alone or with shards."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.models import TaskStatus
from flowkit.worker import BatchResult
from tests.integration.handlers import Quick
from tests.integration.harness import EVENT_TIMEOUT_SEC, Harness, eventually, node, wait_seconds
from tests.integration.test_continue_as_new import histories, replay

if TYPE_CHECKING:
    from flowkit.worker import Batch
    from flowkit.worker.context import RunContext

pytestmark = pytest.mark.server


class Items(Quick):
    """Records the items that it receives, takes a while for each batch, and waits before some until it may continue."""

    role = "items"

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.seen: Counter[Any] = Counter()
        self.firsts: list[int] = []
        self.failures = 0
        self.bad: set[Any] = set()
        """The items of which each fails its batch for good."""
        self.held_from: int | None = None
        """The first item that waits for `proceed`, with those after it."""
        self.proceed = asyncio.Event()

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Record the items, or fail as often as the test says."""
        await ctx.cancellable(wait_seconds(self.seconds))
        if self.held_from is not None and batch.payload["first"] >= self.held_from:
            await ctx.cancellable(self.proceed.wait())
        if self.failures:
            self.failures -= 1
            return BatchResult(success=False, reason_code="flaky", error="as ordered")
        if self.bad & {*batch.payload["items"]}:
            return BatchResult(success=False, reason_code="bad", error="as ordered", permanent=True)
        self.seen.update(batch.payload["items"])
        self.firsts.append(batch.payload["first"])
        return BatchResult(success=True, metrics={"count": len(batch.payload["items"])})


def mapping(over: str, *parents: str, **more: Any) -> dict[str, Any]:
    """Return a node `m` that processes the items of an expression."""
    fields = {key: more.pop(key) for key in ("batch_size", "parallel") if key in more}
    return node("m", "items", *parents, map={"over": over, **fields}, **more)


async def run(harness: Harness, *nodes: dict[str, Any], params: dict[str, Any] | None = None) -> str:
    task_id = await harness.coordinator.create_task(params=params or {}, graph={"nodes": [*nodes]})
    assert await harness.coordinator.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    return task_id


@pytest.mark.parametrize("parallel", [1, 3])
async def test_a_node_processes_each_item_of_a_list_once(harness: Harness, parallel: int) -> None:
    await harness.engine()
    items = Items(0.01)
    await harness.worker({"quick": Quick(), "items": items}, concurrency=4)
    cities = [f"city-{number}" for number in range(45)]
    given = mapping("params.cities", batch_size=4, parallel=parallel)
    task_id = await run(harness, given, node("end", "quick", "m"), params={"cities": cities})
    assert items.seen == Counter(cities)
    assert sorted(items.firsts) == [*range(0, 45, 4)]
    rows = await harness.rows(task_id, "m")
    assert sorted(row["batch_uid"] for row in rows) == [f"{number:07}" for number in range(12)]
    assert sum(row["metrics"]["count"] for row in rows) == 45
    await replay(await histories(harness, task_id))


async def test_the_list_can_come_from_variables_and_results_and_may_be_empty(harness: Harness) -> None:
    await harness.engine()
    items = Items()
    await harness.worker({"quick": Quick(), "items": items})
    over = "vars.names + [nodes['a'].status] + params.more.map(x, x * 2)"
    set_vars = {
        "node_id": "set",
        "type": "coordinator_fn",
        "io": {"fn": "vars.set", "fn_args": {"kv": {"names": ["x", "y"]}}},
    }
    await run(harness, set_vars, node("a"), mapping(over, "set", "a"), params={"more": [5]})
    assert items.seen == Counter(["x", "y", "finished", 10])
    items.seen.clear()
    task_id = await run(harness, mapping("params.none", parallel=2), params={"none": []})
    assert not items.seen
    assert (await harness.node(task_id, "m"))["status"] == "finished"


async def test_a_failed_batch_is_repeated_and_the_others_are_not(harness: Harness) -> None:
    await harness.engine()
    items = Items()
    await harness.worker({"items": items})
    items.failures = 2
    retries = {"max": 3, "backoff_sec": 0.05}
    await run(harness, mapping("params.all", retry_policy=retries), params={"all": [*range(20)]})
    assert items.seen == Counter(range(20))


@pytest.mark.parametrize(
    ("over", "error"),
    [
        ("params.all", r"map\.over: the expression gives an object, not a list: params\.all"),
        ("params.missing", r"map\.over: .*missing"),
        ("params.all.n / 0 == 1 ? [1] : [2]", r"map\.over: "),
    ],
)
async def test_an_expression_that_gives_no_list_fails_the_node(
    harness: Harness, over: str, error: str
) -> None:
    await harness.engine()
    await harness.worker({"items": Items()})
    task_id = await harness.coordinator.create_task(
        params={"all": {"n": 1}}, graph={"nodes": [mapping(over)]}
    )
    assert await harness.coordinator.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FAILED
    entry = await harness.node(task_id, "m")
    assert re.search(error, entry["last_error"]), entry["last_error"]
    assert await harness.db.map_items.count_documents({"task_id": task_id}) == 0


async def test_a_retried_node_evaluates_its_items_again_and_status_shows_how_many_are_left(
    harness: Harness,
) -> None:
    engine, items = await harness.engine(), Items()
    await harness.worker({"items": items}, concurrency=4)
    increment = {"io": {"fn": "vars.incr", "fn_args": {"key": "n"}}}
    task_id = await harness.coordinator.create_task(
        params={},
        graph={
            "nodes": [
                {"node_id": "n", "type": "coordinator_fn", **increment},
                mapping("[vars.n] + [1, 2, 3, 4, 5, 6, 7, 8, 9].map(x, x + 100)", "n", parallel=2),
                node("open", "approval"),
            ]
        },
    )
    await harness.until_node(task_id, "m", "finished")
    items.held_from = 6
    await engine.retry_node(task_id, "n")

    async def shows_progress() -> bool:
        printed = await harness.command("status", task_id)
        return re.search(r"2 shards on 1 worker,\s+6 of\s+10", printed) is not None

    await eventually(shows_progress)
    items.proceed.set()
    await harness.until_node(task_id, "m", "finished")
    assert items.seen == Counter([1, 2, *[*range(101, 110)] * 2])
    await engine.decide(task_id, "open", "approve")
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    await replay(await histories(harness, task_id))


@pytest.mark.parametrize("again", [{"failed_batches_of": ["m"]}, {"nodes": ["open"]}])
async def test_a_rerun_with_other_params_and_a_retry_of_batches_keep_the_items(
    harness: Harness, again: dict[str, Any]
) -> None:
    engine, items = await harness.engine(), Items()
    items.bad = {"b", "c"}
    await harness.worker({"items": items})
    nodes = [mapping("params.all", on_batch_failure={"max": 5}), node("open", "approval", "m")]
    task_id = await engine.create_task(params={"all": [*"abcd"]}, graph={"nodes": nodes})
    await harness.until_node(task_id, "open", "deferred", epoch=0)
    await engine.decide(task_id, "open", "approve")
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    items.bad = {"c"}
    await engine.rerun(task_id, params={"all": [*"uvwxyz"]}, **again)
    await harness.until_node(task_id, "open", "deferred", epoch=0)
    items.bad = set()
    before = await harness.node(task_id, "m")
    await engine.retry_batches(task_id, "m")
    await harness.until_node(task_id, "m", "finished", epoch=before["attempt_epoch"] + 2)
    await harness.until_node(task_id, "open", "deferred", epoch=0)
    await engine.decide(task_id, "open", "approve")
    assert (await harness.result(task_id)).failed_batches == {}
    assert items.seen == Counter("abcd")
    assert len(await harness.rows(task_id, "m")) == 4
