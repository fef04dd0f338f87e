"""Version of the installed distribution, and a check that its folders are where they belong."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

if (Path(__file__).parents[1] / "workflows").is_file():
    raise ImportError("symlinks are missing: git config core.symlinks true, then check out again")

try:
    __version__ = metadata.version("flowkit-temporal")
except metadata.PackageNotFoundError:
    __version__ = "0.0.0"
