"""`flowkit validate` prints what docs/cli.md shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.docs.pages import DOCS, blocks

from flowkit.cli.app import run

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_graph_is_printed_as_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = list(blocks(DOCS / "cli.md"))
    (place,) = (i for i, block in enumerate(page) if block.marks.get("file") == "graph.json")
    graph, command, shown = page[place : place + 3]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graph.json").write_text(graph.text, encoding="utf-8")
    assert run(command.text.split()[1:]) == 0
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.splitlines()] == shown.text.splitlines()
