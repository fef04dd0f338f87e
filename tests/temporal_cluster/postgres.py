"""A PostgreSQL server that tests may kill, with the settings that it has after its installation."""

from __future__ import annotations

import os
import pwd
import select
import shutil
import subprocess
import tempfile
import weakref
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flowkit.local.errors import InstallFailed
from flowkit.local.install import require_program
from flowkit.local.ports import HOST, free_port
from flowkit.local.process import ServerProcess
from tests.temporal_cluster.programs import ACCOUNTS, installed_postgres, postgres_account

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

USER = "postgres"
MAX_CONNECTIONS = 300
"""Each of five processes of Temporal opens up to 20 connections for its data, and others for visibility."""
EXIT_SECONDS = 15.0


class PostgresServer(ServerProcess):
    """PostgreSQL on a free port of this machine, without passwords.

    Its data survive `stop` and `kill`, and end with the object. For root, another account runs it, and owns the data.
    """

    name = "postgres"

    def __init__(self, folder: Path, *, options: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self._options = {"max_connections": str(MAX_CONNECTIONS), **(options or {})}
        self._data: Path | None = None
        super().__init__(folder, self.port)

    @classmethod
    def install(cls) -> None:
        """Install Debian's package, if there is no PostgreSQL."""
        installed_postgres()

    @property
    def url(self) -> str:
        """The URL of the database that exists from the beginning."""
        return f"postgresql://{USER}@{HOST}:{self.port}/postgres"

    def command(self) -> list[str]:
        """Return the command that runs the server; make its data folder before the first start."""
        if self._data is None:
            self._data = self._initialized()
        given = {"listen_addresses": HOST, "unix_socket_directories": "", **self._options}
        options = [part for name, value in given.items() for part in ("-c", f"{name}={value}")]
        return self._as_account("postgres", "-D", str(self._data), "-p", str(self.port), *options)

    def is_ready(self) -> bool:
        """Whether the server accepts connections, which it does not while it recovers from a kill."""
        command = (
            str(installed_postgres() / "pg_isready"),
            "-q",
            "-U",
            USER,
            "-h",
            HOST,
            "-p",
            str(self.port),
        )
        return subprocess.run(command, check=False, timeout=10).returncode == 0

    def kill(self) -> None:
        """Kill the server like a crash. Return when its processes, which notice that, have exited."""
        with ExitStack() as stack:
            children = [stack.enter_context(_opened(pid)) for pid in self._children()]
            super().kill()
            for child in children:
                select.select([child], [], [], EXIT_SECONDS)

    def _children(self) -> Sequence[int]:
        """Return the ids of the server's child processes."""
        if self._data is None:
            return ()
        with suppress(OSError, IndexError):
            server = (self._data / "postmaster.pid").read_text().split()[0]
            return [*map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split())]
        return ()

    def _initialized(self) -> Path:
        """Return a new data folder. The account that runs the server cannot reach the folders of pytest."""
        folder = Path(tempfile.mkdtemp(prefix="flowkit-postgres-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        if os.geteuid() == 0:
            shutil.chown(folder, user=postgres_account() or "")
        options = (f"--username={USER}", "--auth=trust", "--encoding=UTF8", "--locale=C")
        command = self._as_account("initdb", "-D", str(folder / "data"), *options)
        done = subprocess.run(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            raise InstallFailed(f"initdb of PostgreSQL failed: {done.stdout.strip()}")
        return folder / "data"

    def _as_account(self, program: str, *arguments: str) -> list[str]:
        """Return the command that runs a program of PostgreSQL, for root as another account."""
        command = [str(installed_postgres() / program), *arguments]
        if os.geteuid() != 0:
            return command
        if (account := postgres_account()) is None:
            raise InstallFailed(
                f"PostgreSQL does not run as root, and none of the accounts {', '.join(ACCOUNTS)} exists; "
                "run as another user"
            )
        setpriv = require_program("setpriv", remedy="install util-linux, or run as another user")
        group = pwd.getpwnam(account).pw_gid
        # The change of the account clears the signal that ends the server with its guard.
        changed = (f"--reuid={account}", f"--regid={group}", "--clear-groups", "--pdeathsig=INT")
        return [setpriv, *changed, *command]


@contextmanager
def _opened(pid: int) -> Iterator[int]:
    """Yield a file descriptor that becomes readable when a process exits."""
    try:
        opened = os.pidfd_open(pid)
    except ProcessLookupError:
        opened = os.open(os.devnull, os.O_RDONLY)
    try:
        yield opened
    finally:
        os.close(opened)
