"""A folder of data belongs to one running server at a time."""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowkit.local.errors import FolderInUse, writing_to

# A server whose owner was killed may still be saving its data.
WAIT_SECONDS = 10.0


@contextmanager
def claimed(lock: Path, given_up: threading.Event | None = None) -> Iterator[int]:
    """Hold the claim that `lock` stands for, or raise FolderInUse if somebody else keeps it for 10 seconds.

    The claim hangs on the file descriptor: a child process that inherits it keeps the claim until it ends itself,
    however that happens and whatever becomes of its parent. Nobody is waited for once `given_up` is set.
    """
    with writing_to(lock.parent, what=f"{lock.stem} cannot start"):
        claim = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _wait_for(claim, lock, given_up or threading.Event())
        yield claim
    finally:
        os.close(claim)


def try_claim(lock: Path) -> int | None:
    """The claim that `lock` stands for, to be closed by the caller; None if somebody else holds it."""
    claim = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(claim)
        return None
    return claim


def _wait_for(claim: int, lock: Path, given_up: threading.Event) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if given_up.is_set() or time.monotonic() > deadline:
                raise FolderInUse(lock=lock) from None
        given_up.wait(0.02)
