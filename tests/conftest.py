"""Servers for the tests: started once a test process, on free ports, stopped at its end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flowkit.local import Stack
from flowkit.text import clean
from tests.kafka_server import kafka

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

__all__ = ["kafka"]

LOGS = Path(__file__).parents[1] / ".logs"


@pytest.fixture(scope="session", autouse=True)
def _no_containers() -> None:
    """The suite runs on programs, whether or not a container engine runs here; FLOWKIT_SERVERS says otherwise."""
    os.environ.setdefault("FLOWKIT_SERVERS", "path,cache,download")


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """Temporal and Mongo; addresses in the environment win. A failed session leaves the servers' logs in .logs/."""
    folder = tmp_path_factory.mktemp("servers")
    with Stack(folder, keeps_data=False) as running:
        yield running
    if request.session.testsfailed:
        keep_logs(folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Some tests log lone surrogates, which reports cannot carry from one test process to another."""
    report = yield
    report.sections = [(name, clean(text)) for name, text in report.sections]
    return report


def keep_logs(folder: Path) -> None:
    """Copy the servers' logs to where CI prints them."""
    LOGS.mkdir(exist_ok=True)
    for log in folder.glob("*.log"):
        shutil.copy(log, LOGS / f"{folder.name}-{log.name}")


@pytest.fixture(autouse=True)
def _addresses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that use the servers, and the processes they start, find them through the environment."""
    if "stack" in request.fixturenames:
        running: Stack = request.getfixturevalue("stack")
        for name, value in running.exports.items():
            monkeypatch.setenv(name, value)
