"""Local servers of the tests are their own, and so are the Pythons that they start."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def _no_servers_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TEMPORAL_ADDRESS", "MONGO_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def python() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts another Python, which may wait for the end of its stdin, and ends it after the test."""
    started: list[subprocess.Popen[str]] = []
    pipe = subprocess.PIPE

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, *arguments], stdin=pipe, stdout=pipe, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
