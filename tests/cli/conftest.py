"""The `flowkit` program as a person runs it, in a folder of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.conftest import world
from tests.integration.world import EVENT_TIMEOUT_SEC, FLOWKIT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["world"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramOutput:
    """What the program said, and how it ended."""

    code: int
    out: str
    err: str


class Program:
    """Runs `flowkit` to its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def write(self, name: str, text: str) -> str:
        """A file in the folder."""
        (self.folder / name).write_text(text, encoding="utf-8")
        return name

    def run(self, *arguments: str, env: Mapping[str, Any] | None = None, stdin: str = "") -> ProgramOutput:
        """The program's answer."""
        done = subprocess.run(
            [FLOWKIT, *arguments],
            cwd=self.folder,
            env={**os.environ, **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=EVENT_TIMEOUT_SEC,
            check=False,
        )
        return ProgramOutput(code=done.returncode, out=done.stdout, err=done.stderr)

    def start(self, *arguments: str, env: Mapping[str, Any]) -> subprocess.Popen[str]:
        """The program, running; killed at the end of the test."""
        pipe = subprocess.PIPE
        started = subprocess.Popen(
            [str(FLOWKIT), *arguments], cwd=self.folder, env=env, stdout=pipe, stderr=pipe, text=True
        )
        self._started.append(started)
        return started

    def close(self) -> None:
        """Kill what still runs."""
        for process in self._started:
            process.kill()
            process.communicate()

    async def call(self, *arguments: str, env: Mapping[str, Any] | None = None) -> ProgramOutput:
        """The program's answer, while the servers and engines of this process go on."""
        return await asyncio.to_thread(self.run, *arguments, env=env)


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """The program, in an empty folder."""
    made = Program(tmp_path)
    yield made
    made.close()
