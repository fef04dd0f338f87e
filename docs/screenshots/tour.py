"""Run the graph of the guide `howto/all-features.md`, and take a screenshot at each of its stages."""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motor.motor_asyncio import AsyncIOMotorClient

from flowkit import Coordinator, CoordinatorConfig
from flowkit.connection import connect
from screenshots.states import DATABASE, TIMEOUT_SEC, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from screenshots.browser import WebUI

PAGE = Path(__file__).parents[1] / "howto" / "all-features.md"
TASK = "tour"
QUEUE = "tour"
_FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)


async def tour(ui: WebUI, mongo_url: str, folder: Path) -> None:
    """Take the screenshots of the guide. `folder` is empty."""
    for name, text in _FILE.findall(PAGE.read_text(encoding="utf-8")):
        (folder / name).write_text(text, encoding="utf-8")
    async with (
        _flowkit(folder, "engine", "--config", "engine.json"),
        _flowkit(folder, "worker", "tour:flow", "--concurrency", "4"),
    ):
        mongo: Any = AsyncIOMotorClient(mongo_url, tz_aware=True)
        try:
            await _take(ui, Coordinator(db=mongo[DATABASE], cfg=CoordinatorConfig(queue=QUEUE)), folder)
        finally:
            mongo.close()


async def _take(ui: WebUI, client: Coordinator, folder: Path) -> None:
    await runpy.run_path(str(folder / "tour.py"))["flow"].submit(client, task_id=TASK)
    task = (await connect()).get_workflow_handle(TASK)

    async def shows(node_id: str, field: str) -> bool:
        return any(
            node["node_id"] == node_id and node.get(field) for node in (await task.query("status"))["nodes"]
        )

    await wait_until(lambda: shows("previews", "waits_for"))
    await ui.details("tour-half-way", TASK, "waits for a slot")
    (folder / "go").touch()
    await wait_until(lambda: shows("mail", "skip_reason"))
    await ui.details("tour-routed", TASK, "dead_links")
    await client.wait(TASK, timeout=TIMEOUT_SEC)
    await ui.details("tour-finished", TASK, "deadline_exceeded")


@asynccontextmanager
async def _flowkit(folder: Path, *arguments: str) -> AsyncIterator[None]:
    """Run a `flowkit` process in a folder until the end of the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "flowkit", *arguments, "--queue", QUEUE),
        cwd=folder,
        env={**os.environ, "MONGO_DATABASE": DATABASE},
    )
    try:
        yield
    finally:
        process.terminate()
        await process.wait()
