"""The pictures that pages show are there, are pictures, and are not too large to load."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

import pytest
from tests.docs.pages import DOCS, PAGES

if TYPE_CHECKING:
    from pathlib import Path

SIGNATURE = b"\x89PNG\r\n\x1a\n"
END = b"IEND\xaeB`\x82"
MOST_BYTES = 250_000
WIDTHS, HEIGHTS = range(400, 2_001), range(200, 2_001)
STATES = ("list", "running", "waiting-for-retry", "no-worker", "failed", "cancelled", "finished")


def shown() -> dict[Path, list[str]]:
    """Every PNG that a page shows, with the names of those pages."""
    found: dict[Path, list[str]] = {}
    for page in PAGES:
        for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+\.png)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                found.setdefault((page.parent / target).resolve(), []).append(page.name)
    return found


@pytest.mark.parametrize("picture", shown(), ids=lambda path: path.name)
def test_a_shown_picture_is_a_whole_png_of_a_sensible_size(picture: Path) -> None:
    content = picture.read_bytes()
    assert content.startswith(SIGNATURE)
    assert content.endswith(END)
    width, height = struct.unpack(">II", content[16:24])
    assert width in WIDTHS
    assert height in HEIGHTS
    assert len(content) <= MOST_BYTES


@pytest.mark.parametrize("state", STATES)
def test_every_state_of_a_task_is_shown(state: str) -> None:
    assert "web-ui.md" in shown().get(DOCS / "img" / f"webui-{state}.png", [])


def test_no_picture_of_the_web_ui_is_kept_that_no_page_shows() -> None:
    kept = {path.resolve() for path in (DOCS / "img").glob("webui-*.png")}
    assert kept - shown().keys() == set()


def test_every_picture_is_described_for_those_who_cannot_see_it() -> None:
    text = (DOCS / "web-ui.md").read_text(encoding="utf-8")
    described = re.findall(r"!\[([^\]]*)\]", text)
    assert len(described) >= len(STATES)
    assert [words for words in described if len(words.split()) < 5] == []
