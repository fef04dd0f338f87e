"""The pulling attempts of a process stay within their memory budget for batches, whatever the sizes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import bson
import pytest
from tests.contract.builders import AT, TASK, WORKER, attempt
from tests.contract.pulling_node import Pull, end
from tests.integration.harness import EVENT_TIMEOUT_SEC as TIMEOUT_SEC
from tests.unit.event_loop import let_other_tasks_run

from flowkit.activities.batches.puller import ByteBudget
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.entries import Entry, fitting

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from flowkit.activities.batches.puller import Puller

LIMIT = 100_000
READERS = 4
GROWING = [500, 2_000, 8_000, 24_000, 24_000, 60_000, 1_000, 90_000, *([4_000] * 30)]


def size_of(meta: Any) -> int:
    return len(bson.encode(meta))


class Measured(ArtifactStore):
    """Measures how many bytes of metas were read and are still in use."""

    def __init__(self, db: Any) -> None:
        super().__init__(db)
        self.held = self.most = self.reads = 0
        self.before_read: list[Callable[[], Awaitable[None]]] = []

    async def metas(
        self, task_id: str, node_id: str, page: Sequence[Entry], first_epoch: int = 0
    ) -> list[dict[str, Any]]:
        if self.before_read:
            await self.before_read.pop()()
        found = await super().metas(task_id, node_id, page, first_epoch)
        self.reads += 1
        self.held += sum(size_of(partial["meta"]) for partial in found)
        self.most = max(self.most, self.held)
        return found


@pytest.fixture
async def artifacts(db: Any) -> Measured:
    store = Measured(db)
    await store.prepare()
    return store


async def source(artifacts: Measured, *sizes: int) -> None:
    """`u` has ended with a batch of each of these sizes."""
    for number, size in enumerate(sizes):
        meta = {"text": "x" * (size - size_of({"text": ""}))}
        await artifacts.upsert_partial(attempt("u"), f"b{number:02}", meta, WORKER, AT + number)
    await end(artifacts, "u")


async def consume(artifacts: Measured, puller: Puller) -> list[str]:
    """Hold each batch for a while, and return the uids."""
    uids = []
    async for uid, payload in puller.batches():
        uids.append(uid)
        for _ in range(3):
            await let_other_tasks_run()
        artifacts.held -= size_of(payload["meta"])
    return uids


async def all_readers(artifacts: Measured, pull: Pull) -> list[list[str]]:
    budget = ByteBudget(LIMIT, READERS)
    readers = [consume(artifacts, pull.puller("u", budget=budget)) for _ in range(READERS)]
    return await asyncio.wait_for(asyncio.gather(*readers), TIMEOUT_SEC)


async def test_growing_batches_never_exceed_the_budget(artifacts: Measured, pull: Pull) -> None:
    await source(artifacts, *GROWING)
    uids = [f"b{number:02}" for number in range(len(GROWING))]
    assert await all_readers(artifacts, pull) == [uids] * READERS
    assert artifacts.most <= LIMIT
    assert artifacts.reads < READERS * len(GROWING), "small ones are read together"


async def test_batches_of_unknown_size_never_exceed_the_budget(
    db: Any, artifacts: Measured, pull: Pull
) -> None:
    """Batches of other programs and of an earlier release."""
    await source(artifacts, *GROWING[:12])
    await db.artifacts.update_many({}, {"$unset": {"size": ""}})
    assert [len(uids) for uids in await all_readers(artifacts, pull)] == [12] * READERS
    assert artifacts.most <= LIMIT


async def test_batch_that_grows_before_it_is_read_is_reserved_with_its_new_size(
    artifacts: Measured, pull: Pull
) -> None:
    async def grow() -> None:
        again = {"text": "x" * 30_000}
        for uid in ("b00", "b02"):
            await artifacts.upsert_partial(attempt("u", epoch=2), uid, again, WORKER, AT)

    await source(artifacts, 10, 20, 30)
    artifacts.before_read.append(grow)
    budget = ByteBudget(40_000, 1)
    got = await asyncio.wait_for(consume(artifacts, pull.puller("u", budget=budget)), TIMEOUT_SEC)
    assert sorted(got) == ["b00", "b01", "b02"]
    assert artifacts.most <= 40_000


async def test_an_input_that_is_closed_frees_its_budget_before_anything_else_runs(
    artifacts: Measured, pull: Pull
) -> None:
    await source(artifacts, 10_000, 20_000)
    budget = ByteBudget(40_000, 1)
    batches = pull.puller("u", budget=budget).batches()
    await anext(batches)
    await batches.aclose()
    hold = budget.hold(40_000).__aenter__()
    with pytest.raises(StopIteration):
        hold.send(None)


async def test_batch_larger_than_the_budget_is_delivered_alone(artifacts: Measured, pull: Pull) -> None:
    await source(artifacts, 1_000, 3 * LIMIT, 1_000)
    assert [len(uids) for uids in await all_readers(artifacts, pull)] == [3] * READERS
    assert artifacts.most <= 3 * LIMIT


async def test_completed_batches_are_not_read_again(artifacts: Measured, pull: Pull) -> None:
    await source(artifacts, *([1_000] * 50))
    for number in range(49):
        await artifacts.store_batch(attempt("sink"), f"b{number:02}", {"n": 1}, WORKER, AT)
    got = await asyncio.wait_for(consume(artifacts, pull.puller("u", epoch=2)), TIMEOUT_SEC)
    assert (got, artifacts.most) == (["b49"], 1_000)


async def test_pages_of_own_batches_are_also_bounded(artifacts: Measured) -> None:
    await source(artifacts, *([7_000_000] * 3))
    pages = [[partial["batch_uid"] for partial in page] async for page in artifacts.pages(TASK, "u")]
    assert pages == [["b00", "b01"], ["b02"]]


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ([10], 1),
        ([200], 1),
        ([None], 1),
        ([None, 10], 1),
        ([10, None], 1),
        ([50, 50, 1], 2),
        ([50, 51], 1),
        ([0] * 50, 20),
        ([10] * 9, 9),
    ],
)
def test_as_many_batches_are_read_together_as_fit(sizes: list[int | None], count: int) -> None:
    assert fitting([Entry("b", size) for size in sizes], 100) == count
