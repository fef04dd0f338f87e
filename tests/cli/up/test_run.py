"""`flowkit up` starts what it is asked to, shows it, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.up.up_process import Up, alone, four_ports, graph_file, listed
from tests.integration.world import CEILING, FLOWKIT
from tests.local.processes import still_running, wait_until

from flowkit.local.ports import is_free

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.cli.conftest import Program
    from tests.integration.world import World


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Starts `flowkit up` in an empty folder."""
    started: list[Up] = []

    def start(*arguments: str, env: Mapping[str, str] | None = None) -> Up:
        started.append(Up(tmp_path, *arguments, env=env or alone(tmp_path)))
        return started[-1]

    yield start
    for each in started:
        each.close()


def wait_for_task(up: Up, file: str) -> None:
    """Run a task to its end."""
    done = up.flowkit("run", file, "--watch", "--timeout", "60")
    assert done.returncode == 0, done.stderr


# --- all of it --------------------------------------------------------------------------------------------------


@pytest.mark.server
def test_it_runs_tasks_keeps_data_and_finds_them_again(tmp_path: Path, up: Callable[..., Up]) -> None:
    file, base, data = graph_file(tmp_path), four_ports(), str(tmp_path / "data")
    first = up("shop:Shop", "--data", data, "--port-base", str(base))
    assert first.exports() == {
        "TEMPORAL_ADDRESS": f"127.0.0.1:{base}",
        "MONGO_URL": f"mongodb://127.0.0.1:{base + 2}",
    }
    assert not any(is_free(port) for port in range(base, base + 4))
    for name in ("temporal", "mongo", "engine", "worker-1"):
        assert any(
            line.startswith(f"{name} is ready after ") and f"{name}.log" in line for line in first.told
        )
    wait_for_task(first, file)
    assert first.line("task ").endswith((" running", " finished"))
    family = first.family()
    assert len(family) == 9, "itself, and a guard and a process for each of four"

    assert first.end(signal.SIGINT) == 0
    assert "stopping worker-1, engine, mongo, temporal" in first.told
    assert first.told[-1] == f"all processes stopped; data and logs kept in {data}"
    assert not still_running(family)
    assert all(is_free(port) for port in range(base, base + 4))

    again = up("--only", "temporal,mongo", "--data", data, "--port-base", str(base))
    again.exports()
    assert [task["name"] for task in listed(again.flowkit("list", "--json"))] == ["shopping"]
    assert again.end() == 0


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
def test_nothing_remains_of_one_that_was_killed_not_even_children_of_workers(
    tmp_path: Path, up: Callable[..., Up]
) -> None:
    (tmp_path / "shop.py").write_text(POOL)
    killed = up("shop:Shop", "--workers", "2", "--port-base", str(four_ports()))
    killed.exports()
    family = killed.family()
    assert len(family) == 13, "itself, a guard and a process for each of five, and a child of each worker"
    killed.process.kill()
    wait_until(lambda: not still_running(family))


@pytest.mark.server
def test_two_may_not_use_the_same_folder_or_the_same_ports(tmp_path: Path, up: Callable[..., Up]) -> None:
    data, base = str(tmp_path / "data"), four_ports()
    first = up("--only", "mongo", "--data", data, "--port-base", str(base))
    first.line("logs: ")
    second = up("--only", "mongo", "--data", data, "--port-base", str(four_ports()))
    assert second.wait() == 2
    assert (
        second.told[-1]
        == f"flowkit: {data} is in use by a running flowkit up; stop it or choose another folder"
    )
    third = up("--only", "mongo", "--port-base", str(base))
    assert third.wait() == 2
    assert f"mongo cannot start: port {base + 2} is in use by " in third.told[-1]
    assert "--port-base" in third.told[-1]
    assert first.end() == 0


def test_an_interrupt_while_it_starts_leaves_nothing(tmp_path: Path, up: Callable[..., Up]) -> None:
    slow = tmp_path / "bin" / "mongod"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\necho started\nexec sleep 1000\n")
    slow.chmod(0o755)
    env = {**alone(tmp_path), "PATH": f"{slow.parent}:{os.environ['PATH']}"}
    starting = up(
        "--only", "mongo", "--data", str(tmp_path / "data"), "--port-base", str(four_ports()), env=env
    )
    wait_until(lambda: (tmp_path / "data" / "mongo.log").exists())
    wait_until(lambda: (tmp_path / "data" / "mongo.log").read_text() == "started\n")
    family = starting.family()
    assert starting.end() == 130
    assert starting.told == ["interrupted during startup; all started processes are stopped"]
    wait_until(lambda: not still_running(family))


STUBBORN = """#!{python}
import signal, socket, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
threading.Event().wait()
"""


def test_who_interrupts_twice_does_not_wait(tmp_path: Path, up: Callable[..., Up]) -> None:
    mongod = tmp_path / "bin" / "mongod"
    mongod.parent.mkdir()
    mongod.write_text(STUBBORN.format(python=sys.executable))
    mongod.chmod(0o755)
    env = {**alone(tmp_path), "PATH": f"{mongod.parent}:{os.environ['PATH']}"}
    stubborn = up("--only", "mongo", "--port-base", str(four_ports()), env=env)
    stubborn.line("logs: ")
    family = stubborn.family() - {stubborn.process.pid}
    stubborn.process.send_signal(signal.SIGINT)
    stubborn.line("stopping mongo")
    assert stubborn.end(signal.SIGINT) == 130
    assert stubborn.told[-1] == "interrupted again; remaining processes exit within 15 seconds"
    assert still_running(family), "it has not been waited for"
    for pid in still_running(family):
        os.kill(pid, signal.SIGKILL)


# --- with the servers of others ----------------------------------------------------------------------------------


def process_named(up: Up, name: str) -> int:
    """The id of a flowkit process, as `up` itself does not tell it."""
    wanted = f"flowkit\0{name}"
    found = [pid for pid in up.family() if wanted in Path(f"/proc/{pid}/cmdline").read_text()]
    return next(pid for pid in found if "supervisor.py" not in Path(f"/proc/{pid}/cmdline").read_text())


def named_log(headline: str) -> str:
    """What the log holds that a line names."""
    return Path(headline.rpartition("last lines of ")[2].rstrip(":")).read_text()


@pytest.mark.server
async def test_servers_in_the_environment_are_used_and_shown(
    world: World, tmp_path: Path, up: Callable[..., Up]
) -> None:
    env = {**world.environment, "TMPDIR": alone(tmp_path)["TMPDIR"]}
    used = up("shop:Shop", "--queue", world.queue, env=env)
    graph = graph_file(tmp_path)
    used.line("logs: ")
    assert not any(line.startswith(("temporal is ready", "mongo is ready")) for line in used.told)
    wait_for_task(used, graph)
    assert used.line("task ").endswith((" running", " finished"))
    assert used.end() == 0
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.server
async def test_a_process_that_ends_by_itself_ends_all_and_is_named(
    world: World, tmp_path: Path, up: Callable[..., Up]
) -> None:
    graph_file(tmp_path)
    ended = up("shop:Shop", env={**world.environment, "TMPDIR": alone(tmp_path)["TMPDIR"]})
    ended.line("logs: ")
    family = ended.family()
    os.kill(process_named(ended, "engine"), signal.SIGKILL)
    assert ended.wait() == 3
    assert "engine exited unexpectedly with code 137" in ended.told
    assert ended.told.index("stopping worker-1") > ended.told.index(
        "engine exited unexpectedly with code 137"
    )
    headline = next(
        line for line in ended.told if line.startswith("flowkit: engine exited unexpectedly with code 137")
    )
    assert ended.told[-1].startswith("  running: engine polls queue")
    assert named_log(headline).startswith("running: engine"), "it is still there"
    assert not still_running(family)


@pytest.mark.server
async def test_a_worker_that_cannot_use_its_handler_says_so(
    world: World, tmp_path: Path, up: Callable[..., Up]
) -> None:
    graph_file(tmp_path)
    wrong = up("shop:Shopp", env={**world.environment, "TMPDIR": alone(tmp_path)["TMPDIR"]})
    assert wrong.wait() == 2
    assert any(
        line.startswith("flowkit: worker-1 exited during startup with code 2; last lines of ")
        for line in wrong.told
    )
    assert wrong.told[-1] == "  flowkit: module 'shop' has no 'Shopp'; did you mean 'Shop'?"


# --- mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--only", "temporal,redis"],
            "--only 'redis' is unknown; choose from temporal, mongo, engine, worker",
        ),
        (["--only", "worker"], "a worker needs handlers, but none are given; name them as module:CLASS"),
        (["--only", "engine", "shop:Shop"], "handlers are given, but this command starts no worker"),
        (["--workers", "2"], "--workers is given, but this command starts no worker; name the handlers"),
        (
            ["--only", "mongo", "--function", "a=b:c"],
            "--function is given, but this command starts no engine",
        ),
        (["nowhere:Shop"], "there is no module 'nowhere' here; run flowkit in the folder that holds it"),
        (["--function", "f=nowhere:f"], "there is no module 'nowhere' here"),
        (["shop"], "'shop' is not module:name; for example"),
        (["--port-base", "65533"], "Invalid value for '--port-base'"),
        (
            ["--data", "/sys/flowkit"],
            "cannot write to /sys/flowkit (Operation not permitted); choose a writable folder",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_before_anything_starts(
    program: Program, arguments: list[str], told: str
) -> None:
    said = program.run("up", *arguments)
    assert said.code == 2
    assert said.err.startswith(f"flowkit: {told}")
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_a_missing_program_is_one_line_with_the_remedies(program: Program, tmp_path: Path) -> None:
    env = {**alone(tmp_path), "PATH": str(tmp_path)}
    said = program.run("up", "--only", "mongo", env={**env, "MONGO_URL": ""})
    assert said.code == 3
    assert said.err == (
        "flowkit: `java` is not on PATH; install MongoDB, or a JDK 17 or newer and Maven, "
        "or set MONGO_URL to a running server\n"
    )


def test_sources_that_do_not_have_it_are_one_line(program: Program, tmp_path: Path) -> None:
    env = {
        "PATH": str(tmp_path),
        "FLOWKIT_SERVERS": "path,container",
        "MONGO_URL": "",
        "TEMPORAL_ADDRESS": "",
    }
    said = program.run("up", env=env)
    assert said.code == 3
    assert said.err.startswith(
        "flowkit: no Temporal server found in FLOWKIT_SERVERS=path,container; unset FLOWKIT_"
    )


def test_without_a_network_it_is_one_line_with_the_remedies(program: Program, tmp_path: Path) -> None:
    env = {"FLOWKIT_CACHE": str(tmp_path / "cache"), "FLOWKIT_SERVERS": "", "PATH": str(tmp_path)}
    proxies = dict.fromkeys(("https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:1")
    said = program.run(
        "up", "--install", "--only", "temporal", env={**env, **proxies, "FLOWKIT_TEMPORAL_BIN": ""}
    )
    assert said.code == 3
    told = said.err.splitlines()[-1]
    assert told.startswith("flowkit: cannot install the Temporal CLI: cannot reach github.com (")
    assert "and `go` is not on PATH; put `temporal` on PATH, set FLOWKIT_TEMPORAL_BIN" in told


TINY = 'mount -t tmpfs -o size=200k tmpfs "$1" || exit 77; exec "$2" up --only temporal --data "$1" --port-base "$3"'


@pytest.mark.server
def test_a_full_disk_is_told_although_the_server_cannot_log_it(program: Program, tmp_path: Path) -> None:
    """On a disk of 200 kilobytes, which is too small for what Temporal writes at its start."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("needs unshare")
    inside = ["sh", "-c", TINY, "sh", str(tmp_path), str(FLOWKIT), str(four_ports())]
    command = [unshare, "--mount", "--map-root-user", *inside]
    env = {**os.environ, "TEMPORAL_ADDRESS": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=CEILING, check=False)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("may not mount a disk of its own here")
    assert done.returncode == 3
    assert (
        f"flowkit: temporal cannot start: no space left on the disk that holds {tmp_path}; free some space"
        in done.stderr
    )


def test_install_says_where_each_server_comes_from(program: Program, tmp_path: Path) -> None:
    mongod = tmp_path / "mongod"
    mongod.write_text("#!/bin/sh\n")
    mongod.chmod(0o755)
    said = program.run(
        "up", "--install", "--only", "mongo", env={"PATH": str(tmp_path), "FLOWKIT_SERVERS": ""}
    )
    assert (said.code, said.out) == (0, f"mongo: {mongod} (path)\n")
