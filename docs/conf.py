"""The documentation as a site: `make docs` builds it into build/docs. The pages themselves are plain Markdown."""

from __future__ import annotations

import importlib
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from typer.cli import app as typer_cli
from typer.testing import CliRunner

from flowkit.cli.errors import EPILOG
from flowkit.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]

project = "FlowKit"
author = "the FlowKit authors"
project_copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinx_external_toc"]
exclude_patterns = ["screenshots"]
external_toc_path = "_toc.yml"

myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
add_module_names = False
default_role = "code"
smartquotes = False
maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"FlowKit {__version__}"
html_show_sourcelink = False
html_copy_source = False
copybutton_exclude = ".linenos, .gp"
show_warning_types = True


def complete(app: Sphinx, page: str, source: list[str]) -> None:
    """Put what a page only announces in the place of the announcement, which is for readers of the repository."""
    if page in COMPLETED:
        title, _, _ = source[0].partition("\n")
        source[0] = f"{title}\n{COMPLETED[page]()}"


def commands() -> str:
    """All commands and options, as Typer tells them of the app itself."""
    told = CliRunner().invoke(typer_cli, ["flowkit.cli.app", "utils", "docs", "--name", "flowkit"])
    if told.exit_code:
        raise RuntimeError(f"typer could not document the commands: {told.output}")
    return without_title(told.output).replace(EPILOG, "")


def file_of_the_root(name: str) -> str:
    """A text that stands where people look for it first; its links to pages lead from here now."""
    return without_title((ROOT / name).read_text(encoding="utf-8")).replace("](docs/", "](")


def without_title(text: str) -> str:
    """A page's text below its title."""
    return text.partition("\n")[2]


COMPLETED: dict[str, Callable[[], str]] = {
    "reference/commands": commands,
    "contributing": partial(file_of_the_root, "CONTRIBUTING.md"),
    "changelog": partial(file_of_the_root, "CHANGELOG.md"),
}


def for_users(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Leave out what docstrings tell those who read the code: what a module is for, and where a rule comes from."""
    if what == "module":
        lines.clear()
    lines[:] = [re.sub(r" \(spec: [^)]*\)", "", line) for line in lines]


def readable(
    app: Sphinx,
    what: str,
    name: str,
    thing: object,
    options: object,
    signature: str | None,
    answer: str | None,
) -> tuple[str | None, str | None]:
    """Write a made default as Python would, or autodoc cannot take the signature apart."""
    return (signature and signature.replace("~typing.", "").replace("=<factory>", "=...")), answer


DOCUMENTED = ("coordinator.adapters", "plugin", "testing", "worker.input.pull_adapters")


def setup(app: Sphinx) -> None:
    """Complete these pages at every build: they depend on more than their files.

    What is documented is imported before: while autodoc reads a pydantic model, others cannot be defined.
    """
    for module in DOCUMENTED:
        importlib.import_module(f"flowkit.{module}")
    app.connect("source-read", complete)
    app.connect("autodoc-process-docstring", for_users)
    app.connect("autodoc-process-signature", readable)
    app.connect("env-get-outdated", lambda *_: list(COMPLETED))
