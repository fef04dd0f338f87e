"""Which files of a folder are Python source, and which package each belongs to."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

SKIPPED = frozenset({"__pycache__", "dist-packages", "node_modules", "site-packages"})
"""Folders that hold nobody's source; hidden folders are skipped as well."""

TOP = "(top level)"
"""The package of files that lie in no folder."""


def python_files(root: Path) -> list[str]:
    """Paths of all `.py` files below `root`, relative, with slashes, in an order that is always the same.

    A name that is not UTF-8 cannot be stored: its odd bytes are written as `\\xe9`, and nobody can open the file by it.
    ValueError when `root` is no folder.
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
    """The dotted name of the folder in which the file `path` lies."""
    return ".".join(PurePosixPath(path).parent.parts) or TOP
