"""The pulling adapters as functions, on a database in memory."""

from __future__ import annotations

import asyncio
import inspect
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from tests.integration.harness import EVENT_TIMEOUT_SEC

from flowkit import WorkerConfig
from flowkit.activities.batches.puller import SourcesIdle
from flowkit.core.time import ManualClock
from flowkit.errors import BadInput
from flowkit.testing import memory_database
from flowkit.worker.input import pull_adapters
from flowkit.worker.input.pull_adapters import build_input_adapters

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PULL, RECHUNK = "pull.from_artifacts", "pull.from_artifacts.rechunk:size"
TASK = {"task_id": "t", "consumer_node": "sink"}


async def filled(*uids: str, complete: bool = True) -> Any:
    """Return a database in which the node `u` has written batches and, if requested, its marker."""
    db: Any = memory_database()
    for uid in uids:
        meta = {"skus": [f"{uid}-{number}" for number in range(3)]}
        await db.artifacts.insert_one(
            {
                "task_id": "t",
                "node_id": "u",
                "batch_uid": uid,
                "status": "partial",
                "meta": meta,
                "created_at": datetime.now(UTC),
            }
        )
    if complete:
        await db.artifacts.insert_one({"task_id": "t", "node_id": "u", "status": "complete"})
    return db


def test_both_adapters_are_async_generator_functions() -> None:
    adapters = build_input_adapters(db=memory_database(), clock=ManualClock(), cfg=WorkerConfig())
    assert set(adapters) == {PULL, RECHUNK}
    assert all(inspect.isasyncgenfunction(adapter) for adapter in adapters.values())


async def test_batches_are_delivered_unchanged_and_claimed() -> None:
    db = await filled("b1", "b2")
    pull = build_input_adapters(db=db)[PULL]
    batches = [batch async for batch in pull(**TASK, from_node="u", poll_ms=1)]
    assert [batch.batch_uid for batch in batches] == ["b1", "b2"]
    assert batches[0].payload == {
        "from_node": "u",
        "ref": {"task_id": "t", "node_id": "u", "batch_uid": "b1"},
        "meta": {"skus": ["b1-0", "b1-1", "b1-2"]},
    }
    assert await db.stream_progress.count_documents({"consumer_node": "sink"}) == 2


async def test_items_are_delivered_in_chunks_with_the_documented_ids() -> None:
    rechunk = build_input_adapters(db=await filled("b1"))[RECHUNK]
    batches = [batch async for batch in rechunk(**TASK, from_nodes=["u"], size=2, meta_list_key="skus")]
    assert [batch.payload["items"] for batch in batches] == [["b1-0", "b1-1"], ["b1-2"]]
    assert batches[0].batch_uid == "ad2b7bfd0ae8f741de96ce46937202d382868d69"


async def test_source_without_batches_is_not_an_error() -> None:
    pull = build_input_adapters(db=await filled())[PULL]
    assert [batch async for batch in pull(**TASK, from_nodes=["u"])] == []


async def test_cancel_flag_ends_the_wait_for_more_batches() -> None:
    flag = asyncio.Event()
    pull = build_input_adapters(db=await filled("b1", complete=False))[PULL]
    uids = []
    async with asyncio.timeout(EVENT_TIMEOUT_SEC):
        async for batch in pull(**TASK, from_nodes=["u"], cancel_flag=flag):
            uids.append(batch.batch_uid)
            flag.set()
    assert uids == ["b1"]


async def test_idle_sources_are_awaited_and_no_batch_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Sleepy:
        """Becomes idle once, and then starts again from the beginning."""

        begun = 0

        def __init__(self, **_: Any) -> None:
            Sleepy.begun += 1

        async def batches(self) -> AsyncIterator[tuple[str, dict[str, str]]]:
            yield "a", {"from_node": "u"}
            if Sleepy.begun == 1:
                raise SourcesIdle
            yield "b", {"from_node": "u"}

    monkeypatch.setattr(pull_adapters, "Puller", Sleepy)
    pull = build_input_adapters(db=memory_database())[PULL]
    assert [batch.batch_uid async for batch in pull(**TASK, from_nodes=["u"])] == ["a", "b"]


@pytest.mark.parametrize(
    ("adapter", "args"),
    [
        (PULL, {}),
        (PULL, {"from_nodes": "u"}),
        (PULL, {"from_nodes": ["u"], "size": 3}),
        (RECHUNK, {"from_nodes": ["u"]}),
        (RECHUNK, {"from_nodes": ["u"], "size": 0}),
        (RECHUNK, {"from_nodes": ["u"], "size": 3}),
    ],
)
async def test_invalid_arguments_are_rejected(adapter: str, args: dict[str, Any]) -> None:
    strict = WorkerConfig(strict_input_adapters=True)
    with pytest.raises(BadInput):
        await anext(build_input_adapters(db=memory_database(), cfg=strict)[adapter](**TASK, **args))
