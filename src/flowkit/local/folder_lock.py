"""A lock that lets only one running server use a data folder."""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowkit.local.errors import FolderInUse, translate_write_errors

# A server whose owner was killed may still be saving its data.
WAIT_SECONDS = 10.0


@contextmanager
def folder_lock(lock_file: Path, cancelled: threading.Event | None = None) -> Iterator[int]:
    """Hold the lock of `lock_file` and yield its descriptor. Raises FolderInUse after waiting 10 seconds.

    The lock belongs to the file descriptor: a child process that inherits the descriptor holds the lock
    until it exits, however it exits and whatever happens to its parent. Setting `cancelled` ends the
    wait.
    """
    with translate_write_errors(lock_file.parent, what=f"{lock_file.stem} cannot start"):
        descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _wait_for_lock(descriptor, lock_file, cancelled or threading.Event())
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(lock_file: Path) -> int | None:
    """Lock `lock_file` and return its descriptor, for the caller to close; None if it is already locked."""
    descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _wait_for_lock(descriptor: int, lock_file: Path, cancelled: threading.Event) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if cancelled.is_set() or time.monotonic() > deadline:
                raise FolderInUse(lock=lock_file) from None
        cancelled.wait(0.02)
