"""A reader who follows a page: writes its files, runs its commands, and compares their output."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.docs.pages import SHELL, blocks
from tests.fork_server import fork_server, forked
from tests.integration.harness import EVENT_TIMEOUT_SEC

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.docs.pages import Block

REMEMBER = 'trap \'code=$?; export -p > "$STATE/exports"; pwd > "$STATE/folder"; exit $code\' EXIT\n'
RECALL = 'source "$STATE/exports"; cd "$(cat "$STATE/folder")"; set -e\n'


_MOST_REPEATS = 100
"""How often a command is repeated. Each takes some tenths of a second."""


class Terminal:
    """A command that runs while the reader does other things."""

    def __init__(self, command: list[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.output = ""
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader_thread = threading.Thread(target=self._read, daemon=True)
        self._reader_thread.start()

    def _read(self) -> None:
        with self._process:
            for line in self._process.stdout or ():
                self._append(line)
        self._append("")

    def _append(self, text: str) -> None:
        with self._changed:
            self.output += text
            self._changed.notify_all()

    def wait_for(self, text: str) -> None:
        """Wait until the command has printed `text`; raises AssertionError at its end or after EVENT_TIMEOUT_SEC."""
        with self._changed:
            self._changed.wait_for(
                lambda: text in self.output or self._process.poll() is not None, EVENT_TIMEOUT_SEC
            )
        assert text in self.output, f"never printed {text!r}:\n{self.output}"

    def press_ctrl_c(self) -> None:
        """Interrupt the command and wait for its end."""
        os.killpg(self._process.pid, signal.SIGINT)
        self._process.wait(EVENT_TIMEOUT_SEC)

    def close(self) -> None:
        """Stop the command with all its children, by force if necessary."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(EVENT_TIMEOUT_SEC)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reader_thread.join(EVENT_TIMEOUT_SEC)


class Reader:
    """Follows pages in one folder; `replacements` maps addresses on the page to real ones."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], replacements: Mapping[str, str] | None = None
    ) -> None:
        self._home, self._state = folder / "home", folder / "state"
        self._home.mkdir()
        self._state.mkdir()
        self._replacements = dict(replacements or {})
        self._terminals: dict[str, Terminal] = {}
        self._output: str | None = None
        path = os.pathsep.join([self._programs(), str(Path(sys.executable).parent), environment["PATH"]])
        terminal_settings = {
            "TERM": "dumb",
            "COLUMNS": "120",
            "PYTHONUNBUFFERED": "1",
            "STATE": str(self._state),
        }
        self._environment = {**environment, **terminal_settings, **fork_server().variables, "PATH": path}
        (self._state / "folder").write_text(str(self._home), encoding="utf-8")
        (self._state / "exports").touch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for terminal in self._terminals.values():
            terminal.close()

    def _programs(self) -> str:
        """Return a folder with `flowkit`, which runs as a fork, to save the seconds in which each command imports."""
        program = self._state / "programs/flowkit"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {shlex.join(forked())} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
        return str(program.parent)

    @property
    def folder(self) -> Path:
        """Return the current folder after the commands so far."""
        return Path((self._state / "folder").read_text(encoding="utf-8").strip())

    def follow(self, page: Path) -> None:
        """Follow the page block by block; raises AssertionError with the block that fails."""
        for block in blocks(page):
            self._do(block)

    def _do(self, block: Block) -> None:
        if key := block.marks.get("press"):
            self._terminals[key.removeprefix("Ctrl-C in ")].press_ctrl_c()
        elif name := block.marks.get("file"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(self._with_replacements(block.text), encoding="utf-8")
        elif block.language in SHELL:
            self._output = None if "not run" in block.marks else self._run_block(block)
        elif block.language == "text" and self._output is not None:
            expect(block, self._output)
            self._output = None

    def _with_replacements(self, text: str) -> str:
        for written, real in self._replacements.items():
            text = text.replace(written, real)
        return text

    def _run_block(self, block: Block) -> str:
        command, name = self._with_replacements(block.text), block.marks.get("terminal")
        if name is None:
            wanted, output = self._with_replacements(block.marks.get("until", "")), self._run(command, block)
            for _ in range(_MOST_REPEATS):
                if wanted in output:
                    return output
                output = self._run(command, block)
            raise AssertionError(f"{block.place} never printed {wanted!r}:\n{output}")
        words = ["bash", "-c", RECALL + command]
        terminal = self._terminals[name] = Terminal(words, self.folder, self._environment)
        terminal.wait_for(self._with_replacements(block.marks["until"]))
        return terminal.output

    def _run(self, command: str, block: Block) -> str:
        done = subprocess.run(
            ["bash", "-c", RECALL + REMEMBER + command],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=EVENT_TIMEOUT_SEC,
            check=False,
        )
        wanted = int(block.marks.get("exit", "0"))
        assert done.returncode == wanted, (
            f"{block.place} ended with {done.returncode}:\n{done.stdout}{self._other_terminals()}"
        )
        return done.stdout

    def _other_terminals(self) -> str:
        return "".join(f"\n--- in terminal {name}\n{each.output}" for name, each in self._terminals.items())


def expect(block: Block, printed: str) -> None:
    """Check that the output contains the lines of a block in order; `…` matches anything."""
    lines = iter(printed.splitlines())
    for shown in filter(None, (line.strip() for line in block.text.splitlines())):
        parts = re.split(r"\s*…\s*", shown)
        pattern = ".*".join(r"\s+".join(map(re.escape, part.split())) for part in parts)
        found = any(re.search(pattern, line) for line in lines)
        assert found, f"{block.place} shows {shown!r}, which is not in the output\n{printed}"
