"""Lines are followed in the order in which MongoDB stores them, and not by the clocks of those who write them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.contract.builders import attempt

from flowkit.observe.log_reading import HandlerLogReader
from flowkit.observe.log_store import LogStore


async def store_row(db: Any, log: str, row: int, after_sec: float, text: str, *, first: int = 1) -> None:
    """Store a document with one line, as a worker does whose clock is `after_sec` seconds ahead."""
    at = datetime.now(UTC) + timedelta(seconds=after_sec)
    own = attempt()
    await LogStore(db).append(
        [
            {
                "_id": f"{log * 4}-{row:08d}",
                "task_id": own.task_id,
                "node_id": own.node_id,
                "attempt_epoch": own.epoch,
                "shard": 0,
                "worker_id": log,
                "at": at,
                "until": at,
                "lines": [{"n": first, "at": at, "level": 20, "logger": "shop", "text": text}],
            }
        ]
    )


@pytest.mark.parametrize("by_page", [False, True])
async def test_lines_of_workers_whose_clocks_or_outages_differ_are_followed(db: Any, by_page: bool) -> None:
    """One worker is an hour slow, one is an hour fast, and the lines of one waited ten minutes for MongoDB."""
    reader, own = HandlerLogReader(db), attempt()
    found, cursor = reader.lines(own.task_id), ""

    async def now() -> list[str]:
        nonlocal cursor
        if by_page:
            page = await reader.page(own.task_id, own.node_id, own.epoch, after=cursor)
            cursor = page.end
            return [each.text for each in page.lines]
        texts: list[str] = []
        async for lines in found:
            if not lines:
                break
            texts += [each.text for each in lines]
        return texts

    await LogStore(db).prepare()
    await store_row(db, "aaaa", 1, 3_600, "fast 1")
    assert await now() == ["fast 1"]
    await store_row(db, "bbbb", 1, -3_600, "slow 1")
    await store_row(db, "cccc", 1, 0, "began")
    assert await now() == ["slow 1", "began"]
    await store_row(db, "aaaa", 2, 3_600, "fast 2", first=2)
    assert await now() == ["fast 2"]
    await store_row(db, "cccc", 2, -600, "ERROR while MongoDB was away", first=2)
    await store_row(db, "bbbb", 2, -3_600, "slow 2", first=2)
    assert await now() == ["slow 2", "ERROR while MongoDB was away"]
    await store_row(db, "cccc", 2, 0, "tried again", first=2)
    assert await now() == []
