"""The folder in which one `flowkit up` keeps data and logs: the user's, or one for its own life."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flowkit.local.errors import DevServerError, FolderInUse, writing_to
from flowkit.local.folder_lock import try_claim

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "flowkit-up-"
LOCK = "flowkit-up.lock"
_YOUNG_SEC = 60.0


@contextmanager
def state_folder(data: Path | None) -> Iterator[Path]:
    """The folder `data`, made if it is not there; or a temporary one, removed at the end.

    FolderInUse at once while another `flowkit up` uses it. After a DevServerError a temporary folder keeps its logs,
    which the error names.
    """
    if data is not None:
        with _claimed(data.resolve()):
            yield data.resolve()
        return
    _remove_left_behind()
    with writing_to(Path(tempfile.gettempdir()), what="flowkit up cannot start"):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    logs_only = False
    try:
        with _claimed(folder):
            yield folder
    except DevServerError as error:
        logs_only = bool(error.log_lines)
        raise
    finally:
        _remove(folder, logs_only=logs_only)


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    with writing_to(folder, what="flowkit up cannot start"):
        folder.mkdir(parents=True, exist_ok=True)
        claim = try_claim(folder / LOCK)
    if claim is None:
        raise FolderInUse(lock=folder / LOCK, user="flowkit up")
    try:
        yield
    finally:
        os.close(claim)


def _remove(folder: Path, *, logs_only: bool) -> None:
    if not logs_only:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.suffix != ".log":
            path.unlink(missing_ok=True)


def _remove_left_behind() -> None:
    """Remove the temporary folders of those that were killed, once nothing of theirs runs any more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        locks = list(folder.glob("*.lock"))
        if folder / LOCK in locks and _is_old(folder / LOCK) and all(map(_is_free, locks)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_old(lock: Path) -> bool:
    """Whether it is not one that a process is just about to claim."""
    return time.time() - lock.stat().st_mtime > _YOUNG_SEC


def _is_free(lock: Path) -> bool:
    try:
        claim = try_claim(lock)
    except OSError:  # somebody else's
        return False
    if claim is None:
        return False
    os.close(claim)
    return True
