"""One child process, several at once, and what remains of them when somebody is killed: nothing."""

import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.local.processes import (
    WAIT_FOREVER,
    ScriptedProcess,
    descendants,
    stdout_of,
    still_running,
    wait_until,
)

from flowkit.local.errors import FolderInUse, FolderNotWritable, PortInUse, ServerEnded, ServerNotReady
from flowkit.local.lifecycle import start_all, stop_all


def test_a_server_that_ends_at_its_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    script = "print(*range(100, 130), sep='\\n'); raise SystemExit(3)"
    server = ScriptedProcess(tmp_path, script, ready=False)
    with pytest.raises(ServerNotReady) as caught:
        server.start()
    text = str(caught.value)
    assert f"code 3; last lines of {server.log}" in text
    assert text.splitlines()[1:] == [str(number) for number in range(110, 130)]
    assert not server.running


def test_a_server_that_stays_silent_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkit.local.process.START_TIMEOUT_SECONDS", 0.2)
    server = ScriptedProcess(tmp_path, WAIT_FOREVER, ready=False)
    with pytest.raises(ServerNotReady, match="not ready within"):
        server.start()
    assert not server.running


def test_a_folder_serves_one_server_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkit.local.folder_lock.WAIT_SECONDS", 0.1)
    second = ScriptedProcess(tmp_path, WAIT_FOREVER, ready=True)
    with (
        ScriptedProcess(tmp_path, WAIT_FOREVER, ready=True),
        pytest.raises(FolderInUse, match="in use by a running scripted"),
    ):
        second.start()
    second.start()
    second.stop()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderNotWritable, match="cannot write to .*file/data .*choose a writable folder"):
        ScriptedProcess(tmp_path / "file" / "data", WAIT_FOREVER, ready=True).start()
    with pytest.raises(FolderNotWritable, match="cannot write to /sys/flowkit"):
        ScriptedProcess(Path("/sys/flowkit"), WAIT_FOREVER, ready=True).start()


def test_a_port_that_is_taken_is_told_with_the_process_that_has_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"port {port} is in use by .+; stop it, or .* --port-base"):
            ScriptedProcess(tmp_path, WAIT_FOREVER, port, ready=True).start()


def test_a_process_that_ends_by_itself_tells_its_code_and_the_end_of_its_log(tmp_path: Path) -> None:
    script = (
        "import sys, threading; print('last words', flush=True); threading.Event().wait(0.2); sys.exit(7)"
    )
    with ScriptedProcess(tmp_path, script, ready=True) as server:
        wait_until(lambda: not server.running)
        ended = server.exit_error()
    assert isinstance(ended, ServerEnded)
    assert ended.headline == f"scripted exited unexpectedly with code 7; last lines of {server.log}:"
    assert ended.log_lines == ["last words"]


def test_the_log_of_an_earlier_start_is_not_told_as_that_of_this_one(tmp_path: Path) -> None:
    for word in ("earlier", "now"):
        server = ScriptedProcess(tmp_path, f"raise SystemExit({word!r})", ready=False)
        with pytest.raises(ServerNotReady) as caught:
            server.start()
    assert caught.value.log_lines == ["now"]
    assert server.log.read_text().split() == ["earlier", "now"]


# --- several at once --------------------------------------------------------------------------------------------


def test_processes_start_at_the_same_time(tmp_path: Path) -> None:
    """Each is ready only once both run."""
    first = ScriptedProcess(
        tmp_path, f"open({str(tmp_path / 'one')!r}, 'w'); {WAIT_FOREVER}", ready=tmp_path / "two", name="one"
    )
    second = ScriptedProcess(
        tmp_path, f"open({str(tmp_path / 'two')!r}, 'w'); {WAIT_FOREVER}", ready=tmp_path / "one", name="two"
    )
    started: list[str] = []
    start_all([first, second], lambda process: started.append(process.name))
    assert first.running
    assert second.running
    assert sorted(started) == ["one", "two"]
    stop_all([first, second])
    assert not first.running
    assert not second.running


def test_if_one_does_not_start_the_others_are_not_waited_for(tmp_path: Path) -> None:
    slow = ScriptedProcess(tmp_path, WAIT_FOREVER, ready=False, name="slow")
    bad = ScriptedProcess(tmp_path, "raise SystemExit(3)", ready=False, name="bad")
    with pytest.raises(ServerNotReady, match="bad exited during startup with code 3"):
        start_all([slow, bad])
    assert not slow.running
    assert slow.exit_code is not None, "it was started, and ended"


def test_a_start_that_was_given_up_can_be_made_again(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    server = ScriptedProcess(tmp_path, WAIT_FOREVER, ready=ready)
    failed: list[ServerNotReady] = []

    def start() -> None:
        try:
            server.start()
        except ServerNotReady as error:
            failed.append(error)

    starting = threading.Thread(target=start)
    starting.start()
    wait_until(lambda: server.running)
    server.cancel_start()
    starting.join()
    assert "was stopped before it was ready" in str(failed[0])
    server.stop()
    ready.touch()
    server.start()
    assert server.running
    server.stop()


# --- nothing remains --------------------------------------------------------------------------------------------

PARENT = """
import subprocess, sys, threading, signal
sleep = "import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); " \
    "threading.Event().wait()"
child = subprocess.Popen([sys.executable, "-c", sleep], stdout=subprocess.PIPE)
child.stdout.readline()
open(sys.argv[1] if len(sys.argv) > 1 else {ready!r}, "w")
threading.Event().wait()
"""
"""A server with a child that ignores SIGTERM, as a process of a pool may be busy."""

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
def test_what_a_server_has_started_ends_with_it(tmp_path: Path, how: str) -> None:
    ready = tmp_path / "ready"
    server = ScriptedProcess(tmp_path, PARENT.format(ready=str(ready)), ready=ready)
    server.start()
    assert server._supervisor is not None
    family = descendants(server._supervisor.pid)
    assert len(family) == 2
    getattr(server, how)()
    wait_until(lambda: not still_running(family))


def test_nothing_remains_of_a_server_whose_owner_was_killed(
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
