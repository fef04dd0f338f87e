"""Parse the pages: their code blocks, and the comments before blocks that say how to test them.

Readers do not see these comments, neither on GitHub nor on the site:

    <!-- file: shop.py -->              the block is the content of this file
    <!-- terminal: up, until: READY --> the command runs in its own terminal; it is ready when it prints READY
    <!-- until: deferred -->           without a terminal: the command is repeated until it prints deferred
    <!-- press: Ctrl-C in up -->        without a block: the reader presses Ctrl-C in that terminal
    <!-- exit: 1 -->                    the exit code of the last command in the block
    <!-- not run: REASON -->            the block is not run; only its syntax and options are checked
    <!-- picture: 100 -->               the block is the picture of the graph before it, in a terminal of 100 columns
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(page for page in DOCS.rglob("*.md") if "screenshots" not in page.parts),
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples/second_hour/README.md"),
]
SHELL = ("sh", "bash")
MARKS = ("file", "terminal", "until", "press", "exit", "not run", "picture")

_COMMENT = re.compile(r"<!-- (.*?) -->", re.DOTALL)
_MARK = re.compile(rf"(?:^|, )({'|'.join(MARKS)}): (.*?)(?=, (?:{'|'.join(MARKS)}): |$)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block, or a comment without a block (no language, no text)."""

    page: Path
    line: int
    language: str = ""
    text: str = ""
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Return file and line in the format of editors."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@functools.cache
def blocks(page: Path) -> tuple[Block, ...]:
    """Return all blocks of a page in order, each with the marks of the comment before it."""
    return tuple(_blocks(page))


def _blocks(page: Path) -> Iterator[Block]:
    tokens = MarkdownIt("commonmark").disable("inline").parse(page.read_text(encoding="utf-8"))
    waiting: Block | None = None
    for token in tokens:
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            if waiting is not None:
                yield waiting
            waiting = (
                Block(page=page, line=line, marks=marks(token.content)) if marks(token.content) else None
            )
        elif token.type == "fence":
            language = token.info.split()[0] if token.info else ""
            given = waiting.marks if waiting else {}
            yield Block(page=page, line=line, language=language, text=token.content, marks=given)
            waiting = None
        elif waiting is not None:
            yield waiting
            waiting = None
    if waiting is not None:
        yield waiting


def inline_codes(page: Path) -> Iterator[str]:
    """Return the inline code of sentences and tables."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    return (
        child.content for token in tokens for child in token.children or () if child.type == "code_inline"
    )


def marks(comment: str) -> dict[str, str]:
    """Return the marks in comments, by name."""
    return {name: value for text in _COMMENT.findall(comment) for name, value in _MARK.findall(text.strip())}


def every_block(*languages: str) -> list[Block]:
    """Return the blocks of all pages in these languages."""
    return [block for page in PAGES for block in blocks(page) if block.language in languages and block.text]


def place(block: Block) -> str:
    """Return the name of a block as a test parameter."""
    return block.place
