"""Writes that an attempt makes at the same time: all end, then one error is raised."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.event_loop import let_other_tasks_run

from flowkit.adapters.mongo import gather_writes
from flowkit.errors import Fenced, StoreUnavailable

OUTAGE, FENCED = StoreUnavailable("MongoDB is unavailable"), Fenced("replaced")


async def ends(error: Exception | None = None) -> None:
    if error is not None:
        raise error


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        ((OUTAGE, FENCED), FENCED),
        ((FENCED, OUTAGE), FENCED),
        ((OUTAGE, None), OUTAGE),
        ((None, OUTAGE), OUTAGE),
        ((FENCED,), FENCED),
    ],
)
async def test_permanent_error_is_raised_rather_than_an_outage(
    errors: tuple[Exception | None, ...], raised: Exception
) -> None:
    with pytest.raises(type(raised)) as caught:
        await gather_writes(*(ends(error) for error in errors))
    assert caught.value is raised


async def test_writes_end_without_an_error() -> None:
    await gather_writes(ends(), ends(), ends())
    await gather_writes(ends())


@pytest.mark.parametrize("failing_first", [True, False])
async def test_error_is_raised_when_all_writes_have_ended(*, failing_first: bool) -> None:
    may_end, written = asyncio.Event(), []

    async def slow() -> None:
        await may_end.wait()
        written.append("slow")

    writes = [ends(FENCED), slow()] if failing_first else [slow(), ends(FENCED)]
    gathered = asyncio.ensure_future(gather_writes(*writes))
    await let_other_tasks_run()
    assert not gathered.done()
    may_end.set()
    with pytest.raises(Fenced):
        await gathered
    assert written == ["slow"]


@pytest.mark.parametrize("first_ends", [True, False])
async def test_cancel_reaches_all_writes(*, first_ends: bool) -> None:
    cancelled = []

    async def waits(name: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(name)
            raise

    gathered = asyncio.ensure_future(gather_writes(ends() if first_ends else waits("a"), waits("b")))
    await let_other_tasks_run()
    gathered.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gathered
    assert cancelled == (["b"] if first_ends else ["a", "b"])
