"""Free ports of this machine, and the process that listens on one."""

from __future__ import annotations

import os
import random
import socket
from collections import deque
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = "127.0.0.1"
_HIGHEST = 65_535
# Below the range that Linux and macOS use for outgoing connections: such a connection could take the
# port before the server listens on it.
CANDIDATES = range(20_000, 32_768)


_MOST_RESERVED = 200
_reserved: deque[int] = deque()
"""File descriptors of the UDP sockets that reserve ports."""


def free_port(preferred: int | None = None) -> int:
    """Return the `preferred` port if it is free, otherwise a random free one.

    No other process receives it from this function while this process runs.

    The server on the port may start much later, and start again. A process reserves the last 200 ports that it chose.
    """
    first = random.SystemRandom().randrange(len(CANDIDATES))
    wanted = [] if preferred is None or preferred > _HIGHEST else [preferred]
    ports = chain(wanted, CANDIDATES[first:], CANDIDATES[:first])
    return next(port for port in ports if is_free(port) and _reserve(port))


def _reserve(port: int) -> bool:
    """Bind the UDP port of this number, on which no server listens: a lock that ends with the process."""
    lock = socket.socket(type=socket.SOCK_DGRAM)
    try:
        lock.bind((HOST, port))
    except OSError:
        lock.close()
        return False
    _reserved.append(lock.detach())
    if len(_reserved) > _MOST_RESERVED:
        os.close(_reserved.popleft())
    return True


def is_free(port: int) -> bool:
    """Whether a server could listen on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def is_listening(port: int) -> bool:
    """Whether a server accepts connections on the port."""
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


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
