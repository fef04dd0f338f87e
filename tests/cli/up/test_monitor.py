"""`flowkit up` on a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
from typing import TYPE_CHECKING

import pytest
from tests.integration.harness import EVENT_TIMEOUT_SEC, FLOWKIT, Harness

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.cli.conftest import Program


class Terminal:
    """`flowkit up` on a terminal."""

    def __init__(self, folder: Path, *arguments: str, env: Mapping[str, str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [str(FLOWKIT), "up", *arguments],
            cwd=folder,
            env={**env, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.output = ""

    def wait_for(self, text: str) -> None:
        """Read until the terminal shows the text."""
        while text not in self.output:
            ready, _, _ = select.select([self._master], [], [], EVENT_TIMEOUT_SEC)
            assert ready, self.output
            self.output += os.read(self._master, 65536).decode()

    def close(self) -> None:
        """Kill the process and close the terminal."""
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.mark.server
async def test_a_terminal_shows_the_panel_until_ctrl_c(harness: Harness, program: Program) -> None:
    terminal = Terminal(program.folder, "--only", "engine", env=harness.environment)
    try:
        terminal.wait_for("FlowKit has been up for")
        terminal.wait_for("Press Ctrl-C to stop everything")
        assert f"polls queue {harness.queue}" in terminal.output
        assert "export" not in terminal.output, "the environment already has these variables"
        assert terminal.output.count("external server") == 2
        terminal.process.send_signal(2)
        terminal.wait_for("all processes stopped; data and logs removed")
        assert terminal.process.wait(EVENT_TIMEOUT_SEC) == 0
    finally:
        terminal.close()
