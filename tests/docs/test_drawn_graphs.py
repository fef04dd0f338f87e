"""The text pictures on the pages are those of the graphs before them."""

from __future__ import annotations

import ast
import json
import runpy
from typing import TYPE_CHECKING, Any

import pytest
from tests.docs.pages import PAGES, blocks

from flowkit.pictures.model import make_picture
from flowkit.pictures.text import to_text
from flowkit.reading.graphs import view_graph

if TYPE_CHECKING:
    from pathlib import Path

    from tests.docs.pages import Block


FLOW = "\nflow = Flow("


def drawn() -> list[tuple[Block, Block]]:
    """Return each picture on a page with the block of its graph."""
    found = []
    for page in PAGES:
        graph: Block | None = None
        for block in blocks(page):
            if '"nodes"' in block.text or FLOW in block.text:
                graph = block
            elif "picture" in block.marks:
                assert graph is not None, f"{block.place}: there is no graph before the picture"
                found.append((graph, block))
    return found


def read_graph(block: Block, folder: Path) -> Any:
    """Return the graph in a block of JSON or Python, or that of the flow in a program."""
    if block.language == "json":
        given = json.loads(block.text)
        return given.get("graph", given)
    if FLOW in block.text:
        program = folder / "page.py"
        program.write_text(block.text, encoding="utf-8")
        return runpy.run_path(str(program))["flow"].to_dict()
    assignment = ast.parse(block.text).body[0]
    assert isinstance(assignment, ast.Assign)
    return ast.literal_eval(assignment.value)


@pytest.mark.parametrize(("graph", "shown"), drawn(), ids=lambda block: block.place)
def test_picture_is_that_of_the_graph_before_it(graph: Block, shown: Block, tmp_path: Path) -> None:
    picture = make_picture(view_graph(read_graph(graph, tmp_path)))
    assert to_text(picture, int(shown.marks["picture"])).plain.splitlines() == shown.text.splitlines()


def test_pages_have_pictures() -> None:
    assert len(drawn()) >= 3
