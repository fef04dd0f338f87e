"""The folder in which one `flowkit up` keeps its data and logs, and the locks of such folders."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flowkit.local.errors import DevServerError, FolderInUse, translate_write_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

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


PREFIX = "flowkit-up-"
LOCK_NAME = "flowkit-up.lock"
_MIN_AGE_SEC = 60.0


@contextmanager
def data_folder(data: Path | None) -> Iterator[Path]:
    """Yield the folder `data`, created if it does not exist, or a temporary folder that is removed on exit.

    Raises FolderInUse at once if another `flowkit up` uses the folder. When a DevServerError with log
    lines leaves the block, a temporary folder keeps its log files, because the error names them.
    """
    if data is not None:
        with _locked(data.resolve()):
            yield data.resolve()
        return
    _remove_abandoned()
    with translate_write_errors(Path(tempfile.gettempdir()), what="flowkit up cannot start"):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    keep_logs = False
    try:
        with _locked(folder):
            yield folder
    except DevServerError as error:
        keep_logs = bool(error.log_lines)
        raise
    finally:
        _remove(folder, keep_logs=keep_logs)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with translate_write_errors(folder, what="flowkit up cannot start"):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = try_lock(folder / LOCK_NAME)
    if descriptor is None:
        raise FolderInUse(lock=folder / LOCK_NAME, user="flowkit up")
    try:
        yield
    finally:
        os.close(descriptor)


def _remove(folder: Path, *, keep_logs: bool) -> None:
    if not keep_logs:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.suffix != ".log":
            path.unlink(missing_ok=True)


def _remove_abandoned() -> None:
    """Remove temporary folders of killed `flowkit up` processes, once none of their servers is running."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        locks = list(folder.glob("*.lock"))
        if folder / LOCK_NAME in locks and _is_old(folder / LOCK_NAME) and all(map(_is_free, locks)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_old(lock: Path) -> bool:
    """Whether the lock file is too old to belong to a process that is about to lock it."""
    return time.time() - lock.stat().st_mtime > _MIN_AGE_SEC


def _is_free(lock: Path) -> bool:
    try:
        descriptor = try_lock(lock)
    except OSError:  # the file of another user
        return False
    if descriptor is None:
        return False
    os.close(descriptor)
    return True
