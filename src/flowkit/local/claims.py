"""A folder of data belongs to one running server at a time."""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowkit.local.errors import FolderInUse

# A server whose owner was killed may still be saving its data.
WAIT_SECONDS = 10.0


@contextmanager
def claimed(lock: Path) -> Iterator[int]:
    """Hold the claim that `lock` stands for, or raise FolderInUse if somebody else keeps it for 10 seconds.

    The claim hangs on the file descriptor: a child process that inherits it keeps the claim until it ends itself,
    however that happens and whatever becomes of its parent.
    """
    claim = os.open(lock, os.O_RDWR | os.O_CREAT)
    try:
        _wait_for(claim, lock)
        yield claim
    finally:
        os.close(claim)


def _wait_for(claim: int, lock: Path) -> None:
    deadline, never = time.monotonic() + WAIT_SECONDS, threading.Event()
    while True:
        try:
            return fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise FolderInUse(lock=lock) from None
        never.wait(0.02)
