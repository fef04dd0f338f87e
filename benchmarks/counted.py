"""`python -m benchmarks.counted FILE MODULE ARGUMENTS…`: runs a module, and counts what it sends to MongoDB.

Every process of a benchmark counts in this way, on both sides, and all the time: it costs less than a microsecond for
each command. A `CommandListener` would make the driver create two events for each command, and would not see bytes.
"""

from __future__ import annotations

import mmap
import runpy
import struct
import sys
import threading
from pathlib import Path
from typing import Any

from pymongo.asynchronous.pool import AsyncConnection
from pymongo.synchronous.pool import Connection

_COUNTS = struct.Struct("<QQ")


def count_into(file: Path) -> None:
    """Count the commands and the bytes that this process sends from now on, in a file that others can read."""
    file.write_bytes(bytes(_COUNTS.size))
    with file.open("r+b") as opened:
        memory = mmap.mmap(opened.fileno(), _COUNTS.size)
    commands = size = 0
    lock = threading.Lock()

    def add(message: bytes) -> None:
        nonlocal commands, size
        with lock:
            commands += 1
            size += len(message)
            _COUNTS.pack_into(memory, 0, commands, size)

    _call_before_sending(Connection, add)
    _call_before_sending(AsyncConnection, add)


def counted(file: Path) -> tuple[int, int]:
    """Return the number of commands, and of bytes, that the process of this file has sent."""
    commands, size = _COUNTS.unpack(file.read_bytes())
    return commands, size


def _call_before_sending(connection: Any, call: Any) -> None:
    """Make the driver's connections call a function with each message, just before they send it."""
    send = connection.send_message

    def counting(self: Any, message: bytes, *arguments: Any) -> Any:
        call(message)
        return send(self, message, *arguments)

    connection.send_message = counting


if __name__ == "__main__":
    _, file, module, *arguments = sys.argv
    count_into(Path(file))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
