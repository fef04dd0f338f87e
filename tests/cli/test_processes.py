"""`flowkit engine --processes` and `flowkit worker --processes` on real servers."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, node

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.harness import Harness

pytestmark = pytest.mark.server


@pytest.mark.slow(25)
async def test_several_engines_and_workers_of_one_command_run_a_task_and_stop_together(
    harness: Harness, tmp_path: Path
) -> None:
    settings = tmp_path / "settings.json"
    settings.write_text('{"worker_id": "quick"}', encoding="utf-8")
    quick = "tests.integration.handlers:Quick"
    processes = [
        harness.process("engine", "--processes", "2"),
        harness.process("worker", quick, "--processes", "2", "--config", str(settings)),
    ]

    async def registered() -> bool:
        workers = [worker["worker_id"] async for worker in harness.db.worker_registry.find()]
        return sorted(workers) == ["quick-1", "quick-2"]

    await eventually(registered)
    task_id = await harness.create(*(node(f"n{number}") for number in range(6)))
    assert (await harness.result(task_id)).status == "finished"
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        assert await asyncio.to_thread(process.wait, EVENT_TIMEOUT_SEC) == 0
