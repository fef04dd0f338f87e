"""A server run as a child process: started, awaited, stopped, killed, started again."""

import os
import shutil
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from flowkit.local.errors import (
    DevServerError,
    DiskFull,
    PortInUse,
    ProcessMisused,
    ServerEnded,
    ServerNotReady,
    log_tail,
    translate_write_errors,
)
from flowkit.local.folder_lock import folder_lock
from flowkit.local.install.diagnosis import mentions_full_disk
from flowkit.local.ports import is_free
from flowkit.local.supervisor import supervised

START_TIMEOUT_SECONDS = 60.0
POLL_INTERVAL_SECONDS = 0.02
MAX_LOG_BYTES = 1 << 18
MIN_FREE_BYTES = 1 << 20
"""A full disk also keeps a server from logging that it is full."""


class ServerProcess(ABC):
    """One server with a folder for its data and its log, on ports that stay the same for its whole life.

    The server ends with the process that started it, even if that is killed with SIGKILL: it then saves its data,
    and the next server on the folder waits for that. What it has started itself ends with it. Nothing is ever ended
    that was not started here. Every method may be called from any thread, one at a time, `give_up` at any time.
    """

    name: str
    usage_error_code: int = -1
    """The exit code by which it tells that its command line is wrong."""

    def __init__(self, folder: Path, *ports: int) -> None:
        self.folder = folder.resolve()
        self.log = self.folder / f"{self.name}.log"
        self.exit_code: int | None = None
        """With what code it ended, by whatever cause; None before its end."""
        self._ports = ports
        self._log_start = 0
        self._start_cancelled = threading.Event()
        self._supervisor: subprocess.Popen[bytes] | None = None

    @classmethod
    @abstractmethod
    def install(cls) -> None:
        """Make the server's program present on this machine; quick when it already is."""

    @abstractmethod
    def command(self) -> list[str]:
        """The command that runs the server in the foreground; may install first."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the server answers now; asked again and again, so it must not wait long."""

    def environment(self) -> Mapping[str, str]:
        """Environment variables that it has beside those of this process."""
        return {}

    def cleanup_command(self) -> Sequence[str]:
        """A command that cleans up behind the server once it has ended; none if empty."""
        return ()

    @property
    def running(self) -> bool:
        """Whether the server was started and has not ended, by whatever cause."""
        if self._supervisor is None:
            return False
        code = self._supervisor.poll()
        if code is not None:
            self.exit_code = code
        return code is None

    def start(self) -> None:
        """Start the server and return when it is ready; nothing happens if it is running.

        Raises a DevServerError if that cannot be, and leaves nothing running then.
        """
        if self.running:
            return
        self._terminate()
        with translate_write_errors(self.folder, what=f"{self.name} cannot start"):
            self.folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(self.folder / f"{self.name}.lock", self._start_cancelled) as lock:
            self._check_ports()
            self._supervisor = self._launch(self.command(), lock)
            try:
                self._wait_until_ready(self._supervisor)
            except BaseException:
                self._terminate(force=True)
                raise

    def stop(self) -> None:
        """End the server with SIGTERM (SIGKILL after 15 seconds) and return when it is gone; its data stay."""
        self._start_cancelled.clear()
        self._terminate()

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would, and return when it is gone."""
        self._start_cancelled.clear()
        self._terminate(force=True)

    def cancel_start(self) -> None:
        """Make a start that is under way in another thread end soon with a DevServerError; `stop` takes it back."""
        self._start_cancelled.set()

    def restart(self) -> None:
        """Stop the server, if it runs, and start it on the same ports with the same data."""
        self.stop()
        self.start()

    def exit_error(self) -> ServerEnded:
        """The error that tells that it has ended by itself."""
        return ServerEnded(name=self.name, code=self.exit_code, log=self.log, lines=log_tail(self.read_log()))

    def read_log(self) -> str:
        """What its log holds since its last start; of a long one the end."""
        with suppress(OSError), self.log.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - MAX_LOG_BYTES))
            return log.read().decode(errors="replace")
        return ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _check_ports(self) -> None:
        for port in self._ports:
            if not is_free(port):
                raise PortInUse(name=self.name, port=port)

    def _launch(self, command: list[str], lock: int) -> subprocess.Popen[bytes]:
        self.exit_code = None
        with translate_write_errors(self.folder, what=f"{self.name} cannot start"):
            log = self.log.open("ab")
        with log:
            self._log_start = log.tell()
            # A session of its own: Ctrl-C reaches the owner only, which then stops its servers in order.
            return subprocess.Popen(
                supervised(command, cleanup=self.cleanup_command()),
                bufsize=0,
                env={**os.environ, **self.environment()},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lock],
            )

    def _wait_until_ready(self, supervisor: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self.is_ready():
            with suppress(subprocess.TimeoutExpired):
                self.exit_code = supervisor.wait(POLL_INTERVAL_SECONDS)
                raise self._startup_error(f"ended at its start with code {self.exit_code}")
            if self._start_cancelled.is_set():
                raise self._startup_error("was stopped before it was ready")
            if time.monotonic() > deadline:
                raise self._startup_error(f"was not ready within {START_TIMEOUT_SECONDS:.0f} seconds")

    def _startup_error(self, reason: str) -> DevServerError:
        text = self.read_log()
        lines = log_tail(text)
        if mentions_full_disk(text) or shutil.disk_usage(self.folder).free < MIN_FREE_BYTES:
            return DiskFull(what=f"{self.name} cannot start", folder=self.folder, log_lines=lines)
        kind = ProcessMisused if self.exit_code == self.usage_error_code else ServerNotReady
        return kind(name=self.name, reason=reason, log=self.log, lines=lines)

    def _terminate(self, *, force: bool = False) -> None:
        """Close the pipe, which tells the guard to end its server, and wait for both."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        pipe = _stdin_of(supervisor)
        if force:
            with suppress(BrokenPipeError):
                pipe.write(b"k")
        pipe.close()
        self.exit_code = supervisor.wait()


def _stdin_of(supervisor: subprocess.Popen[bytes]) -> IO[bytes]:
    assert supervisor.stdin is not None
    return supervisor.stdin
