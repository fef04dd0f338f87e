"""What a run has to give back at its end: processes, temporary files, clean-ups (spec: RunContext)."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_logger = logging.getLogger("flowkit.worker")

_LAST_WORDS_SEC = 0.5
_TAIL_BYTES = 4_096
"""Of a process's output, how much is kept for the log."""


class Resources:
    """Given back in reverse order of their registration; an error of one does not keep the others."""

    def __init__(self) -> None:
        self._clean_ups: list[Callable[[], Any]] = []

    def add(self, clean_up: Callable[[], Any]) -> None:
        """Call `clean_up`, plain or coroutine function, at the end of the run."""
        self._clean_ups.append(clean_up)

    def add_path(self, path: str | os.PathLike[str]) -> None:
        """Remove a file or folder at the end of the run."""
        self.add(lambda: _remove(Path(path)))

    def add_process(self, process: Any) -> None:
        """End a process at the end of the run, if it still runs then."""
        self.add(lambda: _end_now(process))

    async def release(self) -> None:
        """Give everything back."""
        while self._clean_ups:
            clean_up = self._clean_ups.pop()
            try:
                await _call(clean_up)
            except (Exception, asyncio.CancelledError):
                _logger.exception("a clean-up of the run failed; the others go on")


async def _call(clean_up: Callable[[], Any]) -> None:
    answer = clean_up()
    if inspect.isawaitable(answer):
        await answer


class Subprocess:
    """A command in a process group of its own; its output is read, so that it never waits for a reader."""

    def __init__(self, process: asyncio.subprocess.Process, output: int) -> None:
        self._process = process
        self._tail = bytearray()
        self._reading = asyncio.create_task(self._read(output))

    @classmethod
    async def start(cls, *command: str) -> Subprocess:
        """Start the command; OSError when there is none of that name."""
        ours, theirs = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                start_new_session=True,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return cls(process, ours)

    async def _read(self, output: int) -> None:
        """A pipe of our own: asyncio's `wait` would wait until all who inherited one of its pipes have ended."""
        reader = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output, "rb", 0)
        )
        try:
            while chunk := await reader.read(65_536):
                self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
        finally:
            pipe.close()

    async def wait(self) -> int:
        """Its return code; below zero: the signal that ended it."""
        code = await self._process.wait()
        if code != 0:
            await asyncio.wait([self._reading], timeout=_LAST_WORDS_SEC)
            _logger.warning("a subprocess ended with code %d: %s", code, self._said())
        return code

    def _said(self) -> str:
        return self._tail.decode(errors="replace").strip()[-500:]

    async def end(self, grace_sec: float) -> None:
        """Terminate its whole group, and kill it when it still runs after `grace_sec`."""
        if self._process.returncode is None:
            _signal_group(self._process.pid, signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_sec)
        _signal_group(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._reading.cancel()
        await asyncio.wait([self._reading])


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _end_now(process: Any) -> None:
    """A process that a handler started itself; its group is ended only when it leads one of its own."""
    with suppress(ProcessLookupError):
        leads_group = os.getpgid(process.pid) == process.pid
        if leads_group:
            _signal_group(process.pid, signal.SIGKILL)
        elif process.returncode is None:
            process.kill()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
