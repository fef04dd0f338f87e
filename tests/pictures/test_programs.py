"""SVG and PNG, which need an installed program."""

from __future__ import annotations

import os
import shutil
import struct
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from flowkit import products
from flowkit.errors import ConfigError
from flowkit.pictures import programs
from flowkit.pictures.dot import to_dot
from flowkit.pictures.formats import Format, draw
from tests.pictures.graphs import picture_of
from tests.sources import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from flowkit.pictures.programs import Kind

SVG = "{http://www.w3.org/2000/svg}"
SHOWN = {f"{SVG}{name}" for name in ("svg", "g", "title", "polygon", "path", "text")}


@pytest.fixture
def without_graphviz(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no Graphviz be found. Skip the test where there is none."""
    if products.graphviz() is None:
        pytest.skip("the page, which has a Graphviz in WebAssembly, is not installed")
    if programs.find_browser() is None:
        pytest.skip("there is no Chromium on PATH; install one (Debian: apt-get install chromium)")
    monkeypatch.setattr(programs, "GRAPHVIZ", "no-such-dot")


def check_svg(svg: bytes, name: str) -> None:
    """Check that an SVG has the nodes and edges of a picture, and nothing that a browser would run."""
    picture = picture_of(name)
    root = ElementTree.fromstring(svg)
    assert {each.tag for each in root.iter()} <= SHOWN
    kinds = [str(each.get("class")).split()[0] for each in root.iter(f"{SVG}g")]
    assert (kinds.count("node"), kinds.count("edge")) == (len(picture.boxes), len(picture.lines))
    texts = {"".join(each.itertext()) for each in root.iter(f"{SVG}text")}
    assert {line for box in picture.boxes for line in (box.heading, *box.details)} <= texts


def test_graphviz_draws_svg() -> None:
    if shutil.which(programs.GRAPHVIZ) is None:
        pytest.skip("there is no Graphviz on PATH; install it (Debian: apt-get install graphviz)")
    for name in ("hostile", "pipeline-states"):
        check_svg(draw(picture_of(name), Format.SVG), name)


@pytest.mark.slow
@pytest.mark.usefixtures("without_graphviz")
def test_chromium_draws_svg_and_png() -> None:
    check_svg(draw(picture_of("hostile"), Format.SVG), "hostile")
    png = draw(picture_of("pipeline-states"), Format.PNG)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    assert 400 < width < 3_000
    assert 300 < height < 3_000


def test_the_picture_of_the_documentation_is_that_of_a_kept_graph() -> None:
    check_svg((ROOT / "docs" / "img" / "graph.svg").read_bytes(), "pipeline-states")


def test_the_error_without_both_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError) as refused:
        draw(picture_of("one"), Format.PNG)
    assert str(refused.value) == (
        "format png: neither Graphviz (dot) nor Chromium (chromium, chromium-browser, google-chrome, chrome) is on "
        "PATH; install one of them, or use the format mermaid, dot or text, which need neither"
    )


def test_the_error_of_a_program_says_what_it_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = render_by(tmp_path, monkeypatch, "dot", 'echo "Format: svg not recognized" >&2; exit 1', "svg")
    assert "dot failed with code 1: Format: svg not recognized; repair or remove it, or use " in found


LAID_OUT = (
    """case "$*" in *dump-dom*) echo '<pre id="out">&lt;svg width="9pt" height="9pt"&gt;</pre>' ;; esac"""
)


@pytest.mark.parametrize(
    ("program", "script", "kind", "error"),
    [
        ("dot", "exit 0", "svg", "dot drew nothing; repair or remove it"),
        ("dot", "kill -9 $$", "png", "dot was killed by signal 9; repair or remove it"),
        ("chromium", LAID_OUT, "png", "chromium drew nothing; repair or remove it"),
        ("chromium", r"printf '\377'", "svg", "chromium drew nothing: \N{REPLACEMENT CHARACTER}; repair"),
    ],
)
def test_a_program_that_draws_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, script: str, kind: Kind, error: str
) -> None:
    monkeypatch.setattr(products, "graphviz", lambda: tmp_path / "graphviz.js")
    assert error in render_by(tmp_path, monkeypatch, program, script, kind)


def test_a_program_that_hangs_is_killed_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "TIMEOUT_SEC", 0.3)
    os.mkfifo(tmp_path / "held")  # The end of the child closes it.
    held = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    script = f"(exec 1>{tmp_path}/held; exec sleep 600) & wait"
    assert "dot drew nothing within 0 s" in render_by(tmp_path, monkeypatch, "dot", script, "svg")
    os.set_blocking(held, True)
    assert os.read(held, 1) == b""
    os.close(held)


def render_by(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str, script: str, kind: Kind) -> str:
    """Let a shell script be the only program that draws, and return the error."""
    path = folder / program
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setattr(
        "flowkit.pictures.programs.shutil.which", lambda name: str(path) if name == program else None
    )
    with pytest.raises(ConfigError) as refused:
        programs.render(to_dot(picture_of("one")), kind)
    return str(refused.value)


def test_without_the_page_chromium_cannot_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    browser = tmp_path / "chromium"
    browser.write_text("", encoding="utf-8")
    browser.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(products, "graphviz", lambda: None)
    with pytest.raises(ConfigError, match="needs the files of FlowKit's page, which are missing"):
        draw(picture_of("one"), Format.SVG)
