"""`run_graph` with nodes that start on the first batch of a parent."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.testing import run_graph
from flowkit.worker import Batch, BatchResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.testing import GraphRun
    from flowkit.worker.context import RunContext

PULL = {"input_inline": {"input_adapter": "pull.from_artifacts", "input_args": {"poll_ms": 50}}}
FIRST = {**PULL, "start_when": "first_batch"}


class Source(RoleHandler):
    """Stores a batch, and the rest only after the other node has processed a batch."""

    role = "source"

    def __init__(self) -> None:
        self.processed = asyncio.Event()
        self.fails = False

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield three batches."""
        for number in range(3):
            yield Batch(batch_uid=f"b{number}", payload={"number": number})

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the number of the batch. At the last one, fail if that is wanted."""
        number = batch.payload["number"]
        if number > 0:
            await self.processed.wait()
        if self.fails and number == 2:
            return BatchResult(success=False, reason_code="torn", permanent=True)
        return BatchResult(success=True, metrics={"n": number})


class Sink(RoleHandler):
    """Counts the batches that it pulls."""

    role = "sink"

    def __init__(self, source: Source) -> None:
        self._source = source

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Let the source continue."""
        self._source.processed.set()
        return BatchResult(success=True, metrics={"n": batch.payload["meta"]["n"]})


async def ran(*nodes: dict[str, Any], fails: bool = False, **graph: Any) -> GraphRun:
    """Return the outcome of a graph."""
    source = Source()
    source.fails = fails
    wanted = {"nodes": [*nodes], **graph}
    return await asyncio.wait_for(run_graph(wanted, source, Sink(source)), 30)


def node(node_id: str, role: str, *parents: str, **fields: Any) -> dict[str, Any]:
    """Return a node."""
    return {"node_id": node_id, "type": role, "depends_on": [*parents], **fields}


def numbers(run: GraphRun, node_id: str) -> list[int]:
    """Return the numbers of the batches that a node has processed."""
    return sorted(batch["n"] for batch in run.nodes[node_id].batches)


async def test_child_processes_batches_of_a_parent_that_still_runs() -> None:
    run = await ran(node("a", "source"), node("b", "sink", "a", io=FIRST))
    assert run.status == "finished"
    assert numbers(run, "b") == [0, 1, 2]
    assert [run.nodes[name].attempts for name in "ab"] == [1, 1]


async def test_streaming_logs_no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    await ran(node("a", "source"), node("b", "sink", "a", io=FIRST))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_async_edge_lets_its_child_start_on_a_batch() -> None:
    edges = [{"from": "a", "to": "b", "mode": "async"}]
    run = await ran(node("a", "source"), node("b", "sink", io=PULL), edges_ex=edges)
    assert numbers(run, "b") == [0, 1, 2]


@pytest.mark.parametrize("tolerant", [False, True])
async def test_child_of_a_parent_that_fails_for_good_drains_and_fails_unless_tolerated(
    tolerant: bool,
) -> None:
    nodes = [node("a", "source", allow_failure=tolerant), node("b", "sink", "a", io=FIRST)]
    run = await ran(*nodes, fails=True, on_node_failure="continue")
    assert (run.nodes["a"].status, numbers(run, "b")) == ("failed", [0, 1])
    assert run.nodes["b"].status == ("finished" if tolerant else "failed")
    if not tolerant:
        assert run.nodes["b"].error == (
            "upstream_failed: the node has processed the batches of its parents, but a parent failed later"
        )
        document = await run.db.tasks.find_one({"id": run.task_id})
        assert [each["status"] for each in document["graph"]["nodes"]] == ["failed", "failed"]


class Unread(RoleHandler):
    """Has no batches of its own."""

    role = "unread"


class Reading(Unread):
    """Yields its own batches."""

    role = "reading"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield one batch."""
        yield Batch(batch_uid="own", payload={})


NOTHING = {"input_inline": {"input_adapter": "noop"}}
ASYNC = {"edges_ex": [{"from": "p", "to": "c", "mode": "async"}]}


@pytest.mark.parametrize(
    ("role", "child", "graph", "status"),
    [
        ("unread", {"io": {"start_when": "first_batch"}, "depends_on": ["p"]}, {}, "failed"),
        ("unread", {}, ASYNC, "failed"),
        ("reading", {"io": {"start_when": "first_batch"}, "depends_on": ["p"]}, {}, "finished"),
        ("unread", {"io": {**NOTHING, "start_when": "first_batch"}, "depends_on": ["p"]}, {}, "finished"),
        ("unread", {"depends_on": ["p"]}, {}, "finished"),
    ],
    ids=["first batch", "async edge", "own batches", "needs nothing", "after its parent"],
)
async def test_node_that_starts_on_a_batch_must_read_batches(
    role: str, child: dict[str, Any], graph: dict[str, Any], status: str
) -> None:
    nodes = [{"node_id": "p", "type": "reading"}, {"node_id": "c", "type": role, **child}]
    run = await run_graph({"nodes": nodes, **graph}, Unread(), Reading())
    assert run.status == status, run.reason
    if status == "failed":
        assert run.nodes["c"].attempts == 1
        assert (run.nodes["c"].error or "").startswith(
            "bad_input: the node starts on the first batch of its parents"
        )
