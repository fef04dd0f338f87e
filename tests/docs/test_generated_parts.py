"""The parts of pages that the site generates: each is in one page, and its text follows the rules of the pages."""

from __future__ import annotations

import re

import pytest
from tests.docs.pages import PAGES
from tests.docs.test_glossary import REMOVED_WORDS

from reference import GENERATORS, filled, generate, parts_of


def test_each_part_is_in_one_page() -> None:
    found = [name for page in PAGES for name in parts_of(page.read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(GENERATORS)


def test_only_what_is_between_the_comments_is_replaced() -> None:
    page = "# T\n\n<!-- generated: changelog -->\nold\n<!-- end of generated -->\n\nend\n"
    before, _, after = filled(page).partition(generate("changelog"))
    assert (before, after) == ("# T\n\n", "\nend\n")


@pytest.mark.parametrize("name", sorted(GENERATORS.keys() - {"changelog", "contributing"}))
def test_a_generated_text_has_sections_or_a_table_and_the_standard_terms(name: str) -> None:
    text = generate(name)
    assert re.findall(r"^(## |\|)", text, re.MULTILINE)
    prose = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    assert [match[0] for match in REMOVED_WORDS.finditer(prose)] == []
