"""Engines and workers as child processes: ready when they poll, and stopped with all their children."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from tests.integration.conftest import harness
from tests.integration.harness import ROOT, eventually, node
from tests.local.processes import descendants, stdout_of, still_running, wait_until

from flowkit.local.errors import ProcessMisused
from flowkit.local.process import engine_process, start_all, stop_all, worker_processes

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

    from tests.integration.harness import Harness

__all__ = ["harness"]


@pytest.mark.slow
@pytest.mark.server
async def test_an_engine_and_workers_start_together_and_run_a_task(harness: Harness, tmp_path: Path) -> None:
    one, *two = processes = [
        engine_process(tmp_path, environment=harness.environment),
        *worker_processes(
            tmp_path, ["tests.integration.handlers:Quick"], count=2, environment=harness.environment
        ),
    ]
    start_all(processes)
    try:
        assert one.summary == f"engine polls queue {harness.queue}"
        assert [worker.name for worker in two] == ["worker-1", "worker-2"]
        assert {worker.summary for worker in two} == {f"worker runs quick on queue {harness.queue}"}
        assert (await harness.result(await harness.create(node("a")))).status == "finished"
    finally:
        stop_all(processes)
    assert [process.exit_code for process in processes] == [0, 0, 0]


@pytest.mark.server
async def test_an_engine_hosts_roles_without_a_worker(harness: Harness, tmp_path: Path) -> None:
    engine = engine_process(
        tmp_path, roles=["tests.integration.handlers:InlineQuick"], environment=harness.environment
    )
    start_all([engine])
    try:
        assert engine.summary == f"engine polls queue {harness.queue} and hosts inline"
        assert (await harness.result(await harness.create(node("a", "inline")))).status == "finished"
    finally:
        stop_all([engine])
    assert engine.exit_code == 0


@pytest.mark.server
async def test_a_function_that_does_not_exist_is_a_usage_error(harness: Harness, tmp_path: Path) -> None:
    wrong = engine_process(tmp_path, functions=["f=json:nothing"], environment=harness.environment)
    with pytest.raises(ProcessMisused) as caught:
        wrong.start()
    assert caught.value.log_lines == [
        "flowkit: module 'json' has no 'nothing'; correct the name after the colon"
    ]


OWNER = """
import sys
from pathlib import Path
from flowkit.local.process import worker_processes

handlers = ["tests.integration.handlers:Cruncher"]
[worker] = worker_processes(Path(sys.argv[1]), handlers, options=["--config", sys.argv[2]])
worker.start()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.server
async def test_pool_processes_exit_when_the_owner_of_the_worker_is_killed(
    harness: Harness,
    tmp_path: Path,
    python: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MONGO_DATABASE", "FLOWKIT_QUEUE"):
        monkeypatch.setenv(name, harness.environment[name])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'src'}")
    config = tmp_path / "worker.json"
    config.write_text(json.dumps({"executor": "process", "process_workers": 2}))
    await harness.engine()
    owner = python("-c", OWNER, str(tmp_path), str(config))
    assert stdout_of(owner).readline() == "ready\n"
    before = descendants(owner.pid)
    task_id = await harness.create(node("a", "cruncher", inline={"until_cancelled": True}))
    await harness.until_node(task_id, "a", "running")

    async def pool_is_running() -> bool:
        """Whether the two pool processes and their resource tracker are running."""
        return len(descendants(owner.pid) - before) >= 2

    await eventually(pool_is_running)
    family = descendants(owner.pid)
    owner.kill()
    wait_until(lambda: not still_running(family))


@pytest.mark.slow
@pytest.mark.server
async def test_a_prepared_process_starts_with_the_code_that_it_has_loaded_whatever_is_saved_meanwhile(
    harness: Harness, tmp_path: Path
) -> None:
    code = tmp_path / "own_code.py"
    right = "from flowkit.worker import RoleHandler\n\nclass Own(RoleHandler):\n    role = 'own'\n"
    code.write_text(right)
    environment = {**harness.environment, "PYTHONPATH": str(tmp_path)}
    [worker] = worker_processes(tmp_path, ["own_code:Own"], environment=environment)
    with worker:
        code.write_text(right.replace("'own'", "'other'"))
        assert worker.prepare() == ""
        assert worker.running
        code.write_text("def broken(:\n")
        assert "has a syntax error" in worker.prepare()
        assert worker.running
        code.write_text(right.replace("'own'", "'third'"))
        assert worker.prepare() == ""
        code.write_text("def broken(:\n")
        worker.restart()
        assert worker.summary == f"worker runs third on queue {harness.queue}"
        with pytest.raises(ProcessMisused):
            worker.restart()
