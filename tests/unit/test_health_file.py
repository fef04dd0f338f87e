"""The health file of a process, and how a container's health check reads it."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING

import pytest
from tests.integration.harness import EVENT_TIMEOUT_SEC

from flowkit.attempt.background import Health, LoopHealth
from flowkit.cli import health as module
from flowkit.cli.health import health_file, polled_mark
from flowkit.cli.health_check import own_problem
from flowkit.cli.replicas import ReplicasHealth

if TYPE_CHECKING:
    from pathlib import Path

    from flowkit.cli.health import Reported

GOOD = Health(running=True, loops=(LoopHealth(name="the sweep", running=True),))


def written(path: Path, health: Reported) -> None:
    """Let a process write its health file once."""
    module._write(path, health)


def test_process_refreshes_its_file_and_removes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_EVERY_SEC", 0.001)
    path, looked = tmp_path / "health", threading.Semaphore(0)

    def health() -> Health:
        looked.release()
        return GOOD

    with health_file(str(path), health):
        for _ in range(3):
            assert looked.acquire(timeout=EVENT_TIMEOUT_SEC)
        assert json.loads(path.read_text())["ok"] is True
    assert list(tmp_path.iterdir()) == []


def test_process_removes_the_mark_of_an_earlier_one_and_its_own(tmp_path: Path) -> None:
    mark = polled_mark(tmp_path / "health")
    mark.touch()
    with health_file(str(tmp_path / "health"), lambda: GOOD):
        assert not mark.exists()
        mark.touch()
    assert not mark.exists()


def test_unwritable_file_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with health_file(str(tmp_path / "absent" / "health"), lambda: GOOD):
        pass
    assert "cannot be written" in caplog.text


def test_without_a_path_nothing_is_written() -> None:
    with health_file(None, lambda: GOOD):
        pass


def test_healthy_process_passes_the_check(tmp_path: Path) -> None:
    written(tmp_path / "health", GOOD)
    assert own_problem(tmp_path / "health") == ""


@pytest.mark.parametrize(
    ("health", "reported"),
    [
        (Health(running=False, error="the connection broke"), "not running: the connection broke"),
        (Health(running=True, loops=(LoopHealth(name="the sweep"),)), "not running: the sweep"),
        (Health(running=False), "not running: the process has stopped"),
        (ReplicasHealth(running=True, processes=({"ok": True}, None)), "not running: process 2 of 2"),
    ],
)
def test_process_whose_components_have_ended_is_unhealthy(
    tmp_path: Path, health: Reported, reported: str
) -> None:
    written(tmp_path / "health", health)
    assert own_problem(tmp_path / "health") == reported


def test_old_or_missing_file_means_a_hanging_or_ended_process(tmp_path: Path) -> None:
    assert "cannot be read" in own_problem(tmp_path / "health")
    (tmp_path / "health").write_text(json.dumps({"at": time.time() - 60, "ok": True}))
    assert "60 seconds ago: the process hangs or has ended" in own_problem(tmp_path / "health")
