"""The process that listens on a port, as far as the system shows it to this user."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PROC = Path("/proc")
_LISTENING = "0A"


def listening_process(port: int) -> str:
    """Return name and id of the process that listens on a port; `another program` if /proc hides it."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for process in PROC.glob("[0-9]*") if sockets else ():
        with suppress(OSError):
            if any(_link_target(link) in sockets for link in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (process {process.name})"
    return "another program"


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _link_target(link: Path) -> str:
    with suppress(OSError):
        return os.readlink(link)
    return ""
