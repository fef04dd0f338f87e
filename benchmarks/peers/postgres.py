"""PostgreSQL for DBOS: the server of POSTGRES_URL, or a temporary one from installed programs."""

from __future__ import annotations

import glob
import os
import pwd
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowkit.local.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "POSTGRES_URL"
"""The environment variable with the URL of a database that the benchmark may use."""

DEBIAN = "/usr/lib/postgresql/*/bin"
"""Debian installs the server's programs outside PATH, in one folder for each version."""

ACCOUNTS = ("postgres", "nobody")
"""PostgreSQL does not run as root. The first of these accounts runs it then."""

_OPTIONS = (
    *("-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="),
    # Like SQLite under Temporal's development server, commits do not wait for the disk.
    *("-c", "synchronous_commit=off"),
)


def missing() -> str | None:
    """Return the sentence that says why there is no PostgreSQL, or None if there is one."""
    if os.environ.get(VARIABLE):
        return None
    if _programs() is None:
        return (
            f"skipping DBOS on PostgreSQL: {VARIABLE} is not set, and neither PATH nor {DEBIAN} has initdb and "
            "pg_ctl; install the package postgresql, or set the variable to the URL of a database for tests"
        )
    if os.geteuid() == 0 and _account() is None:
        return (
            f"skipping DBOS on PostgreSQL: PostgreSQL does not run as root, and none of the accounts "
            f"{', '.join(ACCOUNTS)} exists; run the benchmark as another user, or set {VARIABLE}"
        )
    return None


@contextmanager
def postgres() -> Iterator[str]:
    """Return the URL of a database. A server that this function starts ends with the block, and its data too."""
    if url := os.environ.get(VARIABLE):
        yield url
        return
    programs = _programs()
    assert programs is not None, "missing() returns None"
    with _folder() as folder:
        run = _Runner(programs, folder)
        run("initdb", "--username=postgres", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C")
        port = free_port()
        options = " ".join(("-p", str(port), *_OPTIONS))
        run("pg_ctl", "--wait", "--timeout=60", "--log", str(folder / "log"), "--options", options, "start")
        try:
            yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "--mode=immediate", "stop")


class _Runner:
    """Runs a program of PostgreSQL for one data folder. RuntimeError, with its output, if it fails."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs = programs
        self._folder = folder

    def __call__(self, program: str, *arguments: str) -> None:
        environment = {**os.environ, "PGDATA": str(self._folder / "data")}
        done = subprocess.run(
            [str(self._programs / program), *arguments],
            cwd=self._folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            **_as_account(),
        )
        if done.returncode:
            raise RuntimeError(f"{program} of PostgreSQL failed: {done.stdout.strip()}")


def _programs() -> Path | None:
    """Return the folder with PostgreSQL's programs, the newest version of Debian's."""
    folders = [os.environ.get("PATH", ""), *sorted(glob.glob(DEBIAN), reverse=True)]
    found = shutil.which("pg_ctl", path=os.pathsep.join(folders))
    folder = Path(found).resolve().parent if found else None
    return folder if folder and (folder / "initdb").exists() else None


def _account() -> str | None:
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in ACCOUNTS if name in known), None)


def _as_account() -> dict[str, Any]:
    return {"user": _account(), "extra_groups": ()} if os.geteuid() == 0 else {}


@contextmanager
def _folder() -> Iterator[Path]:
    """Return a temporary folder that the account of the server owns."""
    with tempfile.TemporaryDirectory(prefix="flowkit-postgres-") as name:
        if os.geteuid() == 0 and (account := _account()):
            shutil.chown(name, user=account)
        yield Path(name)
