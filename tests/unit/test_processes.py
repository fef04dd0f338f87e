"""The processes of a pool end with their worker, whatever ended it."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from tests.unit.test_resources import pid_in, until_gone

if TYPE_CHECKING:
    from pathlib import Path

WORKER = '''
import asyncio, os, sys
from pathlib import Path
from types import SimpleNamespace
from flowkit.activities.processes import ProcessPool
from flowkit.worker import Batch, RoleHandler


class Deaf(RoleHandler):
    """Computes for ever once it has told its process id."""

    role = "deaf"

    def process_batch(self, batch, ctx):
        Path(batch.payload["tell"]).write_text(f"{os.getpid()}\\n")
        while True:
            pass


async def main():
    names = dict.fromkeys(("task_id", "node_id", "worker_id"), "x")
    ctx = SimpleNamespace(**names, attempt_epoch=1, kv={}, cancel_flag=asyncio.Event())
    pool = ProcessPool({"deaf": Deaf()}, processes=1)
    await pool.process("deaf", Batch(batch_uid="b", payload={"tell": sys.argv[1]}), ctx)


if __name__ == "__main__":
    asyncio.run(main())
'''


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_a_process_that_computes_ends_with_its_worker(tmp_path: Path, how: signal.Signals) -> None:
    script, told = tmp_path / "worker.py", tmp_path / "pid"
    script.write_text(WORKER, encoding="utf-8")
    worker = await asyncio.create_subprocess_exec(sys.executable, str(script), str(told))
    computing = await pid_in(told)
    worker.send_signal(how)
    await worker.wait()
    await until_gone(computing)
