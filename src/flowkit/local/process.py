"""A server run as a child process: started, awaited, stopped, killed, started again."""

import subprocess
import sys
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import IO, ClassVar, Self

from flowkit.local.claims import claimed
from flowkit.local.errors import PortInUse, ServerNotReady
from flowkit.local.ports import is_free

READY_WITHIN_SECONDS = 60.0
PROBE_EVERY_SECONDS = 0.02
GUARD = Path(__file__).with_name("guard.py")


class ServerProcess(ABC):
    """One server with a folder for its data and its log, on ports that stay the same for its whole life.

    The server ends with the process that started it, even if that is killed with SIGKILL: it then saves its data,
    and the next server on the folder waits for that. Nothing is ever ended that was not started here. Every method
    may be called from any thread, one at a time.
    """

    name: ClassVar[str]

    def __init__(self, folder: Path, *ports: int) -> None:
        self.folder = folder.resolve()
        self.log = self.folder / f"{self.name}.log"
        self._ports = ports
        self._guard: subprocess.Popen[bytes] | None = None

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

    @property
    def running(self) -> bool:
        """Whether the server was started and has not ended, by whatever cause."""
        return self._guard is not None and self._guard.poll() is None

    def start(self) -> None:
        """Start the server and return when it is ready; nothing happens if it is running.

        Raises a DevServerError if that cannot be, and leaves nothing running then.
        """
        if self.running:
            return
        self.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        with claimed(self.folder / f"{self.name}.lock") as claim:
            self._check_ports()
            self._guard = self._launch(self.command(), claim)
            try:
                self._wait_until_ready(self._guard)
            except BaseException:
                self.kill()
                raise

    def stop(self) -> None:
        """End the server with SIGTERM (SIGKILL after 15 seconds) and return when it is gone; its data stay."""
        if self._guard is not None:
            self._leave(self._guard)

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would, and return when it is gone."""
        if self._guard is not None:
            with suppress(BrokenPipeError):
                _pipe_to(self._guard).write(b"k")
            self._leave(self._guard)

    def restart(self) -> None:
        """Stop the server, if it runs, and start it on the same ports with the same data."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _check_ports(self) -> None:
        for port in self._ports:
            if not is_free(port):
                raise PortInUse(name=self.name, port=port)

    def _launch(self, command: list[str], claim: int) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C reaches the owner only, which then stops its servers in order.
            return subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), *command],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[claim],
            )

    def _wait_until_ready(self, guard: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + READY_WITHIN_SECONDS
        while not self.is_ready():
            with suppress(subprocess.TimeoutExpired):
                code = guard.wait(PROBE_EVERY_SECONDS)
                raise ServerNotReady(
                    name=self.name, reason=f"ended at its start with code {code}", log=self.log
                )
            if time.monotonic() > deadline:
                reason = f"was not ready within {READY_WITHIN_SECONDS:.0f} seconds"
                raise ServerNotReady(name=self.name, reason=reason, log=self.log)

    def _leave(self, guard: subprocess.Popen[bytes]) -> None:
        """Close the pipe, which tells the guard to end its server, and wait for both."""
        _pipe_to(guard).close()
        guard.wait()
        self._guard = None


def _pipe_to(guard: subprocess.Popen[bytes]) -> IO[bytes]:
    assert guard.stdin is not None
    return guard.stdin
