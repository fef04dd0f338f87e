"""`flowkit up` restarts processes that exit, until one exits too often or reports a configuration error."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowkit.cli.up.keeper import MAX_RESTARTS, WINDOW_SEC, CrashCounter, Keeper, find_folders
from flowkit.cli.up.monitor import list_new
from flowkit.cli.up.plan import UpOptions, make_plan
from flowkit.cli.up.processes import Processes
from flowkit.local.errors import DevServerError, ServerEnded

if TYPE_CHECKING:
    import pytest


class Crashing:
    """A process whose starts succeed, and which exits at once."""

    usage_error_code = 2

    def __init__(self, name: str = "engine", exit_code: int = 1) -> None:
        self.name = name
        self.exit_code = exit_code
        self.running = False
        self.starts = 0

    def start(self) -> None:
        """Count the start."""
        self.starts += 1

    def exit_error(self) -> ServerEnded:
        """Return the error."""
        return ServerEnded(name=self.name, code=self.exit_code, log=Path("engine.log"), lines=["cause"])


def keeper(engine: Any = None, mongo: Any = None) -> Keeper:
    """Return the keeper of these processes."""
    processes = Processes(temporal=None, mongo=mongo, exports={}, engine=engine)
    return Keeper(make_plan(UpOptions(), {}), processes, Path())


async def check_until_error(kept: Keeper) -> DevServerError:
    """Check the processes until that raises an error, and return the error."""
    for _ in range(100):
        try:
            kept.check()
        except DevServerError as error:
            return error
        await asyncio.gather(*kept._jobs.values(), return_exceptions=True)
    raise AssertionError("no error")


async def test_sixth_crash_within_a_minute_ends_everything_with_the_last_lines_of_the_process() -> None:
    engine = Crashing()
    kept = keeper(engine)
    error = await check_until_error(kept)
    assert (engine.starts, error.log_lines, error.keeps_data) == (MAX_RESTARTS, ["cause"], True)
    restarts = [notice for notice in kept.notices if "it is restarted" in notice]
    assert restarts[-1] == "engine exited with code 1; it is restarted (5 of 5 times within a minute)"


async def test_configuration_error_ends_everything_at_once() -> None:
    engine = Crashing(exit_code=2)
    error = await check_until_error(keeper(engine))
    assert (engine.starts, error.keeps_data) == (0, True)


async def test_servers_are_not_restarted() -> None:
    server = Crashing("mongo")
    error = await check_until_error(keeper(mongo=server))
    assert (server.starts, error.keeps_data) == (0, True)


def test_crashes_of_more_than_a_minute_ago_do_not_count() -> None:
    crashes = CrashCounter()
    assert [crashes.add("a", float(second)) for second in range(3)] == [1, 2, 3]
    assert crashes.add("b", 3.0) == 1
    assert crashes.add("a", WINDOW_SEC + 1.5) == 2


def test_folders_to_watch_are_the_current_one_and_those_of_code_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here / "own", there / "other"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(here), str(there), *sys.path])
    names = ["own:A", "report=other.jobs:run", "pydantic:BaseModel", "nowhere:X"]
    assert set(find_folders(names)) == {here, there / "other"}


def test_new_notices_follow_the_known_ones_although_the_oldest_are_gone() -> None:
    assert list_new(("b", "c", "d"), ("a", "b", "c")) == ("d",)
    assert list_new(("a",), ()) == ("a",)
    assert list_new(("x",), ("a",)) == ("x",)


def test_an_engine_with_a_flow_runs_code_that_is_reloaded() -> None:
    options = UpOptions(handlers=("pipeline:flow",), flows=("pipeline:flow",))
    engine: Any = Crashing()
    processes = Processes(temporal=None, mongo=None, exports={}, engine=engine)
    assert Keeper(make_plan(options, {}), processes, Path())._with_code() == [engine]
    assert keeper(Crashing())._with_code() == []


def reloading(engine: Any) -> Keeper:
    """Return the keeper of an engine whose code is reloaded when `_changed` is set."""
    options = UpOptions(functions=("report=jobs:run",))
    kept = Keeper(
        make_plan(options, {}), Processes(temporal=None, mongo=None, exports={}, engine=engine), Path()
    )
    kept._watching = asyncio.get_running_loop().create_future()  # type: ignore[assignment]
    return kept


class Reloaded(Crashing):
    """A process that can be prepared and started unless its code is broken."""

    def __init__(self) -> None:
        super().__init__(exit_code=2)
        self.running = True
        self.problem = ""
        self.calls: list[str] = []

    def prepare(self) -> str:
        """Return the problem of the code."""
        self.calls.append("prepare")
        return self.problem

    def discard(self) -> None:
        """Note the call."""
        self.calls.append("discard")

    def stop(self) -> None:
        """Note the call."""
        self.calls.append("stop")
        self.running = False

    def start(self) -> None:
        """Note the call."""
        self.calls.append("start")
        self.running = True


async def checked(kept: Keeper) -> None:
    """Check the processes until nothing is in progress."""
    kept.check()
    while kept._jobs:
        await asyncio.gather(*kept._jobs.values(), return_exceptions=True)
        kept.check()


async def test_new_code_is_loaded_before_the_old_process_stops() -> None:
    engine = Reloaded()
    kept = reloading(engine)
    kept._changed = True
    await checked(kept)
    assert engine.calls == ["prepare", "stop", "start", "discard"]
    engine.calls, engine.problem, kept._changed = [], "flowkit: a syntax error", True
    await checked(kept)
    assert (engine.calls, engine.running) == (["prepare", "discard"], True)
    assert [*kept.notices] == ["reloaded engine", "still running the old code in engine: a syntax error"]


async def test_a_crash_while_the_code_is_broken_ends_nothing_and_the_next_code_starts_it() -> None:
    engine = Reloaded()
    kept = reloading(engine)
    engine.running, engine.problem = False, "flowkit: a syntax error"
    await checked(kept)
    assert (engine.calls, kept.is_starting("engine")) == ([], True)
    kept._changed = True
    await checked(kept)
    engine.problem, kept._changed = "", True
    await checked(kept)
    assert (engine.running, kept.is_starting("engine")) == (True, False)
    assert [*kept.notices] == [
        "engine is not running until the code changes: cause",
        "still not running engine: a syntax error",
        "reloaded engine",
    ]
