"""Runs the `flowkit` program in its own folder, as a user does."""

from __future__ import annotations

import asyncio
import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.fork_server import ForkedProcess, fork_server
from tests.integration.conftest import harness
from tests.integration.harness import EVENT_TIMEOUT_SEC

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["harness"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramOutput:
    """The output and the exit code of the program."""

    code: int
    out: str
    err: str


class Program:
    """Runs `flowkit` in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[ForkedProcess] = []

    def write(self, name: str, text: str) -> str:
        """Write a file into the folder, and return its name."""
        (self.folder / name).write_text(text, encoding="utf-8")
        return name

    def run(self, *arguments: str, env: Mapping[str, Any] | None = None, stdin: str = "") -> ProgramOutput:
        """Run the program until it exits, and return its output."""
        environment = {**os.environ, **(env or {})}
        code, out, err = fork_server().run(
            arguments, self.folder, environment, EVENT_TIMEOUT_SEC, stdin=stdin
        )
        return ProgramOutput(code=code, out=out, err=err)

    def start(self, *arguments: str, env: Mapping[str, Any]) -> ForkedProcess:
        """Start the program. It is killed at the end of the test."""
        pipe = subprocess.PIPE
        started = fork_server().start(arguments, self.folder, env, stdout=pipe, stderr=pipe)
        self._started.append(started)
        return started

    def close(self) -> None:
        """Kill all processes that still run."""
        for process in self._started:
            process.kill()
            process.communicate()

    async def call(self, *arguments: str, env: Mapping[str, Any] | None = None) -> ProgramOutput:
        """Run the program in a thread, so that the engines of this process continue, and return its output."""
        return await asyncio.to_thread(self.run, *arguments, env=env)


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """The program in an empty folder."""
    made = Program(tmp_path)
    yield made
    made.close()
