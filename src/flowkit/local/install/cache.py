"""The cache of installed programs: one per user, and each entry is complete or absent."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from flowkit.local.errors import DiskFull, translate_write_errors
from flowkit.local.install.progress import report_progress


def cache_folder() -> Path:
    """Return the folder of installed programs: `FLOWKIT_CACHE`, or else a folder in the user's cache."""
    configured = os.environ.get("FLOWKIT_CACHE")
    return Path(configured).expanduser().resolve() if configured else user_cache_path("flowkit")


def fingerprint(recipe: str) -> str:
    """Return a short hash of a build recipe. In a version, it makes a changed recipe install again."""
    return hashlib.sha256(recipe.encode()).hexdigest()[:12]


def install_once(name: str, version: str, build: Callable[[Path], None]) -> Path:
    """Return the folder of `name` at `version`; `build(empty_folder)` fills it if it does not exist.

    If several processes call at the same time, one builds and the others wait. The folder gets its final
    name only after `build` has returned, so an interrupted installation starts again from the beginning.
    """
    folder = cache_folder() / name / version
    if not folder.is_dir():
        what = f"cannot install {name}"
        try:
            with translate_write_errors(cache_folder(), what=what):
                _install(folder, build)
        except DiskFull as full:
            raise DiskFull(what=what, folder=cache_folder()) from full
    return folder


def find_installed(name: str, version: str) -> Path | None:
    """Return the folder of `name` at `version` if it is installed."""
    folder = cache_folder() / name / version
    return folder if folder.is_dir() else None


def cache_size() -> int:
    """Return the size of the cache in bytes."""
    files = (path for path in cache_folder().rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)


def _install(folder: Path, build: Callable[[Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with report_progress(f"{folder.parent.name} {folder.name}"):
                _build_atomically(folder, build)


def _build_atomically(folder: Path, build: Callable[[Path], None]) -> None:
    partial = Path(f"{folder}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        build(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(folder)
