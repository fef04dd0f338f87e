"""`flowkit validate` prints what docs/cli.md and docs/graphs.md show."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.docs.pages import DOCS, blocks

from flowkit.cli.app import run
from flowkit.schema import graph_schema

if TYPE_CHECKING:
    from pathlib import Path


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


@pytest.mark.parametrize("name", ["graph.yaml", "typo.yaml"])
def test_yaml_is_validated_as_the_page_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = list(blocks(DOCS / "graphs.md"))
    (place,) = (i for i, block in enumerate(page) if block.marks.get("file") == name)
    graph, command, shown = page[place : place + 3]
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(graph.text, encoding="utf-8")
    code = int(command.marks.get("exit", "0"))
    assert run(command.text.split()[1:]) == code
    printed = capsys.readouterr()
    lines = (printed.err if code else printed.out).splitlines()
    assert [line.rstrip() for line in lines] == shown.text.splitlines()
    assert accepted_by_editors(tmp_path / name) is (code == 0)


def accepted_by_editors(graph: Path) -> bool:
    """Return whether a graph matches the schema, for the command that the page shows."""
    schema = graph.parent / "flowkit-graph.schema.json"
    schema.write_text(json.dumps(graph_schema()), encoding="utf-8")
    command = [sys.executable, "-m", "check_jsonschema", "--schemafile", str(schema), str(graph)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
