"""Every place at which a text leaves a process for people shows control and bidirectional characters as escapes.

A new place fails here, until it has a row: with the test of its texts, or why it needs none.
"""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

import flowkit
from flowkit import text as text_module
from flowkit.cli import output
from flowkit.cli.errors import report
from flowkit.core.log import disable_stdout_logging, enable_stdout_logging, get_logger, process_formatter
from flowkit.errors import ConfigError
from flowkit.pictures.formats import Format, draw
from flowkit.pictures.model import make_picture
from flowkit.reading.graphs import GraphNode, GraphView
from flowkit.text import visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOURCES: Final = Path(str(flowkit.__file__)).parent
STATIC: Final = SOURCES / "page/static"
ATTACK: Final = "boom \x1b]0;owned\x07\x1b[2J\r\u202egpj.exe\u2066\x9b1m\x7f\u2028"

WRITES: Final = {
    *(
        "print",
        "print_exception",
        "print_exc",
        "print_stack",
        "secho",
        "Console",
        "StreamHandler",
        "basicConfig",
    ),
    *(
        "sys.stdout.write",
        "sys.stderr.write",
        "sys.stdout.buffer.write",
        "typer.echo",
        "click.echo",
        "os.write",
    ),
    *("logging.lastResort.handle", "self.stream.write"),
}
"""Calls that write a text to a terminal or a log: names of functions, or all of a call."""

SINKS: Final = {
    ("cli/output.py", "Console"): "console: rows below",
    ("cli/output.py", "sys.stdout.write"): "document: a row below",
    ("cli/output.py", "logging.StreamHandler"): "the log of a process: rows below",
    ("cli/output.py", "logging.basicConfig"): "it gets the handler above",
    ("cli/tasks/picture.py", "sys.stdout.buffer.write"): "draw: rows below",
    ("local/install.py", "Console"): "it prints names of servers, which are FlowKit's own",
    ("testing/supervisor.py", "typer.echo"): "it prints its own address",
    ("testing/external/__main__.py", "typer.echo"): "it prints the options of its own command line",
    ("activities/evaluation_process.py", "sys.stdout.write"): "it writes to a pipe, which a process reads",
    ("core/handler_lines.py", "self.stream.write"): "it passes on what user code prints",
    (
        "core/handler_lines.py",
        "logging.lastResort.handle",
    ): "it acts for a program that has not configured logging",
}
CONSOLES: Final = re.compile(r"(\w+\.)*_?console(\([^)]*\))?\.print")
"""Prints of a console of `output`, which escapes all texts."""


LAST_WORDS: Final = {each.rpartition(".")[2] for each in WRITES}


def name_of(called: ast.expr) -> str:
    """Return the last word of what a call calls, which takes less time than all of it."""
    return getattr(called, "attr", getattr(called, "id", ""))


def list_sinks() -> Iterator[tuple[str, str]]:
    """Yield the calls in the sources that write texts for people, with their files."""
    folders = (Path(folder) for folder, _, _ in os.walk(SOURCES, followlinks=True))
    for file in sorted(each for folder in folders for each in folder.glob("*.py")):
        for each in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(each, ast.Call) or name_of(each.func) not in LAST_WORDS:
                continue
            call = ast.unparse(each.func)
            if (call in WRITES or call.rpartition(".")[2] in WRITES) and not CONSOLES.fullmatch(call):
                yield str(file.relative_to(SOURCES)), call


def test_every_place_that_writes_for_people_has_a_row() -> None:
    assert set(list_sinks()) == SINKS.keys()


def log_as(form: str) -> Callable[[], None]:
    """Return a function that writes an error of a handler to the log of a process."""

    def write() -> None:
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setenv("FLOWKIT_LOG_FORMAT", form)
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(process_formatter("%(levelname)s %(message)s"))
        try:
            raise ValueError(ATTACK)
        except ValueError:
            record = logging.LogRecord("shop", logging.ERROR, "", 0, "%s", (ATTACK,), sys.exc_info())
        record.field = ATTACK
        handler.handle(record)
        monkeypatch.undo()

    return write


def log_on_stdout(pretty: bool) -> Callable[[], None]:
    """Return a function that logs an error on stdout."""

    def write() -> None:
        enable_stdout_logging(pretty=pretty, stack=True)
        try:
            raise ValueError(ATTACK)
        except ValueError:
            get_logger("shop").exception(ATTACK, field=ATTACK)
        finally:
            disable_stdout_logging()

    return write


def report_error(verbose: bool, as_json: bool) -> Callable[[], object]:
    """Return a function that reports an error as a command does."""
    return lambda: report(ConfigError(f"node 'a' failed: {ATTACK}"), as_json=as_json, verbose=verbose)


PICTURE: Final = make_picture(
    GraphView(name=ATTACK, nodes=(GraphNode(node_id=ATTACK, role=ATTACK),), edges=())
)


def write_picture(form: Format) -> None:
    """Write a picture of a graph with hostile names."""
    sys.stdout.write(draw(PICTURE, form).decode())


TEXTS: Final[dict[str, Callable[[], object]]] = {
    "echo": lambda: output.echo(ATTACK),
    "note": lambda: output.note(ATTACK),
    "error": lambda: output.error(ATTACK),
    "warn": lambda: output.warn(ATTACK),
    "document": lambda: output.document({ATTACK: [ATTACK]}),
    "error report": report_error(verbose=False, as_json=False),
    "error report, verbose": report_error(verbose=True, as_json=False),
    "error report, verbose, as JSON": report_error(verbose=True, as_json=True),
    "log of a process": log_as("text"),
    "log of a process, as JSON": log_as("json"),
    "log on stdout": log_on_stdout(pretty=False),
    "log on stdout, pretty": log_on_stdout(pretty=True),
    **{
        f"picture, {form}": partial(write_picture, form) for form in (Format.TEXT, Format.MERMAID, Format.DOT)
    },
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_for_people_has_no_deceptive_characters(name: str) -> None:
    written = io.StringIO()
    with redirect_stdout(written), redirect_stderr(written):
        TEXTS[name]()
    assert written.getvalue()
    assert visible(written.getvalue()) == written.getvalue()


# --- the page -----------------------------------------------------------------------------------------------------

DOCUMENT: Final = re.compile(
    r"\.(textContent|innerText|innerHTML|outerHTML)\s*=[^=]|document\.title\s*=|insertAdjacent|createTextNode|document\.write|"
    r'setAttribute\("(aria-label|title|placeholder)"|clipboard|\b(alert|confirm|prompt)\(|execCommand'
)
"""What sets a text of the document, or copies one."""


def test_only_one_file_of_the_page_sets_texts_of_the_document() -> None:
    found = {
        file.name: [each[0] for each in DOCUMENT.finditer(file.read_text(encoding="utf-8"))]
        for file in STATIC.glob("*.js")
    }
    assert found.pop("dom.js")
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_the_page_escapes_the_same_characters_as_the_command_line() -> None:
    (pattern,) = re.findall(r"const DECEPTIVE = /(.*)/g;", (STATIC / "dom.js").read_text(encoding="utf-8"))
    characters = [chr(number) for number in range(0x3000)]
    in_python = [each for each in characters if text_module.visible(each) != each]
    assert [each for each in characters if re.fullmatch(pattern, each)] == in_python
    assert json.loads(f'"{visible(chr(0x202E))}"') == chr(0x202E)
