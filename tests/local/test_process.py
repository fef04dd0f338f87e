"""One child process, several at once, and what remains of them when somebody is killed: nothing."""

import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.local.processes import SLEEP, Scripted, descendants, lines_of, running, wait_until

from flowkit.local.errors import FolderInUse, FolderNotWritable, PortInUse, ServerEnded, ServerNotReady
from flowkit.local.lifecycle import start_together, stop_together


def test_a_server_that_ends_at_its_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    script = "print(*range(100, 130), sep='\\n'); raise SystemExit(3)"
    server = Scripted(tmp_path, script, ready=False)
    with pytest.raises(ServerNotReady) as caught:
        server.start()
    text = str(caught.value)
    assert f"code 3; the end of {server.log}" in text
    assert text.splitlines()[1:] == [str(number) for number in range(110, 130)]
    assert not server.running


def test_a_server_that_stays_silent_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkit.local.process.READY_WITHIN_SECONDS", 0.2)
    server = Scripted(tmp_path, SLEEP, ready=False)
    with pytest.raises(ServerNotReady, match="not ready within"):
        server.start()
    assert not server.running


def test_a_folder_serves_one_server_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkit.local.folder_lock.WAIT_SECONDS", 0.1)
    second = Scripted(tmp_path, SLEEP, ready=True)
    with (
        Scripted(tmp_path, SLEEP, ready=True),
        pytest.raises(FolderInUse, match="used by a running scripted"),
    ):
        second.start()
    second.start()
    second.stop()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderNotWritable, match="file/data cannot be written .*choose a folder"):
        Scripted(tmp_path / "file" / "data", SLEEP, ready=True).start()
    with pytest.raises(FolderNotWritable, match="/sys/flowkit cannot be written"):
        Scripted(Path("/sys/flowkit"), SLEEP, ready=True).start()


def test_a_port_that_is_taken_is_told_with_the_process_that_has_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"port {port} is in use by .+; stop that, or .* --port-base"):
            Scripted(tmp_path, SLEEP, port, ready=True).start()


def test_a_process_that_ends_by_itself_tells_its_code_and_the_end_of_its_log(tmp_path: Path) -> None:
    script = (
        "import sys, threading; print('last words', flush=True); threading.Event().wait(0.2); sys.exit(7)"
    )
    with Scripted(tmp_path, script, ready=True) as server:
        wait_until(lambda: not server.running)
        ended = server.ended()
    assert isinstance(ended, ServerEnded)
    assert ended.headline == f"scripted ended by itself with code 7; the end of {server.log}:"
    assert ended.log_lines == ["last words"]


def test_the_log_of_an_earlier_start_is_not_told_as_that_of_this_one(tmp_path: Path) -> None:
    for word in ("earlier", "now"):
        server = Scripted(tmp_path, f"raise SystemExit({word!r})", ready=False)
        with pytest.raises(ServerNotReady) as caught:
            server.start()
    assert caught.value.log_lines == ["now"]
    assert server.log.read_text().split() == ["earlier", "now"]


# --- several at once --------------------------------------------------------------------------------------------


def test_processes_start_at_the_same_time(tmp_path: Path) -> None:
    """Each is ready only once both run."""
    first = Scripted(
        tmp_path, f"open({str(tmp_path / 'one')!r}, 'w'); {SLEEP}", ready=tmp_path / "two", name="one"
    )
    second = Scripted(
        tmp_path, f"open({str(tmp_path / 'two')!r}, 'w'); {SLEEP}", ready=tmp_path / "one", name="two"
    )
    told: list[str] = []
    start_together([first, second], lambda process: told.append(process.name))
    assert first.running
    assert second.running
    assert sorted(told) == ["one", "two"]
    stop_together([first, second])
    assert not first.running
    assert not second.running


def test_if_one_does_not_start_the_others_are_not_waited_for(tmp_path: Path) -> None:
    slow = Scripted(tmp_path, SLEEP, ready=False, name="slow")
    bad = Scripted(tmp_path, "raise SystemExit(3)", ready=False, name="bad")
    with pytest.raises(ServerNotReady, match="bad ended at its start with code 3"):
        start_together([slow, bad])
    assert not slow.running
    assert slow.exit_code is not None, "it was started, and ended"


def test_a_start_that_was_given_up_can_be_made_again(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    server = Scripted(tmp_path, SLEEP, ready=ready)
    failed: list[ServerNotReady] = []

    def start() -> None:
        try:
            server.start()
        except ServerNotReady as error:
            failed.append(error)

    starting = threading.Thread(target=start)
    starting.start()
    wait_until(lambda: server.running)
    server.give_up()
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
from tests.local.processes import Scripted

folder = Path(sys.argv[1])
Scripted(folder, Path(sys.argv[2]).read_text(), ready=folder / "ready").start()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_what_a_server_has_started_ends_with_it(tmp_path: Path, how: str) -> None:
    ready = tmp_path / "ready"
    server = Scripted(tmp_path, PARENT.format(ready=str(ready)), ready=ready)
    server.start()
    assert server._guard is not None
    family = descendants(server._guard.pid)
    assert len(family) == 2
    getattr(server, how)()
    wait_until(lambda: not running(family))


def test_nothing_remains_of_a_server_whose_owner_was_killed(
    tmp_path: Path, python: Callable[..., subprocess.Popen[str]]
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(ready=str(tmp_path / "ready")))
    owner = python("-c", OWNER, str(tmp_path), str(script))
    assert lines_of(owner).readline() == "ready\n"
    family = descendants(owner.pid)
    assert len(family) == 3, "a guard, the server, its child"
    owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not running(family))
