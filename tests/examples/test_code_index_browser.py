"""The report in a real browser without a network: everything is drawn, nobody complains, nothing is asked for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from tests.examples.runs import run
from tests.examples.test_code_index_page import EVIL, EVIL_TREE

from code_index.page.attempts import attempts_of
from code_index.page.browser import Window, find_browser, take_picture, visit
from code_index.page.render import drawn, write_page

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="there is no Chromium on this machine"),
]

TROUBLED = """<!doctype html><title>troubled</title>
<script>console.error("this is wrong"); fetch("http://example.com/data").catch(() => {});</script>
<img src="https://example.org/picture.png"><script>nobody.knows();</script>"""


def test_the_report_draws_all_figures_without_a_complaint_or_a_request(tmp_path: Path) -> None:
    evil = run(EVIL_TREE, source=f"/src/{EVIL}")
    write_page(evil, tmp_path / "report.html")
    seen = visit(tmp_path / "report.html")
    assert (seen.console, seen.requests) == ([], [])
    names = [figure["name"] for figure in drawn(evil, attempts_of(evil))]
    assert f'data-drawn="{len(names)}"' in seen.dom
    assert {name: _is_drawn(seen.dom, name) for name in names} == dict.fromkeys(names, True)
    (title,) = re.findall(r"<title>(.*?)</title>", seen.dom.partition("<body>")[0])
    assert title.startswith("Code index of /src/")


def _is_drawn(dom: str, name: str) -> bool:
    """Whether Plotly has drawn something into the element of a figure."""
    element = dom.partition(f'id="{name}"')[2].partition("</figure>")[0]
    return "main-svg" in element and bool(re.search(r'class="(trace|point|slice)\b', element))


def test_a_page_that_complains_and_asks_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "troubled.html").write_text(TROUBLED)
    seen = visit(tmp_path / "troubled.html")
    assert "this is wrong" in seen.console
    assert any("nobody is not defined" in line for line in seen.console)
    assert seen.requests == ["http://example.com/data", "https://example.org/picture.png"]


def test_a_picture_shows_a_section_in_the_size_of_the_window(tmp_path: Path) -> None:
    write_page(run(), tmp_path / "report.html")
    take_picture(tmp_path / "report.html", tmp_path / "run.png", Window(width=800, height=600, section="run"))
    data = (tmp_path / "run.png").read_bytes()
    size = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    assert (data[:8], size) == (b"\x89PNG\r\n\x1a\n", (800, 600))
