"""The event loop of FlowKit's processes."""

from __future__ import annotations

import asyncio

import pytest

from flowkit.activities.context import Subprocess
from flowkit.core import loops
from flowkit.errors import ConfigError


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
