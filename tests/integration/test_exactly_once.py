"""Many increments, each counted once, while functions fail after their write and engines are killed."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.models import TaskStatus
from tests.integration.harness import EVENT_TIMEOUT_SEC, Harness, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.server

LARGE = bool(os.environ.get("FLOWKIT_LARGE"))
"""`make large` sets it, for a thousand increments."""
TASKS, SEQUENTIAL, PARALLEL = 50 if LARGE else 8, 10, 10
INCREMENTS = TASKS * (SEQUENTIAL + PARALLEL)
TARGETS = (INCREMENTS // 5, INCREMENTS // 2, None) if LARGE else (INCREMENTS // 3, None)
"""The sums at which the engine is killed; the last engine stays."""
TIMEOUT_SEC = 200.0


def increment(node_id: str, *parents: str) -> dict[str, Any]:
    """Return a node that adds 1, with a retry budget for several failures."""
    return {
        "node_id": node_id,
        "type": "coordinator_fn",
        "depends_on": list(parents),
        "io": {"fn": "vars.incr", "fn_args": {"key": "count.n"}},
        "retry_policy": {"max": 30, "backoff_sec": 0.1},
    }


def increments() -> list[dict[str, Any]]:
    """Return nodes in a row, which use local activities, and then concurrent nodes, which do not."""
    row = [increment(f"r{i}", *([f"r{i - 1}"] if i else [])) for i in range(SEQUENTIAL)]
    return [*row, *(increment(f"b{i}", f"r{SEQUENTIAL - 1}") for i in range(PARALLEL))]


async def counted(harness: Harness) -> int:
    """Return the sum of all increments."""
    shown = {"coordinator.vars.count.n": 1}
    found = [task async for task in harness.db.tasks.find({}, shown)]
    return sum(task["coordinator"].get("vars", {}).get("count", {}).get("n", 0) for task in found)


@contextmanager
def flaky_engine(harness: Harness, seed: str) -> Iterator[None]:
    """Start a flaky engine, which is killed at the end."""
    process = harness.process(
        seed, module="tests.integration.flaky_engine", ENGINE_SETTINGS=harness.config_json()
    )
    try:
        yield
    finally:
        process.kill()
        process.wait(EVENT_TIMEOUT_SEC)


@pytest.mark.slow(25)
@pytest.mark.timeout(TIMEOUT_SEC + 40)
async def test_increments_take_effect_once_each(harness: Harness, capsys: pytest.CaptureFixture[str]) -> None:
    seed = os.environ.get("FLOWKIT_SEED") or str(time.time_ns())
    harness.settings["lease_ttl_sec"] = 6
    begun = time.monotonic()
    nodes = increments()
    tasks = await asyncio.gather(*(harness.create(*nodes) for _ in range(TASKS)))
    for number, target in enumerate(TARGETS):
        with flaky_engine(harness, f"{seed}-{number}"):
            if target is not None:
                await eventually(partial(reached, harness, target), timeout_sec=TIMEOUT_SEC)
                continue
            ends = [(await harness.handle(task)).result() for task in tasks]
            results = await asyncio.wait_for(asyncio.gather(*ends), TIMEOUT_SEC)
    documents = [await harness.document(task) for task in tasks]
    again = sum(node["attempt_epoch"] - 1 for document in documents for node in document["graph"]["nodes"])
    with capsys.disabled():
        seconds = time.monotonic() - begun
        sys.stdout.write(
            f"\n  {INCREMENTS} increments of {TASKS} tasks, {len(TARGETS) - 1} engines killed, "
            f"{again} further attempts, "
            f"{await counted(harness)} counted, {seconds:.0f} s, seed {seed}"
        )
    assert {result.status for result in results} == {TaskStatus.FINISHED}
    assert {document["coordinator"]["vars"]["count"]["n"] for document in documents} == {len(nodes)}
    assert again > INCREMENTS * 0.03


async def reached(harness: Harness, least: int) -> bool:
    """Return whether the sum has reached this number."""
    return await counted(harness) >= least
