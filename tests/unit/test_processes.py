"""Each process of a pool runs one batch at a time, crashes without affecting others, and ends with its worker."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.integration.handlers import Cruncher
from tests.integration.harness import EVENT_TIMEOUT_SEC as TIMEOUT_SEC
from tests.unit.event_loop import let_other_tasks_run
from tests.unit.test_resources import pid_in, until_gone

from flowkit.activities.process_pool import ProcessDied, ProcessPool
from flowkit.core import loop_portal
from flowkit.masks import AttemptMask
from flowkit.worker import Batch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.slow


WORKER = '''
import asyncio, os, sys
from pathlib import Path
from types import SimpleNamespace
from flowkit.activities.process_pool import ProcessPool
from flowkit.masks import AttemptMask
from flowkit.worker import Batch, RoleHandler


class IgnoresCancel(RoleHandler):
    """Computes for ever once it has told its process id."""

    role = "ignores_cancel"

    def process_batch(self, batch, ctx):
        Path(batch.payload["tell"]).write_text(f"{os.getpid()}\\n")
        while True:
            pass


async def main():
    names = dict.fromkeys(("task_id", "node_id", "worker_id"), "x")
    given = dict(params={}, input_inline=None, input_ref=None, failed_nodes=[], generation=0, failures=0)
    given |= dict(kv={}, batch=Batch(), mask=AttemptMask(), scheduled_at=None)
    ctx = SimpleNamespace(**names, **given, attempt_epoch=1, cancel_flag=asyncio.Event())
    pool = ProcessPool({"ignores_cancel": IgnoresCancel()}, processes=1)
    await pool.process("ignores_cancel", Batch(batch_uid="b", payload={"tell": sys.argv[1]}), ctx)


if __name__ == "__main__":
    asyncio.run(main())
'''


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_busy_process_ends_with_its_worker(tmp_path: Path, how: signal.Signals) -> None:
    script, reported = tmp_path / "worker.py", tmp_path / "pid"
    script.write_text(WORKER, encoding="utf-8")
    worker = await asyncio.create_subprocess_exec(sys.executable, str(script), str(reported))
    try:
        computing = await pid_in(reported)
        worker.send_signal(how)
        await worker.wait()
        await until_gone(computing)
    finally:
        with suppress(ProcessLookupError):
            worker.kill()


# --- concurrent batches -------------------------------------------------------------------------------------------


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProcessPool]:
    """Two processes that run Crunchers, and can import the handler's module."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    made = ProcessPool({"cruncher": Cruncher()}, processes=2)
    yield made
    await made.close()


def context(epoch: int = 1) -> Any:
    """Return the part of a RunContext that the pool needs."""
    names = dict.fromkeys(("task_id", "node_id", "worker_id"), "x")
    given: dict[str, Any] = {"params": {"day": 1}, "input_inline": {"n": 2}, "input_ref": {"n": 3}}
    flag = asyncio.Event()
    return SimpleNamespace(
        **names,
        **given,
        attempt_epoch=epoch,
        failed_nodes=[],
        generation=0,
        failures=0,
        kv={},
        batch=Batch(),
        mask=AttemptMask(),
        scheduled_at=None,
        cancel_flag=flag,
    )


async def crunch(pool: ProcessPool, ctx: Any = None, **payload: Any) -> Any:
    """Return the result of one batch."""
    batch = Batch(batch_uid="b", payload=payload)
    return await asyncio.wait_for(pool.process("cruncher", batch, ctx or context()), TIMEOUT_SEC)


async def computing(pool: ProcessPool, tell: Path, ctx: Any) -> tuple[asyncio.Task[Any], int]:
    """Start a batch that runs until it is cancelled, and return it with its process."""
    given = Batch(batch_uid="b", payload={"until_cancelled": True, "tell": str(tell)})
    batch = asyncio.create_task(pool.process("cruncher", given, ctx))
    return batch, await pid_in(tell)


async def test_crashed_process_does_not_affect_other_batches(pool: ProcessPool, tmp_path: Path) -> None:
    ctx = context()
    neighbour, _ = await computing(pool, tmp_path / "pid", ctx)
    with pytest.raises(ProcessDied):
        await crunch(pool, die=True)
    assert (await crunch(pool)).success, "the process is replaced"
    assert not neighbour.done()
    ctx.cancel_flag.set()
    with pytest.raises(asyncio.CancelledError):
        await neighbour


async def test_process_is_reused_until_it_dies_while_idle_and_then_replaced_without_using_a_retry(
    pool: ProcessPool,
) -> None:
    one, *others = [(await crunch(pool)).metrics for _ in range(3)]
    assert one["given"] == [{"day": 1}, {"n": 2}, {"n": 3}], "it sees the params and the input of its node"
    assert {each["pid"] for each in others} == {one["pid"]}
    os.kill(one["pid"], signal.SIGKILL)
    await until_gone(one["pid"])
    assert (await crunch(pool)).metrics["pid"] != one["pid"]


async def test_cancelled_batch_ends_itself_although_a_signal_reaches_its_process(
    pool: ProcessPool, tmp_path: Path
) -> None:
    ctx = context()
    batch, pid = await computing(pool, tmp_path / "pid", ctx)
    os.kill(pid, signal.SIGTERM)  # as an init system sends it to all processes of a service
    batch.cancel()
    await let_other_tasks_run()
    assert not batch.done()
    ctx.cancel_flag.set()
    with pytest.raises(asyncio.CancelledError):
        await batch
    assert (await crunch(pool)).metrics["pid"] == pid, "it still runs"


async def test_process_of_an_abandoned_batch_is_killed_and_new_batches_do_not_inherit_a_cancel(
    pool: ProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_portal, "IGNORED_SEC", 0.05)
    contexts = [context(), context()]
    first, abandoned = await computing(pool, tmp_path / "first", contexts[0])
    loop_portal.cancel_until_done(first)
    await asyncio.wait([first])
    await until_gone(abandoned)
    second, _ = await computing(pool, tmp_path / "second", contexts[1])
    contexts[1].cancel_flag.set()
    assert (await crunch(pool)).success
    with pytest.raises(asyncio.CancelledError):
        await second
