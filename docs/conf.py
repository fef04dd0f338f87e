"""Configure Sphinx: `make docs` builds the site in build/docs. The pages themselves are plain Markdown."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flowkit.core.version import __version__

sys.path.insert(0, str(Path(__file__).parent))
from reference import filled, parts_of

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

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


def fill_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Write the generated parts of a page into its text."""
    source[0] = filled(source[0])


def pages_with_parts(app: Sphinx, env: BuildEnvironment, *_: object) -> list[str]:
    """Return the pages to build anew each time, because their parts depend on other files."""
    return [page for page in env.found_docs if parts_of(env.doc2path(page).read_text(encoding="utf-8"))]


def omit_internal_notes(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Remove what only readers of the code need: module docstrings and references to the spec."""
    if what == "module":
        lines.clear()
    lines[:] = [re.sub(r" \(spec: [^)]*\)", "", line) for line in lines]


def simplify_signature(
    app: Sphinx,
    what: str,
    name: str,
    thing: object,
    options: object,
    signature: str | None,
    return_annotation: str | None,
) -> tuple[str | None, str | None]:
    """Write defaults from factories as `...`, because autodoc cannot parse `<factory>`."""
    return (signature and signature.replace("~typing.", "").replace("=<factory>", "=...")), return_annotation


DOCUMENTED = ("coordinator.adapters", "plugin", "testing", "worker.input.pull_adapters")


def setup(app: Sphinx) -> None:
    """Register the hooks.

    Import the documented modules first: while autodoc reads a pydantic model, no other model can be defined.
    """
    for module in DOCUMENTED:
        importlib.import_module(f"flowkit.{module}")
    app.connect("source-read", fill_page)
    app.connect("autodoc-process-docstring", omit_internal_notes)
    app.connect("autodoc-process-signature", simplify_signature)
    app.connect("env-get-outdated", pages_with_parts)
