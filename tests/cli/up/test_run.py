"""`flowkit up` starts servers and processes, and stops all of them."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.up.up_process import (
    HANDLERS,
    UpProcess,
    environment_without_servers,
    free_port_base,
    listed_tasks,
    write_graph,
)
from tests.fork_server import FORK_SERVER
from tests.integration.harness import EVENT_TIMEOUT_SEC, FLOWKIT
from tests.local.processes import still_running, wait_until

from flowkit.local.ports import is_free

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Program
    from tests.integration.harness import Harness


def run_task(up: UpProcess, file: str) -> None:
    """Run a task until it finishes."""
    done = up.run_command("run", file, "--watch", "--timeout", "60")
    assert done.returncode == 0, done.stderr


def process_tree(up: UpProcess, count: int) -> set[int]:
    """Wait until the process has so many descendants, and return their ids and its own.

    Starts have more for a moment.
    """
    found: set[int] = set()

    def complete() -> bool:
        found.clear()
        found.update(up.process_tree())
        return len(found) == count

    wait_until(complete)
    return found


@pytest.mark.slow
@pytest.mark.server
def test_it_runs_tasks_and_keeps_their_data(tmp_path: Path, up: Callable[..., UpProcess]) -> None:
    file, base, data = write_graph(tmp_path), free_port_base(), str(tmp_path / "data")
    first = up("shop:Shop", "--data", data, "--port-base", str(base))
    assert first.exports() == {
        "TEMPORAL_ADDRESS": f"127.0.0.1:{base}",
        "MONGO_URL": f"mongodb://127.0.0.1:{base + 2}",
    }
    assert not any(is_free(port) for port in range(base, base + 4))
    for name in ("temporal", "mongo", "engine", "page", "worker-1"):
        assert any(
            line.startswith(f"{name} is ready after ") and f"{name}.log" in line for line in first.lines
        )
    assert first.wait_for_line("page: ") == f"page: http://127.0.0.1:{base + 8}/"
    run_task(first, file)
    assert first.wait_for_line("task ").endswith((" queued", " running", " finished"))
    engine, worker = (read_metrics(base + offset) for offset in (9, 14))
    assert 'flowkit_tasks_closed_total{status="finished"} 1.0' in engine
    assert 'flowkit_attempts_ended_total{outcome="succeeded",reason="",role="shop"} 1.0' in worker
    assert "temporal_request_total{" in engine
    processes = process_tree(first, 11)  # itself, and a guard and a process for each of five

    assert first.stop(signal.SIGINT) == 0
    assert "stopping worker-1, page, engine, mongo, temporal" in first.lines
    assert first.lines[-1] == f"all processes stopped; data and logs kept in {data}"
    assert not still_running(processes)
    assert all(is_free(port) for port in range(base, base + 4))

    again = up("--only", "temporal,mongo", "--data", data, "--port-base", str(base))
    again.exports()
    assert [task["name"] for task in listed_tasks(again.run_command("list", "--json"))] == ["shopping"]
    assert again.stop() == 0


def read_metrics(port: int) -> str:
    """Return the metrics of a process."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=EVENT_TIMEOUT_SEC)
    connection.request("GET", "/metrics")
    try:
        return connection.getresponse().read().decode()
    finally:
        connection.close()


POOL = """
import os, subprocess, sys
from flowkit.worker import RoleHandler

class Shop(RoleHandler):
    role = "shop"

    def __init__(self):
        script = "import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN); threading.Event().wait()"
        self.child = subprocess.Popen([sys.executable, "-c", script])
"""


@pytest.mark.server
def test_all_processes_exit_when_it_is_killed_even_children_of_workers(
    tmp_path: Path, up: Callable[..., UpProcess]
) -> None:
    (tmp_path / "shop.py").write_text(POOL)
    env = {**environment_without_servers(tmp_path), FORK_SERVER: ""}  # Its processes are its own children.
    killed = up("shop:Shop", "--no-page", "--workers", "2", "--port-base", str(free_port_base()), env=env)
    killed.exports()
    # Itself, a guard and a process for each of five, and a child of each worker.
    processes = process_tree(killed, 13)
    killed.process.kill()
    wait_until(lambda: not still_running(processes))


@pytest.mark.server
def test_two_cannot_use_the_same_folder_or_the_same_ports(
    tmp_path: Path, up: Callable[..., UpProcess]
) -> None:
    data, base = str(tmp_path / "data"), free_port_base()
    first = up("--only", "mongo", "--data", data, "--port-base", str(base))
    first.wait_for_line("logs: ")
    second = up("--only", "mongo", "--data", data, "--port-base", str(free_port_base()))
    assert second.wait() == 2
    assert (
        second.lines[-1]
        == f"flowkit: {data} is in use by a running flowkit up; stop it or choose another folder"
    )
    third = up("--only", "mongo", "--port-base", str(base))
    assert third.wait() == 2
    assert f"mongo cannot start: port {base + 2} is in use by " in third.lines[-1]
    assert "--port-base" in third.lines[-1]
    assert first.stop() == 0


def test_an_interrupt_during_startup_stops_all_processes(
    tmp_path: Path, up: Callable[..., UpProcess]
) -> None:
    slow = tmp_path / "bin" / "mongod"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\necho started\nexec sleep 1000\n")
    slow.chmod(0o755)
    env = {**environment_without_servers(tmp_path), "PATH": f"{slow.parent}:{os.environ['PATH']}"}
    starting = up(
        "--only", "mongo", "--data", str(tmp_path / "data"), "--port-base", str(free_port_base()), env=env
    )
    wait_until(lambda: (tmp_path / "data" / "mongo.log").exists())
    wait_until(lambda: (tmp_path / "data" / "mongo.log").read_text() == "started\n")
    processes = starting.process_tree()
    assert starting.stop() == 130
    assert starting.lines == ["interrupted during startup; all started processes are stopped"]
    wait_until(lambda: not still_running(processes))


IGNORES_SIGTERM = """#!{python}
import signal, socket, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
threading.Event().wait()
"""


def test_a_second_interrupt_exits_at_once(tmp_path: Path, up: Callable[..., UpProcess]) -> None:
    mongod = tmp_path / "bin" / "mongod"
    mongod.parent.mkdir()
    mongod.write_text(IGNORES_SIGTERM.format(python=sys.executable))
    mongod.chmod(0o755)
    env = {**environment_without_servers(tmp_path), "PATH": f"{mongod.parent}:{os.environ['PATH']}"}
    flowkit_up = up("--only", "mongo", "--port-base", str(free_port_base()), env=env)
    flowkit_up.wait_for_line("logs: ")
    processes = flowkit_up.process_tree() - {flowkit_up.process.pid}
    flowkit_up.process.send_signal(signal.SIGINT)
    flowkit_up.wait_for_line("stopping mongo")
    assert flowkit_up.stop(signal.SIGINT) == 130
    assert flowkit_up.lines[-1] == "interrupted again; remaining processes exit within 15 seconds"
    assert still_running(processes), "it did not wait for the server"
    for pid in still_running(processes):
        os.kill(pid, signal.SIGKILL)


def process_named(up: UpProcess, name: str) -> int:
    """Return the id of a child process, which `flowkit up` does not print, by the words `program command`."""
    words = name if " " in name else f"flowkit {name}"
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in up.process_tree()}
    return next(pid for pid, line in lines.items() if words in line and "process_guard.py" not in line)


@pytest.mark.server
async def test_servers_in_the_environment_are_used(
    harness: Harness, tmp_path: Path, up: Callable[..., UpProcess]
) -> None:
    env = {**harness.environment, "TMPDIR": environment_without_servers(tmp_path)["TMPDIR"]}
    used = up("shop:Shop", "--no-page", "--queue", harness.queue, env=env)
    graph = write_graph(tmp_path)
    used.wait_for_line("logs: ")
    assert not any(line.startswith(("temporal is ready", "mongo is ready")) for line in used.lines)
    run_task(used, graph)
    assert used.wait_for_line("task ").endswith((" queued", " running", " finished"))
    assert used.stop() == 0
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.server
async def test_a_crashed_engine_is_restarted_and_a_crashed_server_ends_everything_but_the_data(
    harness: Harness, tmp_path: Path, up: Callable[..., UpProcess]
) -> None:
    env = {**harness.environment, "TMPDIR": environment_without_servers(tmp_path)["TMPDIR"]}
    del env["TEMPORAL_ADDRESS"]
    crashed = up("--only", "temporal,engine", "--port-base", str(free_port_base()), env=env)
    folder = Path(crashed.wait_for_line("data: ").split()[1])
    os.kill(process_named(crashed, "engine"), signal.SIGKILL)
    crashed.wait_for_line("engine exited with code 137; it is restarted (1 of 5 times within a minute)")
    crashed.wait_for_line("engine runs again")
    (folder / "data").touch()
    processes = crashed.process_tree()
    os.kill(process_named(crashed, "temporal server"), signal.SIGKILL)
    assert crashed.wait() == 3
    headline = "flowkit: temporal exited unexpectedly with code 137; last lines of "
    assert any(line.startswith(headline) for line in crashed.lines)
    kept = f"data and logs kept in {folder}; `flowkit up --data {folder}` continues with them"
    assert kept in crashed.lines
    assert (folder / "data").exists()
    assert not still_running(processes)


CHANGED = HANDLERS.replace('role = "shop"', 'role = "market"')


@pytest.mark.slow
@pytest.mark.server
async def test_changed_code_is_reloaded_unless_it_cannot_be_imported(
    harness: Harness, tmp_path: Path, up: Callable[..., UpProcess]
) -> None:
    write_graph(tmp_path)
    settings = tmp_path / "settings.json"
    settings.write_text('{"worker_version": "7"}')
    env = {**harness.environment, "TMPDIR": environment_without_servers(tmp_path)["TMPDIR"]}
    running = up("shop:Shop", "--only", "worker", "--config", "settings.json", "--reload", env=env)
    running.wait_for_line("logs: ")
    running.wait_for_line("reloads when Python code or --config changes")
    before = process_named(running, "worker")
    (tmp_path / "shop.py").write_text("import nowhere_to_be_found\n")
    kept = running.wait_for_line("still running the old code in worker-1")
    assert kept.endswith(
        "module 'shop' imports 'nowhere_to_be_found', which is not installed; install it where flowkit is installed"
    )
    assert process_named(running, "worker") == before
    (tmp_path / "shop.py").write_text(CHANGED)
    running.wait_for_line("reloaded worker-1")
    shown = running.run_command("workers", "--json")
    [worker] = json.loads(shown.stdout)["workers"]
    assert (worker["roles"], worker["version"]) == (["market"], "7")
    settings.write_text('{"worker_version": 7}')
    assert "worker_version" in running.wait_for_line("still running the old code in worker-1: settings.json")
    assert running.stop() == 0


@pytest.mark.server
async def test_a_handler_that_does_not_exist_is_reported_from_the_log(
    harness: Harness, tmp_path: Path, up: Callable[..., UpProcess]
) -> None:
    write_graph(tmp_path)
    wrong = up(
        "shop:Shopp", env={**harness.environment, "TMPDIR": environment_without_servers(tmp_path)["TMPDIR"]}
    )
    assert wrong.wait() == 2
    assert any(
        line.startswith("flowkit: worker-1 exited during startup with code 2; last lines of ")
        for line in wrong.lines
    )
    assert wrong.lines[-1] == "  flowkit: module 'shop' has no 'Shopp'; did you mean 'Shop'?"


TINY = 'mount -t tmpfs -o size=200k tmpfs "$1" || exit 77; exec "$2" up --only temporal --data "$1" --port-base "$3"'


@pytest.mark.server
def test_a_full_disk_is_reported_even_if_the_server_cannot_log_it(program: Program, tmp_path: Path) -> None:
    """On a disk of 200 kB, which is too small for the files that Temporal writes when it starts."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("needs unshare")
    inside = ["sh", "-c", TINY, "sh", str(tmp_path), str(FLOWKIT), str(free_port_base())]
    command = [unshare, "--mount", "--map-root-user", *inside]
    env = {**os.environ, "TEMPORAL_ADDRESS": ""}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=EVENT_TIMEOUT_SEC, check=False
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("not permitted to mount a disk")
    assert done.returncode == 3
    assert (
        f"flowkit: temporal cannot start: no space left on the disk that holds {tmp_path}; free some space"
        in done.stderr
    )
