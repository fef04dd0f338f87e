"""Things that are installed once per user: where they are, and how they get there whole."""

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
    """The folder that holds all installed things: `FLOWKIT_CACHE`, or else the user's cache folder."""
    configured = os.environ.get("FLOWKIT_CACHE")
    return Path(configured).expanduser().resolve() if configured else user_cache_path("flowkit")


def fingerprint(recipe: str) -> str:
    """A short text for a version: it changes with the recipe, so that a changed one is installed anew."""
    return hashlib.sha256(recipe.encode()).hexdigest()[:12]


def install_once(name: str, version: str, build: Callable[[Path], None]) -> Path:
    """The folder of `name` at `version`, filled by `build(empty_folder)` unless it already exists.

    Of several callers at once, in whatever processes, one builds and the others wait for it. The folder exists
    under its final name only if `build` returned, so an interrupted install is simply done again.
    """
    folder = cache_folder() / name / version
    if not folder.is_dir():
        what = f"{name} cannot be installed"
        try:
            with translate_write_errors(cache_folder(), what=what):
                _install(folder, build)
        except DiskFull as full:
            raise DiskFull(what=what, folder=cache_folder()) from full
    return folder


def find_installed(name: str, version: str) -> Path | None:
    """The folder of `name` at `version`, if it has been installed."""
    folder = cache_folder() / name / version
    return folder if folder.is_dir() else None


def cache_size() -> int:
    """How much the cache folder holds."""
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
