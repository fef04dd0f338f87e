"""Temporal's server and its schema tool, built from their Go module, and PostgreSQL's programs."""

from __future__ import annotations

import glob
import os
import pwd
import shutil
from pathlib import Path

from flowkit.local.errors import InstallFailed
from flowkit.local.install import install_once, require_program, run_command

NAME = "temporal-cluster"
MODULE = "go.temporal.io/server"
VERSION = "v1.32.1"
SERVER, SCHEMA_TOOL = "cmd/server", "cmd/tools/sql"
DEBIAN = "/usr/lib/postgresql/*/bin"
"""Debian installs the server's programs outside PATH, in one folder for each version."""
ACCOUNTS = ("postgres", "nobody")
"""PostgreSQL does not run as root. The first of these accounts runs it then."""


def temporal_server() -> str:
    """Return the path of the server's program; build it if it is not in the cache. Raises InstallFailed."""
    return str(_built() / "server")


def schema_tool() -> str:
    """Return the path of the tool that makes the server's databases. Raises InstallFailed."""
    return str(_built() / "sql")


def postgres_programs(debian: str = DEBIAN) -> Path | None:
    """Return the folder with PostgreSQL's programs, the newest version of Debian's."""
    folders = [os.environ.get("PATH", ""), *sorted(glob.glob(debian), reverse=True)]
    found = shutil.which("pg_ctl", path=os.pathsep.join(folders))
    folder = Path(found).resolve().parent if found else None
    return folder if folder and (folder / "initdb").exists() else None


def installed_postgres() -> Path:
    """Return the folder with PostgreSQL's programs; install Debian's package if there is none. Raises InstallFailed."""
    if (found := postgres_programs()) is None and os.geteuid() == 0 and (apt := shutil.which("apt-get")):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for arguments in (("update",), ("install", "--yes", "--no-install-recommends", "postgresql")):
            run_command([apt, "--quiet", *arguments], folder=Path("/"), env=environment)
        found = postgres_programs()
    if found is None:
        raise InstallFailed(
            f"neither PATH nor {DEBIAN} has initdb and pg_ctl; install the package postgresql"
        )
    return found


def postgres_account() -> str | None:
    """Return the account that runs PostgreSQL for root; None without one."""
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in ACCOUNTS if name in known), None)


def _built() -> Path:
    return install_once(NAME, VERSION, _build)


def _build(folder: Path) -> None:
    """Build both programs. Go's checksum database pins the modules, unless the user's Go settings disable it."""
    go = require_program("go", remedy="install it to build Temporal's server")
    environment = {**os.environ, "GOFLAGS": "-mod=mod", "GOWORK": "off", "GOBIN": str(folder)}
    packages = (f"{MODULE}/{package}@{VERSION}" for package in (SERVER, SCHEMA_TOOL))
    run_command([go, "install", "-buildvcs=false", "-trimpath", *packages], folder=folder, env=environment)
