"""The guard stops a server and its children when the server or its owner exits."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.local.processes import (
    ScriptedProcess,
    descendants,
    stdout_of,
    still_running,
    wait_until,
)

PARENT = """
import subprocess, sys, threading, signal
sleep = "import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); " \
    "threading.Event().wait()"
child = subprocess.Popen([sys.executable, "-c", sleep], stdout=subprocess.PIPE)
child.stdout.readline()
open(sys.argv[1] if len(sys.argv) > 1 else {ready!r}, "w")
threading.Event().wait()
"""
"""A server with a child that ignores SIGTERM, like a busy pool process."""


OWNER = """
import sys
from pathlib import Path
from tests.local.processes import ScriptedProcess

folder = Path(sys.argv[1])
ScriptedProcess(folder, Path(sys.argv[2]).read_text(), ready=folder / "ready").start()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_child_processes_exit_with_their_server(tmp_path: Path, how: str) -> None:
    ready = tmp_path / "ready"
    server = ScriptedProcess(tmp_path, PARENT.format(ready=str(ready)), ready=ready)
    server.start()
    assert server._guard is not None
    family = descendants(server._guard.pid)
    assert len(family) == 2
    getattr(server, how)()
    wait_until(lambda: not still_running(family))


def test_server_and_children_exit_when_the_owner_is_killed(
    tmp_path: Path, python: Callable[..., subprocess.Popen[str]]
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(ready=str(tmp_path / "ready")))
    owner = python("-c", OWNER, str(tmp_path), str(script))
    assert stdout_of(owner).readline() == "ready\n"
    family = descendants(owner.pid)
    assert len(family) == 3, "a guard, the server, its child"
    owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not still_running(family))
