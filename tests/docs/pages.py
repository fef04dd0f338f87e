"""The pages as data: their blocks of code, and what a comment before a block says about it.

Comments are invisible to readers, on GitHub as on the site:

    <!-- file: shop.py -->              the block is this file's text
    <!-- terminal: up, until: READY --> the command goes on in a terminal of its own; it is there when it prints READY
    <!-- press: Ctrl-C in up -->        needs no block: what a reader does in that terminal
    <!-- exit: 1 -->                    how the last command of the block ends
    <!-- not run: REASON -->            the block is only read: its syntax, its options
"""

from __future__ import annotations

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
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
]
SHELL = ("sh", "bash")
MARKS = ("file", "terminal", "until", "press", "exit", "not run")

_COMMENT = re.compile(r"<!-- (.*?) -->", re.DOTALL)
_MARK = re.compile(rf"(?:^|, )({'|'.join(MARKS)}): (.*?)(?=, (?:{'|'.join(MARKS)}): |$)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block; or, without language and text, a comment that stands alone."""

    page: Path
    line: int
    language: str = ""
    text: str = ""
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Where to look, as editors understand it."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """All blocks of a page in their order, each with the marks of the comment right before it."""
    tokens = MarkdownIt("commonmark").parse(page.read_text(encoding="utf-8"))
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
    """What stands as code inside sentences and tables."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    return (
        child.content for token in tokens for child in token.children or () if child.type == "code_inline"
    )


def marks(comment: str) -> dict[str, str]:
    """What the comments say, by name."""
    return {name: told for text in _COMMENT.findall(comment) for name, told in _MARK.findall(text.strip())}


def every_block(*languages: str) -> list[Block]:
    """The blocks of all pages in these languages."""
    return [block for page in PAGES for block in blocks(page) if block.language in languages and block.text]


def place(block: Block) -> str:
    """A block's name as a test's parameter."""
    return block.place
