"""The lines of the user's program, for errors of a flow."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

_OUR_FOLDER = str(Path(__file__).parent)


class Place(NamedTuple):
    """A line of a program. Its text is relative to the current folder: `pipeline.py:12`."""

    file: str
    line: int

    def __str__(self) -> str:
        path, here = Path(self.file), Path.cwd()
        shown = path.relative_to(here) if path.is_relative_to(here) else path.name
        return f"{shown}:{self.line}"


def calling_line() -> Place:
    """Return the line of the program that called this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OUR_FOLDER):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno)
