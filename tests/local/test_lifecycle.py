"""Starting and stopping several processes at the same time."""

from pathlib import Path

import pytest
from tests.local.processes import (
    WAIT_FOREVER,
    ScriptedProcess,
)

from flowkit.local.errors import ServerNotReady
from flowkit.local.process import start_all, stop_all


def test_processes_start_at_the_same_time(tmp_path: Path) -> None:
    """Each process is ready only after the other has started."""
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


def test_if_one_process_fails_to_start_the_others_are_stopped(tmp_path: Path) -> None:
    slow = ScriptedProcess(tmp_path, WAIT_FOREVER, ready=False, name="slow")
    bad = ScriptedProcess(tmp_path, "raise SystemExit(3)", ready=False, name="bad")
    with pytest.raises(ServerNotReady, match="bad exited during startup with code 3"):
        start_all([slow, bad])
    assert not slow.running
    assert slow.exit_code is not None, "it was started and has exited"
