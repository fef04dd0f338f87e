"""Several processes of one command: they stop together, and the command reports the first failure."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually
from tests.unit.test_health_endpoint import respond
from tests.unit.test_resources import pid_in, until_gone

from flowkit.cli import replicas
from flowkit.cli.replicas import ReplicasHealth
from flowkit.local.ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.slow

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from flowkit.attempt.background import Health
from flowkit.cli.errors import exit_code_of, exit_process
from flowkit.cli.health import health_file
from flowkit.cli.options import HealthOptions
from flowkit.cli.replicas import run_processes, scraped
from flowkit.errors import ConfigError

FOLDER = Path(sys.argv[1])


def work(reports, number):
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    signal.signal(signal.SIGINT, lambda *_: stopped.append(True))
    with health_file(reports.file, lambda: Health(running=True)), scraped(reports, lambda: b"things 1\\n"):
        beside = FOLDER / f"{number}.new"
        beside.write_text(str(os.getpid()))
        beside.rename(FOLDER / f"{number}.pid")
        while not stopped:
            if (FOLDER / f"{number}.fail").exists():
                raise ConfigError("the setting is wrong")
            time.sleep(0.02)
    (FOLDER / f"{number}.stopped").touch()


if __name__ == "__main__":
    reports = HealthOptions(file=str(FOLDER / "health.json"), port=int(sys.argv[2]))
    exit_process(exit_code_of(lambda: run_processes(3, work, reports), as_json=False, verbose=False))
"""


class Command:
    """A command with three processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        script = folder / "program.py"
        script.write_text(PROGRAM, encoding="utf-8")
        self.port = free_port()
        program = [sys.executable, str(script), str(folder), str(self.port)]
        self.parent = subprocess.Popen(program, stderr=subprocess.PIPE, text=True)

    async def pid(self, number: int) -> int:
        """Wait until a process runs, and return its id."""
        return await pid_in(self.folder / f"{number}.pid")

    def end(self) -> tuple[int, str]:
        """Wait until the command has exited; return its exit code and its log."""
        _, log = self.parent.communicate(timeout=EVENT_TIMEOUT_SEC)
        return self.parent.returncode, log

    def close(self) -> None:
        """Kill the command if it still runs. Its processes then stop on their own."""
        self.parent.kill()
        self.parent.wait()
        assert self.parent.stderr is not None
        self.parent.stderr.close()

    @property
    def stopped(self) -> set[str]:
        """The numbers of the processes that have stopped gracefully."""
        return {path.stem for path in self.folder.glob("*.stopped")}


@pytest.fixture
async def command(tmp_path: Path) -> AsyncIterator[Command]:
    """A command whose three processes run."""
    started = Command(tmp_path)
    try:
        for number in (1, 2, 3):
            await started.pid(number)
        yield started
    finally:
        started.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_every_process_gracefully(command: Command, number: signal.Signals) -> None:
    command.parent.send_signal(number)
    assert command.end() == (0, "")
    assert command.stopped == {"1", "2", "3"}


async def test_health_file_contains_every_process_until_a_killed_one_stops_the_others_and_sets_the_exit_code(
    command: Command,
) -> None:
    found = await eventually(partial(health, command))
    assert [process["running"] for process in found["processes"]] == [True, True, True]
    lines = [f'things{{process="{number}"}} 1' for number in (1, 2, 3)]
    assert respond(command.port, path="/metrics") == (200, "".join(f"{line}\n" for line in lines).encode())
    os.kill(await command.pid(2), signal.SIGKILL)
    assert command.end() == (137, "process 2 of 3 exited with code 137; the others were stopped\n")
    assert command.stopped == {"1", "3"}


def test_error_of_a_process_is_reported_in_one_line(command: Command) -> None:
    (command.folder / "3.fail").touch()
    code, log = command.end()
    assert code == 2
    assert log.splitlines() == [
        "flowkit: the setting is wrong",
        "process 3 of 3 exited with code 2; the others were stopped",
    ]
    assert command.stopped == {"1", "2"}


def test_parent_waits_for_the_metrics_of_a_process_only_for_some_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = multiprocessing.Pipe()
    scrape = replicas._Scrape(ours)
    monkeypatch.setattr(replicas, "_SCRAPE_TIMEOUT_SEC", 0.01)
    assert scrape.read() is None
    monkeypatch.undo()
    texts = iter((b"late", b"new"))
    with replicas.scraped(replicas.ReplicaReports(scrapes=theirs), lambda: next(texts)):
        assert scrape.read() == b"new"
    ours.close()
    assert scrape.read() is None


def test_readers_wait_for_their_turn_no_longer_than_for_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = multiprocessing.Pipe()
    scrape = replicas._Scrape(ours)
    monkeypatch.setattr(replicas, "_SCRAPE_TIMEOUT_SEC", 0.01)
    with scrape.lock:
        assert scrape.read() is None


async def suspended(pid: int) -> bool:
    """Return whether all threads of a process have stopped, which takes a while on a busy machine."""
    return await asyncio.to_thread(
        lambda: all("\nState:\tT" in each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/status"))
    )


def test_all_processes_are_asked_for_their_metrics_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3)

    def read(_: object) -> bytes:
        together.wait(EVENT_TIMEOUT_SEC)
        return b"1"

    monkeypatch.setattr(replicas._Scrape, "read", read)
    metrics: Any = SimpleNamespace(join=lambda texts: b"".join(texts.values()))
    made = replicas._Replicas(lambda *_: None, [Path(name) for name in "abc"], metrics, False)
    assert made._render() == b"111"


async def test_suspended_processes_only_delay_the_metrics_of_the_others(command: Command) -> None:
    pids = [await command.pid(number) for number in (1, 2)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        await eventually(partial(suspended, pid))

    async def is_read() -> bool:
        return respond(command.port, path="/metrics") == (200, b'things{process="3"} 1\n')

    await eventually(is_read)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


async def test_processes_stop_when_the_command_is_killed(command: Command) -> None:
    command.parent.kill()
    for number in (1, 2, 3):
        await until_gone(await command.pid(number))
    assert command.stopped == {"1", "2", "3"}


async def health(command: Command) -> dict[str, Any] | None:
    """Return what the health file of a command says, as soon as that is good."""
    file = command.folder / "health.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found if found.get("ok") else None


@pytest.mark.parametrize(
    ("running", "processes", "ok"),
    [
        (True, ({"ok": True}, {"ok": True}), True),
        (True, ({"ok": True}, {"ok": False}), False),
        (True, ({"ok": True}, None), False),
        (False, ({"ok": True}, {"ok": True}), False),
    ],
)
def test_health_is_ok_if_every_process_is(
    running: bool, processes: tuple[dict[str, bool] | None, ...], ok: bool
) -> None:
    assert ReplicasHealth(running=running, processes=processes).ok is ok
