"""Handlers and checks for tests of streaming: parents that wait for their test, and children that record
what they read."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from flowkit.worker import Batch, BatchResult
from tests.integration.handlers import Quick
from tests.integration.harness import node

if TYPE_CHECKING:
    from flowkit.worker.context import RunContext
    from tests.integration.harness import Harness

PULL = {"input_adapter": "pull.from_artifacts", "input_args": {"poll_ms": 50, "backoff_max_ms": 200}}
SOON = {"max": 3, "backoff_sec": 0.1}


class Source(Quick):
    """Stores numbered batches. Waits for `gates[node]` before the batch `hold_at`, and fails as its node says."""

    role = "source"

    def __init__(self) -> None:
        self.gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait, fail, or return one metrics row."""
        given, number = batch.payload, (batch.payload.get("meta") or batch.payload)["number"]
        if number == given.get("hold_at", 1):
            await ctx.cancellable(self.gates[ctx.node_id].wait())
        if number == given.get("fail_at") and ctx.attempt_epoch <= given.get("failures", 1):
            permanent = given.get("permanent", False)
            return BatchResult(success=False, reason_code="torn", error="as ordered", permanent=permanent)
        return await super().process_batch(batch, ctx)


class Sink(Quick):
    """Passes the batches that it pulls on, and records their numbers by node. Fails once, at the batch `fail_at`."""

    role = "sink"

    def __init__(self, fail_at: int | None = None) -> None:
        self.read: defaultdict[str, list[int]] = defaultdict(list)
        self._fail_at = fail_at

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the number of the batch."""
        number = batch.payload["meta"]["number"]
        self.read[ctx.node_id].append(number)
        if number == self._fail_at and ctx.attempt_epoch == 1:
            raise ConnectionError("the target broke")
        return BatchResult(success=True, metrics={"n": 1, "number": number})


def streaming(node_id: str, role: str, *parents: str, **fields: Any) -> dict[str, Any]:
    """Return a node that pulls, and starts on the first batch of any parent."""
    inline = fields.pop("inline", PULL)
    io = {"input_inline": inline, "start_when": "first_batch"}
    return {**node(node_id, role, *parents, retry_policy=SOON, **fields), "io": io}


def source(node_id: str = "a", batches: int = 5, *, role: str = "source", **inline: Any) -> dict[str, Any]:
    """Return a node of the role `source`."""
    return node(node_id, role, inline={"batches": batches, **inline}, retry_policy=SOON)


async def assert_exact(harness: Harness, task_id: str, node_id: str, batches: int, sources: int = 1) -> None:
    """Check that the node has stored one result for each batch of its sources."""
    rows = await harness.rows(task_id, node_id)
    assert set(Counter(row["batch_uid"] for row in rows).values()) == ({1} if batches else set())
    expected = Counter({number: sources for number in range(batches)})
    assert Counter(row["metrics"]["number"] for row in rows) == expected
    artifacts = {"task_id": task_id, "node_id": node_id, "status": "partial"}
    assert await harness.db.artifacts.count_documents(artifacts) == batches * sources


def signals(history: Any) -> list[str]:
    """Return the names of the signals in the history of a run."""
    received = [event.workflow_execution_signaled_event_attributes for event in history.events]
    return [signal.signal_name for signal in received if signal.signal_name]
