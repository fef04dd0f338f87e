"""What handlers log is kept with their attempt: which lines, in which order, and of which attempt."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.observe.log_reading import HandlerLogReader
from flowkit.testing import memory_database, run_graph
from flowkit.worker import Batch, BatchResult, RoleHandler
from tests.integration.harness import node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowkit.products import KeptLine

SHOP = logging.getLogger("shop")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    root.setLevel(logging.INFO)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


async def read(db: Any, task_id: str, node_id: str | None = None, **options: Any) -> list[KeptLine]:
    """Return all lines that are kept now."""
    found: list[KeptLine] = []
    async for lines in HandlerLogReader(db).lines(task_id, node_id, **options):
        if not lines:
            return found
        found += lines
    return found


class Talking(RoleHandler):
    """Logs in each of its hooks."""

    role = "talking"

    def init(self, info: dict[str, Any]) -> None:
        """Log on a thread."""
        SHOP.info("begins on a thread")

    async def iter_batches(self, loaded: Any) -> Any:
        """Yield two batches."""
        for number in range(2):
            yield Batch(batch_uid=f"b{number}", payload={})

    async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
        """Log by all ways."""
        SHOP.debug("not kept")
        SHOP.warning("slow page %d", 3)
        ctx.log.info("page read", page=3, password="hunter2")
        worker = threading.Thread(target=lambda: ctx.log.info("from a thread of the handler"))
        worker.start()
        await asyncio.to_thread(worker.join)
        return BatchResult(success=True, metrics={"n": 1})


async def test_lines_of_all_hooks_are_kept_with_their_batch() -> None:
    db = memory_database()
    run = await run_graph({"nodes": [node("a", "talking")]}, Talking(), db=db)
    lines = await read(db, run.task_id)
    assert [(each.level, each.logger, each.text, each.batch_uid) for each in lines[:4]] == [
        ("INFO", "shop", "begins on a thread", ""),
        ("WARNING", "shop", "slow page 3", "b0"),
        ("INFO", "flowkit.handler", 'page read  page=3 password="(hidden)"', "b0"),
        ("INFO", "flowkit.handler", "from a thread of the handler", ""),
    ]
    assert len(lines) == 7
    assert {(each.node_id, each.attempt, each.left_out) for each in lines} == {("a", 1, 0)}
