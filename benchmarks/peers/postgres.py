"""PostgreSQL for DBOS: the server of POSTGRES_URL, or a temporary one from installed programs."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.temporal_cluster.postgres import PostgresServer
from tests.temporal_cluster.programs import ACCOUNTS, DEBIAN, postgres_account, postgres_programs

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "POSTGRES_URL"
"""The environment variable with the URL of a database that the benchmark may use."""

_OPTIONS = {"synchronous_commit": "off"}
"""Like SQLite under Temporal's development server, commits do not wait for the disk."""


def missing() -> str | None:
    """Return the sentence that says why there is no PostgreSQL, or None if there is one."""
    if os.environ.get(VARIABLE):
        return None
    if postgres_programs(DEBIAN) is None:
        return (
            f"skipping DBOS on PostgreSQL: {VARIABLE} is not set, and neither PATH nor {DEBIAN} has initdb and "
            "pg_ctl; install the package postgresql, or set the variable to the URL of a database for tests"
        )
    if os.geteuid() == 0 and postgres_account() is None:
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
    with (
        tempfile.TemporaryDirectory(prefix="flowkit-postgres-") as folder,
        PostgresServer(Path(folder), options=_OPTIONS) as server,
    ):
        yield server.url
