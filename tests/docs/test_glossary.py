"""The glossary is short, and the vocabulary that it replaced stays out of the code and the pages."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest
from tests.docs.pages import DOCS, PAGES, ROOT

if TYPE_CHECKING:
    from pathlib import Path

REMOVED_NAMES = frozenset(
    (
        *("Walk", "Flight", "airborne", "stirred", "halted", "take_ready", "spend"),
        *("durably", "shortened", "HomeLoop", "Pulse", "FlagWatch", "Hooks", "Presence"),
        *("Duty", "EngineDuty", "Newsroom", "News", "Bookkeeping", "RoleBody", "FunctionBody"),
        *("RoleHost", "GiveUp", "Again", "OneInput", "TimelessTask", "WorkerTask", "flagged_by_hand"),
    )
)
REMOVED_WORDS = re.compile(r"\b(answers|tells|told|goes on|somebody|nobody|whoever|mends)\b", re.IGNORECASE)
CODE = ("workflows", "activities", "adapters", "bridge", "src/flowkit")
ROW = re.compile(r"^\| \*\*(.+?)\*\* \| (.+) \|$", re.MULTILINE)


def names() -> set[str]:
    """Every name that the code defines or uses, in the files in which one of the replaced names occurs as a word."""
    found: set[str] = set()
    replaced = re.compile(rf"\b(?:{'|'.join(REMOVED_NAMES)})\b")
    texts = (path.read_text(encoding="utf-8") for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    for text in filter(replaced.search, texts):
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                    found.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
    return found


def test_the_glossary_defines_at_most_forty_terms_in_one_sentence_each() -> None:
    rows = ROW.findall((DOCS / "glossary.md").read_text(encoding="utf-8"))
    assert 20 <= len(rows) <= 40
    assert [term for term, meaning in rows if re.search(r"\.\s+[A-Z]", meaning)] == []
    terms = [term.replace("-", "") for term, _ in rows]
    assert terms == sorted(terms, key=str.lower)


def test_no_code_uses_a_name_that_the_standard_terms_replaced() -> None:
    assert sorted(names() & REMOVED_NAMES) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_uses_a_word_that_the_standard_terms_replaced(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [match[0] for match in REMOVED_WORDS.finditer(prose)] == []
