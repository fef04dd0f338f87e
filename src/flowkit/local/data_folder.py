"""The folder in which one `flowkit up` keeps its data and logs, its files, and the locks of such folders."""

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


def hold_lock(lock_file: Path) -> None:
    """Wait until the lock of `lock_file` is free, and hold it until this process exits."""
    fcntl.flock(os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o644), fcntl.LOCK_EX)


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


def write_private(file: Path, text: str) -> None:
    """Write a text file that only this user can read, also if the file exists and others can read it."""
    descriptor = open_private(str(file), os.O_WRONLY | os.O_CREAT)
    with open(descriptor, "w", encoding="utf-8") as opened:
        os.fchmod(descriptor, 0o600)
        opened.truncate(0)
        opened.write(text)


def open_private(file: str, flags: int) -> int:
    """Open a file and return its descriptor, as an `opener`. If this creates the file, only this user can read it."""
    return os.open(file, flags, 0o600)


def make_folder(folder: Path) -> None:
    """Create a folder that only this user can enter, with its parents. The mode of an existing folder stays."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


PREFIX = "flowkit-up-"
LOCK_NAME = "flowkit-up.lock"
TEMPORARY = "temporary"
"""A file in folders that another `flowkit up` may remove. Folders with data to keep do not have it."""

_KEEP_SEC = 24 * 3600.0
"""How long the folder of a killed `flowkit up` stays."""


@contextmanager
def data_folder(data: Path | None) -> Iterator[Path]:
    """Yield the folder `data`, created if it does not exist, or a temporary folder that is removed on exit.

    A folder that this creates is for this user only.

    Raises FolderInUse at once if another `flowkit up` uses the folder. A temporary folder stays when an error leaves
    the block that is marked with `keeps_data`, or that is not a DevServerError. After another DevServerError with log
    lines it keeps only its log files, because the error names them.
    """
    if data is not None:
        with _locked(data.resolve()):
            (data / TEMPORARY).unlink(missing_ok=True)
            yield data.resolve()
        return
    _remove_abandoned()
    with translate_write_errors(Path(tempfile.gettempdir()), what="flowkit up cannot start"):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    keep_logs = keep_data = False
    try:
        (folder / TEMPORARY).touch()
        with _locked(folder):
            yield folder
    except DevServerError as error:
        keep_logs, keep_data = bool(error.log_lines), error.keeps_data
        raise
    except Exception:
        keep_data = True
        raise
    finally:
        if keep_data:
            (folder / TEMPORARY).unlink(missing_ok=True)
        else:
            _remove(folder, keep_logs=keep_logs)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with translate_write_errors(folder, what="flowkit up cannot start"):
        make_folder(folder)
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
    """Remove temporary folders of `flowkit up` processes that were killed a day ago, if none of their servers runs."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        locks = list(folder.glob("*.lock"))
        if (folder / TEMPORARY).exists() and _is_old(folder) and all(map(_is_free, locks)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_old(folder: Path) -> bool:
    """Whether no lock and no log of the folder has changed for a day."""
    files = [folder / TEMPORARY, *folder.glob("*.lock"), *folder.glob("*.log")]
    return time.time() - max(file.stat().st_mtime for file in files) > _KEEP_SEC


def running_folders() -> list[Path]:
    """Return the folders of the `flowkit up` processes that run now, the latest start first.

    They are the temporary folders, the current folder, and the folders in it (`flowkit up --data data`).
    """
    here = Path.cwd()
    temporary = Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK_NAME}")
    every = {*temporary, *here.glob(f"*/{LOCK_NAME}"), *here.glob(LOCK_NAME)}
    running = [lock for lock in every if not _is_free(lock)]
    return [lock.parent for lock in sorted(running, key=lambda lock: lock.stat().st_mtime, reverse=True)]


def _is_free(lock: Path) -> bool:
    try:
        descriptor = try_lock(lock)
    except OSError:  # the file of another user
        return False
    if descriptor is None:
        return False
    os.close(descriptor)
    return True
