"""The event loop of FlowKit's processes."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from tests.integration.harness import EVENT_TIMEOUT_SEC
from tests.unit.event_loop import let_other_tasks_run
from tests.unit.test_resources import is_gone

from flowkit.activities.context import Subprocess
from flowkit.core import loops
from flowkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


async def kind() -> str:
    """Return the top-level module of the running loop."""
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


def test_default_loop_is_uvloop_unless_the_environment_disables_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(loops.VARIABLE, raising=False)
    assert loops.run(kind()) == "uvloop"
    monkeypatch.setenv(loops.VARIABLE, "asyncio")
    assert loops.run(kind()) == "asyncio"


def test_without_uvloop_the_loop_is_that_of_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(loops.VARIABLE, raising=False)
    monkeypatch.setattr(loops, "find_spec", lambda name: None)
    assert loops.run(kind()) == "asyncio"


@pytest.mark.parametrize(
    ("asked", "reported"), [("fast", "neither 'asyncio' nor 'uvloop'"), ("uvloop", "pip install uvloop")]
)
def test_unavailable_loop_is_rejected(monkeypatch: pytest.MonkeyPatch, asked: str, reported: str) -> None:
    monkeypatch.setenv(loops.VARIABLE, asked)
    monkeypatch.setattr(loops, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=reported):
        loops.run(kind())


async def commands() -> int:
    """Run a command that ends by itself, and one that must be killed with its child. Return the first exit code."""
    code = await (await Subprocess.start("sh", "-c", "echo last words; exit 3")).wait()
    ignores_signals = await Subprocess.start("sh", "-c", "trap '' TERM; sleep 60 & wait; sleep 60")
    await ignores_signals.end(grace_sec=0.1)
    return code


@pytest.mark.parametrize("loop", [loops.UVLOOP, loops.ASYNCIO])
def test_commands_of_handlers_run_and_end_on_both_loops(
    loop: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(loops.VARIABLE, loop)
    assert loops.run(commands()) == 3
    assert "code 3: last words" in caplog.text


async def short_commands() -> int:
    """Run commands that have exited before the loop turns again. Return how many descriptors they leave open."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        command = await Subprocess.start("true")
        while not is_gone(command._process.pid):
            pass
        assert await command.wait() == 0
        await command.end(grace_sec=60.0)
    return len(os.listdir("/proc/self/fd")) - before


@pytest.mark.parametrize("loop", [loops.UVLOOP, loops.ASYNCIO])
def test_short_commands_leave_no_pipe_open(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unclosed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: unclosed.append(raised.exc_value))
    monkeypatch.setenv(loops.VARIABLE, loop)
    assert loops.run(short_commands()) == 0
    gc.collect()
    assert unclosed == []


async def leave() -> None:
    """Exit the process, as user code must not."""
    sys.exit(3)


ENDS: dict[str, Callable[[], object]] = {
    "call_soon": lambda: asyncio.get_running_loop().call_soon(sys.exit, 3),
    "call_later": lambda: asyncio.get_running_loop().call_later(0.01, sys.exit, 3),
    "add_done_callback": lambda: asyncio.ensure_future(kind()).add_done_callback(lambda _: sys.exit(3)),
    "Task": lambda: asyncio.Task(leave()),
    "stop": lambda: asyncio.get_running_loop().stop(),
}


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
@pytest.mark.parametrize("end", ENDS)
def test_user_code_that_ends_the_loop_ends_neither_it_nor_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, end: str
) -> None:
    async def work() -> str:
        kept, later = ENDS[end](), asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, later.set)
        await later.wait()
        if isinstance(kept, asyncio.Task):
            assert isinstance(kept.exception(), SystemExit)
        return f"ended after {type(kept).__name__}"

    monkeypatch.setenv(loops.VARIABLE, kind)
    assert loops.run(work()).startswith("ended after")
    assert "the event loop runs on: user code has ended it with" in caplog.text


@pytest.mark.parametrize("error", [SystemExit(4), RuntimeError("own")])
def test_error_of_the_process_itself_ends_it(error: BaseException) -> None:
    async def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        loops.run(fail())
    assert caught.value is error


STOPPED = """
import asyncio, os, signal, sys
from flowkit.core import loops
signal.signal(signal.SIGTERM, lambda *given: sys.exit(9))
async def work():
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
    await asyncio.Event().wait()
loops.run(work())
"""


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_signal_handler_of_the_process_ends_the_loop(kind: str) -> None:
    environment = {**os.environ, loops.VARIABLE: kind}
    ended = subprocess.run(
        [sys.executable, "-c", STOPPED], env=environment, timeout=EVENT_TIMEOUT_SEC, check=False
    )
    assert ended.returncode == 9


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_process_ends_although_a_task_ignores_every_cancel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    kept: list[asyncio.Task[None]] = []

    async def ignore() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def main() -> str:
        kept.append(asyncio.create_task(ignore(), name="stubborn"))
        await let_other_tasks_run()
        return "done"

    monkeypatch.setenv(loops.VARIABLE, kind)
    monkeypatch.setattr(loops, "IGNORED_SEC", 0.05)
    assert loops.run(main()) == "done"
    assert "without 1 task of user code that ignored a cancel: stubborn" in caplog.text


async def test_some_calls_run_at_once_and_the_first_error_cancels_the_others() -> None:
    running, most, gate = 0, 0, asyncio.Event()

    async def call(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            await gate.wait()
            return number
        finally:
            running -= 1

    calls = asyncio.create_task(loops.gather_some(call, range(5), 2))
    await let_other_tasks_run()
    gate.set()
    assert await calls == [0, 1, 2, 3, 4]
    assert most == 2
    gate.clear()

    async def fail(number: int) -> int:
        return 1 // number if number < 1 else await call(number)

    with pytest.raises(ZeroDivisionError):
        await loops.gather_some(fail, [3, 2, 0, 1], 3)
    assert running == 0
