"""Backfills await the ends of tasks with one query for all of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from flowkit.backfills.ends import TaskEnds
from flowkit.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Collection


async def test_all_who_wait_share_one_query_which_an_outage_only_delays() -> None:
    asked: list[set[str]] = []

    async def find_ended(task_ids: Collection[str]) -> Collection[str]:
        asked.append({*task_ids})
        if len(asked) == 1:
            raise StoreUnavailable("away")
        return {"a", "b"} & asked[-1]

    ends = TaskEnds(find_ended)
    await asyncio.gather(ends.wait("a", 60), ends.wait("b", 60), ends.wait("a", 60))
    assert asked == [{"a", "b"}, {"a", "b"}]


async def test_a_task_without_an_end_is_given_back_after_the_longest_wait() -> None:
    async def find_ended(task_ids: Collection[str]) -> Collection[str]:
        return ()

    await TaskEnds(find_ended).wait("a", 0.01)
