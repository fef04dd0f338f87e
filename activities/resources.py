"""Resources that a run releases at its end: processes, temporary files, clean-up callbacks (spec: RunContext)."""

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

_OUTPUT_WAIT_SEC = 0.5
"""How long to wait for the last output of a failed process before logging it."""
_TAIL_BYTES = 4_096
"""How many bytes at the end of a process's output to keep for the log."""


class Resources:
    """Releases resources in reverse order of registration. An error in one does not prevent the others."""

    def __init__(self) -> None:
        self._clean_ups: list[Callable[[], Any]] = []

    def add(self, clean_up: Callable[[], Any]) -> None:
        """Call `clean_up`, a plain or coroutine function, when the run ends."""
        self._clean_ups.append(clean_up)

    def add_path(self, path: str | os.PathLike[str]) -> None:
        """Remove a file or directory when the run ends."""
        self.add(lambda: _remove(Path(path)))

    def add_process(self, process: Any) -> None:
        """Kill a process when the run ends, if it is still running."""
        self.add(lambda: _end_now(process))

    async def release(self) -> None:
        """Release everything that was registered."""
        while self._clean_ups:
            clean_up = self._clean_ups.pop()
            try:
                await _call(clean_up)
            except (Exception, asyncio.CancelledError):
                _logger.exception("a cleanup callback failed; the others still run")


async def _call(clean_up: Callable[[], Any]) -> None:
    result = clean_up()
    if inspect.isawaitable(result):
        await result


class Subprocess:
    """A command in its own process group. Its output is read continuously, so that a full pipe never blocks it."""

    def __init__(self, process: asyncio.subprocess.Process, output: int) -> None:
        self._process = process
        self._tail = bytearray()
        self._reading = asyncio.create_task(self._read(output))

    @classmethod
    async def start(cls, *command: str) -> Subprocess:
        """Start the command. Raise OSError if it does not exist."""
        read_end, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        return cls(process, read_end)

    async def _read(self, output: int) -> None:
        """Read the output through a separate pipe.

        With asyncio's own pipes, `wait` would block until every process that inherited one of them has exited.
        """
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
        """Wait for the process and return its return code; a negative code is the signal that ended it."""
        code = await self._process.wait()
        if code != 0:
            await asyncio.wait([self._reading], timeout=_OUTPUT_WAIT_SEC)
            _logger.warning("a subprocess exited with code %d: %s", code, self._output_tail())
        return code

    def _output_tail(self) -> str:
        return self._tail.decode(errors="replace").strip()[-500:]

    async def end(self, grace_sec: float) -> None:
        """Terminate the whole process group, and kill it after `grace_sec` seconds."""
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
    """Kill a process that a handler started itself, and its group only if the process leads that group."""
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
