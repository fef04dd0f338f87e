"""The health file of a process, and how a container's health check reads it."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.integration.harness import ROOT

from flowkit.attempt.background import Health, LoopHealth
from flowkit.cli import health as module
from flowkit.cli.health import health_file

if TYPE_CHECKING:
    from pathlib import Path

GOOD = Health(running=True, loops=(LoopHealth(name="the sweep", running=True),))


@pytest.fixture
def check() -> Any:
    """Return deploy/healthcheck.py as a module."""
    spec = importlib.util.spec_from_file_location("healthcheck", ROOT / "deploy/healthcheck.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def written(path: Path, health: Health) -> None:
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
            assert looked.acquire(timeout=10)
        assert json.loads(path.read_text())["ok"] is True
    assert list(tmp_path.iterdir()) == []


def test_unwritable_file_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with health_file(str(tmp_path / "absent" / "health"), lambda: GOOD):
        pass
    assert "cannot be written" in caplog.text


def test_without_a_path_nothing_is_written() -> None:
    with health_file(None, lambda: GOOD):
        pass


def test_healthy_process_passes_the_check(tmp_path: Path, check: Any) -> None:
    written(tmp_path / "health", GOOD)
    assert check.own_problem(tmp_path / "health") == ""


@pytest.mark.parametrize(
    ("health", "reported"),
    [
        (Health(running=False, error="the connection broke"), "not running: the connection broke"),
        (Health(running=True, loops=(LoopHealth(name="the sweep"),)), "not running: the sweep"),
    ],
)
def test_process_whose_components_have_ended_is_unhealthy(
    tmp_path: Path, check: Any, health: Health, reported: str
) -> None:
    written(tmp_path / "health", health)
    assert check.own_problem(tmp_path / "health") == reported


def test_old_or_missing_file_means_a_hanging_or_ended_process(tmp_path: Path, check: Any) -> None:
    assert "cannot be read" in check.own_problem(tmp_path / "health")
    (tmp_path / "health").write_text(json.dumps({"at": time.time() - 60, "ok": True}))
    assert "60 seconds ago: the process hangs or has ended" in check.own_problem(tmp_path / "health")
