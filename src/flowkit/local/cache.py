"""Things that are installed once per user: where they are, and how they get there whole."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from flowkit.local.progress import progress


def cache_folder() -> Path:
    """The folder that holds all installed things: `FLOWKIT_CACHE`, or else the user's cache folder."""
    chosen = os.environ.get("FLOWKIT_CACHE")
    return Path(chosen).expanduser().resolve() if chosen else user_cache_path("flowkit")


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
        _install(folder, build)
    return folder


def _install(folder: Path, build: Callable[[Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with progress(f"{folder.parent.name} {folder.name}"):
                _build_aside(folder, build)


def _build_aside(folder: Path, build: Callable[[Path], None]) -> None:
    unfinished = Path(f"{folder}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    build(unfinished)
    unfinished.rename(folder)
