"""Handlers that return text that cannot be encoded, and handlers whose thread never ends."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from flowkit import WorkerConfig
from flowkit.worker import Batch, BatchResult, RoleHandler, Worker
from tests.integration.handlers import Quick
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, node

if TYPE_CHECKING:
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

ONCE: dict[str, Any] = {"retry_policy": {"max": 0}}
HALF_A_CHARACTER = "half a character: \ud83d"


class UnencodableFailure(Quick):
    """Fails with an unpaired surrogate, in one of the ways in which a handler can fail."""

    role = "odd"

    async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
        match batch.payload["how"]:
            case "value error":
                raise ValueError(HALF_A_CHARACTER)
            case "result":
                return BatchResult(
                    success=False, reason_code=HALF_A_CHARACTER, error=HALF_A_CHARACTER, permanent=True
                )
            case _:
                raise ConnectionError(HALF_A_CHARACTER)


@pytest.mark.parametrize(
    ("how", "reported"),
    [
        ("value error", "bad_input: ValueError: half a character: \\ud83d"),
        ("result", "half a character: \\ud83d"),
        ("other error", "unexpected_error: ConnectionError: half a character: \\ud83d"),
    ],
)
async def test_failure_with_unencodable_text_keeps_its_code(
    harness: Harness, how: str, reported: str
) -> None:
    await harness.engine()
    await harness.worker({"odd": UnencodableFailure()})
    task_id = await harness.create(node("a", "odd", inline={"how": how}, **ONCE))
    document = await harness.until_status(task_id, "failed")
    failed = document["graph"]["nodes"][0]
    assert failed["last_error"].startswith(reported)
    assert failed["attempt_epoch"] == 1


async def test_function_error_with_unencodable_text_keeps_its_code(harness: Harness) -> None:
    async def odd(task_id: str) -> None:
        raise RuntimeError(HALF_A_CHARACTER)

    await harness.engine(odd=odd)
    task_id = await harness.create(node("a", "coordinator_fn", io={"fn": "odd"}, **ONCE))
    document = await harness.until_status(task_id, "failed")
    failed = document["graph"]["nodes"][0]
    assert failed["last_error"].startswith("unexpected_error: RuntimeError: half a character: \\ud83d")


class Stuck(RoleHandler):
    """Blocks its thread until the test releases it; the next node is quick."""

    role = "stuck"

    def __init__(self) -> None:
        self.released = threading.Event()

    def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
        if batch.payload["input_inline"].get("stuck"):
            self.released.wait(EVENT_TIMEOUT_SEC)
        return BatchResult(success=True)


async def test_abandoned_blocking_hook_frees_its_slot_and_is_reported(harness: Harness) -> None:
    harness.settings["cancel_grace_sec"] = 0.2
    await harness.engine()
    handler = Stuck()
    cfg = WorkerConfig(roles=["stuck"], queue=harness.queue, max_concurrent=1, announce_interval_sec=0.2)
    worker = Worker(db=harness.db, cfg=cfg, handlers={"stuck": handler})
    await worker.start()

    async def abandoned_threads() -> int:
        row: Any = await harness.db.worker_registry.find_one({"worker_id": worker.worker_id})
        return int(row["leaked_threads"])

    async def one_thread_is_abandoned() -> bool:
        return await abandoned_threads() == 1

    async def no_thread_is_abandoned() -> bool:
        return await abandoned_threads() == 0

    stuck = await harness.create(node("a", "stuck", inline={"stuck": True}))
    await harness.until_node(stuck, "a", "running")
    assert await abandoned_threads() == 0
    await harness.coordinator.cancel_task(stuck)
    await harness.until_status(stuck, "cancelled")
    await eventually(one_thread_is_abandoned)
    later = await harness.create(node("a", "stuck", inline={}))
    await harness.result(later)
    handler.released.set()
    await eventually(no_thread_is_abandoned)
    await worker.stop()
