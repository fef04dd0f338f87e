"""The pictures on the pages exist, are valid PNG files, and are not too large."""

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
MAX_BYTES = 250_000
WIDTHS, HEIGHTS = range(300, 2_001), range(200, 2_001)
STATES = (
    *("list", "running", "waiting-for-retry", "held", "update", "decided", "routing"),
    *("no-worker", "failed", "cancelled", "finished"),
)


def shown() -> dict[Path, list[str]]:
    """Return every PNG on a page, with the names of these pages."""
    found: dict[Path, list[str]] = {}
    for page in PAGES:
        for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+\.png)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                found.setdefault((page.parent / target).resolve(), []).append(page.name)
    return found


@pytest.mark.parametrize("picture", shown(), ids=lambda path: path.name)
def test_picture_is_a_complete_png_of_a_reasonable_size(picture: Path) -> None:
    content = picture.read_bytes()
    assert content.startswith(SIGNATURE)
    assert content.endswith(END)
    width, height = struct.unpack(">II", content[16:24])
    assert width in WIDTHS
    assert height in HEIGHTS
    assert len(content) <= MAX_BYTES


@pytest.mark.parametrize("state", STATES)
def test_every_state_of_a_task_has_a_picture(state: str) -> None:
    assert "web-ui.md" in shown().get(DOCS / "img" / f"webui-{state}.png", [])


def test_every_picture_of_the_web_ui_is_on_a_page() -> None:
    kept = {path.resolve() for path in (DOCS / "img").glob("webui-*.png")}
    assert kept - shown().keys() == set()


def test_every_picture_has_an_alternative_text() -> None:
    text = (DOCS / "web-ui.md").read_text(encoding="utf-8")
    described = re.findall(r"!\[([^\]]*)\]", text)
    assert len(described) >= len(STATES)
    assert [words for words in described if len(words.split()) < 5] == []
