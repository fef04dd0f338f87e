"""Where commands print: results on stdout, all else on stderr; with `--json` one document on stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from flowkit.text import clean


def console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is, no markup, no `:names:`; wide enough when it is no terminal."""
    made = Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = 1000
    return made


def say(text: str | Text) -> None:
    """A line of the result."""
    console().print(_clean(text))


def note(text: str) -> None:
    """A line beside the result."""
    console(stderr=True).print(_clean(text))


def complain(text: str) -> None:
    """A line that says what is wrong."""
    console(stderr=True).print(Text.assemble(("flowkit:", "red"), " ", clean(text)))


def warn(text: str) -> None:
    """A line that says what is odd."""
    console(stderr=True).print(Text.assemble(("warning:", "yellow"), " ", clean(text)))


def document(value: dict[str, Any]) -> None:
    """The one JSON document of a command."""
    sys.stdout.write(clean(json.dumps(value, indent=2, ensure_ascii=False, default=str)) + "\n")


def _clean(text: str | Text) -> str | Text:
    return clean(text) if isinstance(text, str) else text
