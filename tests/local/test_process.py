"""A server as a child process: its start, its log and its errors."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.local.processes import (
    WAIT_FOREVER,
    ScriptedProcess,
    wait_until,
)

from flowkit.local import ports
from flowkit.local.errors import FolderInUse, FolderNotWritable, PortInUse, ServerEnded, ServerNotReady
from flowkit.local.process import LocalServer
from flowkit.local.sources import Program


def test_a_server_that_exits_during_startup_reports_the_end_of_its_log(tmp_path: Path) -> None:
    script = "print(*range(100, 130), sep='\\n'); raise SystemExit(3)"
    server = ScriptedProcess(tmp_path, script, ready=False)
    with pytest.raises(ServerNotReady) as caught:
        server.start()
    text = str(caught.value)
    assert f"code 3; last lines of {server.log}" in text
    assert text.splitlines()[1:] == [str(number) for number in range(110, 130)]
    assert not server.running


class Server(ScriptedProcess, LocalServer):
    """A scripted server, whose data is for this user only."""

    def find_program(self) -> Program:
        """Return no program; the script is one."""
        raise AssertionError

    def cleanup_command(self) -> list[str]:
        """Return nothing to run."""
        return []


def test_data_and_logs_of_a_server_are_private_whatever_the_umask(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    script = f"import os; os.mkdir('{folder}/db'); open('{folder}/db/1', 'w').close(); {WAIT_FOREVER}"
    before = os.umask(0)
    try:
        with Server(folder, script, ready=folder / "db" / "1"):
            modes = [(each.stat().st_mode & 0o777) for each in (folder, folder / "db", folder / "db" / "1")]
            log = folder / "scripted.log"
            assert (*modes, log.stat().st_mode & 0o777) == (0o700, 0o700, 0o600, 0o600)
    finally:
        os.umask(before)


def test_a_server_that_does_not_become_ready_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowkit.local.process.START_TIMEOUT_SECONDS", 0.2)
    server = ScriptedProcess(tmp_path, WAIT_FOREVER, ready=False)
    with pytest.raises(ServerNotReady, match="not ready within"):
        server.start()
    assert not server.running


def test_a_folder_can_be_used_by_one_server_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowkit.local.data_folder.WAIT_SECONDS", 0.1)
    second = ScriptedProcess(tmp_path, WAIT_FOREVER, ready=True)
    with (
        ScriptedProcess(tmp_path, WAIT_FOREVER, ready=True),
        pytest.raises(FolderInUse, match="in use by a running scripted"),
    ):
        second.start()
    second.start()
    second.stop()


def test_an_unwritable_folder_is_reported_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderNotWritable, match="cannot write to .*file/data .*choose a writable folder"):
        ScriptedProcess(tmp_path / "file" / "data", WAIT_FOREVER, ready=True).start()
    with pytest.raises(FolderNotWritable, match="cannot write to /sys/flowkit"):
        ScriptedProcess(Path("/sys/flowkit"), WAIT_FOREVER, ready=True).start()


def test_a_port_in_use_is_reported_with_its_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"port {port} is in use by .+; stop it, or .* --port-base"):
            ScriptedProcess(tmp_path, WAIT_FOREVER, port, ready=True).start()


def test_an_unexpected_exit_is_reported_with_code_and_log(tmp_path: Path) -> None:
    script = "import sys, threading; print('last line', flush=True); threading.Event().wait(0.2); sys.exit(7)"
    with ScriptedProcess(tmp_path, script, ready=True) as server:
        wait_until(lambda: not server.running)
        ended = server.exit_error()
    assert isinstance(ended, ServerEnded)
    assert ended.headline == f"scripted exited unexpectedly with code 7; last lines of {server.log}:"
    assert ended.log_lines == ["last line"]


def test_an_error_contains_only_log_lines_since_the_last_start(tmp_path: Path) -> None:
    for word in ("earlier", "now"):
        server = ScriptedProcess(tmp_path, f"raise SystemExit({word!r})", ready=False)
        with pytest.raises(ServerNotReady) as caught:
            server.start()
    assert caught.value.log_lines == ["now"]
    assert server.log.read_text().split() == ["earlier", "now"]


def test_a_server_can_start_after_a_cancelled_start(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    server = ScriptedProcess(tmp_path, WAIT_FOREVER, ready=ready)
    failed: list[ServerNotReady] = []

    def start() -> None:
        try:
            server.start()
        except ServerNotReady as error:
            failed.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    wait_until(lambda: server.running)
    server.cancel_start()
    thread.join()
    assert "was stopped before it was ready" in str(failed[0])
    server.stop()
    ready.touch()
    server.start()
    assert server.running
    server.stop()


def test_a_free_port_is_chosen_once_although_no_server_listens_on_it_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = [ports.free_port(), ports.free_port()]
    monkeypatch.setattr(ports, "CANDIDATES", two)
    with pytest.raises(StopIteration):
        ports.free_port()
    command = [
        sys.executable,
        "-c",
        f"from flowkit.local import ports; ports.CANDIDATES = {two}; print(ports.free_port())",
    ]
    other = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "StopIteration" in other.stderr, "another process does not choose them either"
