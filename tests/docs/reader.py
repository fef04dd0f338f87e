"""Somebody who follows a page: writes its files, types its commands, and compares what is printed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.docs.pages import SHELL, blocks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.docs.pages import Block

CEILING = 90.0
"""Seconds after which something that should have happened has not; far above what it takes."""

REMEMBER = 'trap \'code=$?; export -p > "$STATE/exports"; pwd > "$STATE/folder"; exit $code\' EXIT\n'
RECALL = 'source "$STATE/exports"; cd "$(cat "$STATE/folder")"; set -e\n'


class Terminal:
    """A command that goes on while the reader does other things."""

    def __init__(self, command: list[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.output = ""
        self._news = threading.Condition()
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
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        with self._process:
            for line in self._process.stdout or ():
                self._hear(line)
        self._hear("")

    def _hear(self, text: str) -> None:
        with self._news:
            self.output += text
            self._news.notify_all()

    def wait_for(self, text: str) -> None:
        """Return when it has printed `text`; AssertionError when it ends before, or takes too long."""
        with self._news:
            self._news.wait_for(lambda: text in self.output or self._process.poll() is not None, CEILING)
        assert text in self.output, f"never printed {text!r}:\n{self.output}"

    def press_ctrl_c(self) -> None:
        """Interrupt what runs in it, and wait for its end."""
        os.killpg(self._process.pid, signal.SIGINT)
        self._process.wait(CEILING)

    def close(self) -> None:
        """End it with all its children, whatever they do."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(CEILING)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._listener.join(CEILING)


class Reader:
    """Follows pages in one folder; `instead` has what stands for the addresses that only a page can know."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], instead: Mapping[str, str] | None = None
    ) -> None:
        self._home, self._state = folder / "home", folder / "state"
        self._home.mkdir()
        self._state.mkdir()
        self._instead = dict(instead or {})
        self._terminals: dict[str, Terminal] = {}
        self._printed: str | None = None
        programs = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        quiet = {"TERM": "dumb", "COLUMNS": "120", "PYTHONUNBUFFERED": "1", "STATE": str(self._state)}
        self._environment = {**environment, **quiet, "PATH": programs}
        (self._state / "folder").write_text(str(self._home), encoding="utf-8")
        (self._state / "exports").touch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for terminal in self._terminals.values():
            terminal.close()

    @property
    def folder(self) -> Path:
        """Where the commands have led."""
        return Path((self._state / "folder").read_text(encoding="utf-8").strip())

    def follow(self, page: Path) -> None:
        """Do what the page says, block by block; AssertionError names the one that does not come true."""
        for block in blocks(page):
            self._do(block)

    def _do(self, block: Block) -> None:
        if key := block.marks.get("press"):
            self._terminals[key.removeprefix("Ctrl-C in ")].press_ctrl_c()
        elif name := block.marks.get("file"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(self._meant(block.text), encoding="utf-8")
        elif block.language in SHELL:
            self._printed = None if "not run" in block.marks else self._type(block)
        elif block.language == "text" and self._printed is not None:
            expect(block, self._printed)
            self._printed = None

    def _meant(self, text: str) -> str:
        for written, real in self._instead.items():
            text = text.replace(written, real)
        return text

    def _type(self, block: Block) -> str:
        command, name = self._meant(block.text), block.marks.get("terminal")
        if name is None:
            return self._run(command, block)
        words = ["bash", "-c", RECALL + command]
        terminal = self._terminals[name] = Terminal(words, self.folder, self._environment)
        terminal.wait_for(self._meant(block.marks["until"]))
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
            timeout=CEILING,
            check=False,
        )
        wanted = int(block.marks.get("exit", "0"))
        assert done.returncode == wanted, (
            f"{block.place} ended with {done.returncode}:\n{done.stdout}{self._others()}"
        )
        return done.stdout

    def _others(self) -> str:
        return "".join(f"\n--- in terminal {name}\n{each.output}" for name, each in self._terminals.items())


def expect(block: Block, printed: str) -> None:
    """The lines of a block stand in what was printed, in this order; `…` is anything, blanks are as many as there are."""
    lines = iter(printed.splitlines())
    for shown in filter(None, (line.strip() for line in block.text.splitlines())):
        parts = re.split(r"\s*…\s*", shown)
        pattern = ".*".join(r"\s+".join(map(re.escape, part.split())) for part in parts)
        found = any(re.search(pattern, line) for line in lines)
        assert found, f"{block.place} shows {shown!r}, which did not come in\n{printed}"
