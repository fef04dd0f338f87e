"""`flowkit validate` shows the routes of a valid graph."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from flowkit.cli.app import run

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

GRAPH: dict[str, Any] = {
    "nodes": [
        {
            "node_id": "load",
            "type": "t",
            "routing": {"on_success": ["publish"], "on_failure": ["restore", "tell"]},
        },
        {"node_id": "publish", "type": "t", "routing": {"on_success": ["never"]}},
        {"node_id": "restore", "type": "t"},
        {"node_id": "tell", "type": "t", "depends_on": ["publish"]},
        {"node_id": "never", "type": "t"},
    ]
}


def test_routes_are_printed_without_ignored_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH), encoding="utf-8")
    assert run(["validate", "graph.json"]) == 0
    printed = capsys.readouterr()
    assert printed.out == (
        "graph.json is valid: 5 nodes\n  load: on_success starts publish; on_failure starts restore, tell\n"
    )
    assert "'publish': routing.on_success is ignored" in printed.err
    assert "'never' never starts" in printed.err


def test_routes_are_part_of_the_json_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(GRAPH), encoding="utf-8")
    assert run(["validate", "--json", str(file)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["routes"] == {"load": {"on_success": ["publish"], "on_failure": ["restore", "tell"]}}
    assert run(["validate", "--json", "--strict", str(file)]) == 2


def test_caret_points_at_the_error_of_a_condition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    load = {"node_id": "load", "type": "t", "depends_on": ["extract"], "when": "vars.sla == gold"}
    store = {
        "node_id": "store",
        "type": "t",
        "when": "params.day != '' &&\n  nodes.extrcat.status == 'failed'",
    }
    edges = [{"from": "extract", "to": "load", "when": "size(vars.rows) +"}]
    nodes = [{"node_id": "extract", "type": "t"}, load, store]
    (tmp_path / "graph.json").write_text(json.dumps({"nodes": nodes, "edges_ex": edges}), encoding="utf-8")
    assert run(["validate", "graph.json"]) == 2
    assert (
        capsys.readouterr().err
        == """\
flowkit: node 'load': when: undeclared reference to 'gold'; the variables are nodes, params, vars
  | vars.sla == gold
  |             ^
flowkit: graph.edges_ex 'extract' -> 'load': when: the expression is incomplete
  | size(vars.rows) +
  |                  ^
flowkit: node 'store': when: 'extrcat' is not a node; did you mean 'extract'?
  |   nodes.extrcat.status == 'failed'
  |   ^
"""
    )
