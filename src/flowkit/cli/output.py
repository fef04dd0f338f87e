"""Output of commands: results go to stdout, everything else to stderr; `--json` prints one document to stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from flowkit.text import clean


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints text unchanged, without markup or emoji names.

    Without a terminal, the console is 1,000 columns wide, so that lines do not wrap.
    """
    made = Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = 1000
    return made


def echo(text: str | Text) -> None:
    """Print a line of the result to stdout."""
    console().print(_clean(text))


def note(text: str) -> None:
    """Print an additional line to stderr."""
    console(stderr=True).print(_clean(text))


def error(text: str) -> None:
    """Print an error to stderr."""
    console(stderr=True).print(Text.assemble(("flowkit:", "red"), " ", clean(text)))


def warn(text: str) -> None:
    """Print a warning to stderr."""
    console(stderr=True).print(Text.assemble(("warning:", "yellow"), " ", clean(text)))


def document(value: dict[str, Any]) -> None:
    """Print the JSON document of a command."""
    sys.stdout.write(clean(json.dumps(value, indent=2, ensure_ascii=False, default=str)) + "\n")


def _clean(text: str | Text) -> str | Text:
    return clean(text) if isinstance(text, str) else text
