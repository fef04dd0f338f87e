"""Find the Python files of a folder, and the package of each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SKIPPED = frozenset({"__pycache__", "dist-packages", "node_modules", "site-packages"})
"""Folders to skip, in addition to hidden ones."""

TOP = "(top level)"
"""The package of files at the root of the tree."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """A batch of files, with the total number of batches and files, so that progress is known from the start."""

    source: str
    fault: str
    number: int
    total_batches: int
    total_files: int
    files: list[str]
    file_count: int


def python_files(root: Path) -> list[str]:
    """Return the sorted paths of all `.py` files below `root`, relative and with slashes.

    MongoDB cannot store a name that is not UTF-8, so invalid bytes are escaped as `\\xe9`; the file then counts as
    unreadable. Raises ValueError if `root` is not a folder.
    """
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}")
    found: list[str] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED and not name.startswith(".")]
        files = (Path(folder, name) for name in names if name.endswith(".py"))
        found += [_storable(path.relative_to(root).as_posix()) for path in files if path.is_file()]
    return sorted(found)


def _storable(path: str) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def package_of(path: str) -> str:
    """Return the dotted name of the folder that contains the file `path`."""
    return ".".join(PurePosixPath(path).parent.parts) or TOP
