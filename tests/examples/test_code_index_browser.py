"""The report in a real browser: all figures are drawn, without console messages or network requests."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from tests.examples.runs import run
from tests.examples.test_code_index_page import HOSTILE, HOSTILE_TREE

from code_index.page.attempts import build_attempts
from code_index.page.browser import Viewport, load_page, take_screenshot
from code_index.page.render import build_figures, write_page
from flowkit.pictures.programs import find_browser

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="there is no Chromium on this machine"),
]

NOISY_PAGE = """<!doctype html><title>noisy</title>
<script>console.error("this is wrong"); fetch("http://example.com/data").catch(() => {});</script>
<img src="https://example.org/picture.png"><script>undefined_name.knows();</script>"""


def test_report_draws_all_figures_without_console_messages_or_requests(tmp_path: Path) -> None:
    hostile = run(HOSTILE_TREE, source=f"/src/{HOSTILE}")
    write_page(hostile, tmp_path / "report.html")
    loaded = load_page(tmp_path / "report.html")
    assert (loaded.console, loaded.requests) == ([], [])
    names = [figure["name"] for figure in build_figures(hostile, build_attempts(hostile))]
    assert f'data-drawn="{len(names)}"' in loaded.dom
    assert {name: _is_drawn(loaded.dom, name) for name in names} == dict.fromkeys(names, True)
    (title,) = re.findall(r"<title>(.*?)</title>", loaded.dom.partition("<body>")[0])
    assert title.startswith("Code index of /src/")


def _is_drawn(dom: str, name: str) -> bool:
    """Return whether Plotly has drawn something in the element of a figure."""
    element = dom.partition(f'id="{name}"')[2].partition("</figure>")[0]
    return "main-svg" in element and bool(re.search(r'class="(trace|point|slice)\b', element))


def test_console_messages_and_requests_of_a_page_are_detected(tmp_path: Path) -> None:
    (tmp_path / "noisy.html").write_text(NOISY_PAGE)
    loaded = load_page(tmp_path / "noisy.html")
    assert "this is wrong" in loaded.console
    assert any("undefined_name is not defined" in line for line in loaded.console)
    assert loaded.requests == ["http://example.com/data", "https://example.org/picture.png"]


def test_screenshot_of_a_section_has_the_size_of_the_window(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<!doctype html><p>above</p><section id="run">below</section>')
    take_screenshot(page, tmp_path / "run.png", Viewport(width=800, height=600, section="run"))
    data = (tmp_path / "run.png").read_bytes()
    size = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    assert (data[:8], size) == (b"\x89PNG\r\n\x1a\n", (800, 600))
