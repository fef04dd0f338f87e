"""`flowkit validate` shows the nodes of a valid graph and when they start."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from flowkit.cli.app import run
from flowkit.cli.tasks.display import MOST_ROWS, graph_table
from flowkit.graph.description import describe
from flowkit.graph.validation import parse_graph
from tests.unit.graphs import node

if TYPE_CHECKING:
    from pathlib import Path

GRAPH: dict[str, Any] = {
    "on_node_failure": "continue",
    "nodes": [
        {"node_id": "tell", "type": "mail", "depends_on": ["publish"], "retry_policy": {"max": 0}},
        {"node_id": "load", "type": "t", "routing": {"on_success": ["publish"], "on_failure": ["restore"]}},
        {"node_id": "publish", "type": "t", "routing": {"on_success": ["never"]}},
        {"node_id": "restore", "type": "coordinator_fn", "io": {"fn": "vars.set"}},
        {"node_id": "never", "type": "t"},
    ],
}
PRINTED = """\
graph.json is valid: 5 nodes
after a failure, the nodes that do not depend on the failed node still run

node     role        starts                                 options
load     t           at once                                failure starts restore
publish  t           if load succeeds
tell     mail        after publish                          no retries
restore  vars.set()  if load fails
never    t           never: only ignored routes lead to it
"""


def lines(text: str) -> list[str]:
    """Return the lines of a text without the blanks at their ends."""
    return [line.rstrip() for line in text.splitlines()]


def in_terminal(nodes: list[dict[str, Any]], columns: int) -> list[str]:
    """Return the table as a terminal of this width shows it."""
    console = Console(width=columns, force_terminal=True, color_system=None, markup=False)
    with console.capture() as captured:
        console.print(graph_table(describe(parse_graph({"nodes": nodes})), wide=True))
    return lines(captured.get())


@pytest.fixture
def graph_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a file with the graph, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH), encoding="utf-8")
    return "graph.json"


def test_nodes_are_printed_in_the_order_in_which_they_can_start(
    graph_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["validate", graph_file]) == 0
    printed = capsys.readouterr()
    assert lines(printed.out) == PRINTED.splitlines()
    assert "'publish': routing.on_success is ignored" in printed.err
    assert "'never' never starts" in printed.err


def test_json_output_has_every_node(graph_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "--json", graph_file]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["on_node_failure"] == "continue"
    assert [each["node_id"] for each in shown["nodes"]] == ["load", "publish", "tell", "restore", "never"]
    assert shown["nodes"][3] == {
        "node_id": "restore",
        "fn": "vars.set",
        "starts": "if load fails",
        "routed_by": {"load": ["on_failure"]},
    }
    assert run(["validate", "--json", "--strict", graph_file]) == 2


def test_invalid_graph_has_no_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "graph.json").write_text('{"nodes": []}', encoding="utf-8")
    assert run(["validate", "--json", str(tmp_path / "graph.json")]) == 2
    assert json.loads(capsys.readouterr().out)["nodes"] == []


def test_fan_out_of_hundreds_of_nodes_takes_three_rows() -> None:
    pages = [node(f"page-{i}", depends_on=["list"]) for i in range(498)]
    shown = in_terminal([node("list"), *pages, node("join", depends_on=[p["node_id"] for p in pages])], 80)
    assert [line.split("  ")[0] for line in shown[2:]] == ["list", "page-0 and 497 more", "join"]
    assert shown[-1].endswith("after page-0, page-1, page-2 and 495 more")


def test_table_of_a_long_chain_ends_with_the_number_of_hidden_nodes() -> None:
    chain = [node(f"s{i}", depends_on=[f"s{i - 1}"] if i else []) for i in range(500)]
    shown = in_terminal(chain, 80)
    assert len(shown) == MOST_ROWS + 3
    assert shown[-1] == "… 460 more"


@pytest.mark.parametrize("columns", [80, 100])
def test_long_names_and_texts_fit_into_a_terminal(columns: int) -> None:
    policy = {"permanent_on": ["x" * 300], "backoff_coefficient": 2}
    above = [node(f"{i}" * 200, retry_policy=policy, timeout_sec=5400) for i in range(3)]
    shown = in_terminal([*above, node("c" * 200, depends_on=[each["node_id"] for each in above])], columns)
    assert max(map(len, shown)) <= columns
    assert len(shown) <= 30


def test_name_of_a_function_stays_on_its_line() -> None:
    function = node("n", type="coordinator_fn", io={"fn": "a\nb"})
    assert in_terminal([function], 80)[-1].split() == ["n", "a", "b()", "at", "once"]


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
flowkit: graph.json:1: node 'load': when: undeclared reference to 'gold'; the variables are nodes, params, task, vars
  | vars.sla == gold
  |             ^
flowkit: graph.edges_ex 'extract' -> 'load': when: the expression is incomplete
  | size(vars.rows) +
  |                  ^
flowkit: graph.json:1: node 'store': when: 'extrcat' is not a node; did you mean 'extract'?
  |   nodes.extrcat.status == 'failed'
  |   ^
"""
    )


HANDLERS = """\
from flowkit.worker import RoleHandler

class Page:
    url: str

class Crawl(RoleHandler):
    role = "crawl"
    def output_schema(self):
        return {"title": "Page", "type": "object", "properties": {"url": {"type": "string"}}}

class Count(RoleHandler):
    role = "count"
    def input_schema(self):
        return {"title": "Words", "type": "object", "properties": {"url": {"type": "integer"}}, "required": ["url"]}
"""


def test_handlers_must_fit_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fitting_shop.py").write_text(HANDLERS)
    io = {"input_inline": {"input_adapter": "pull.from_artifacts"}}
    pulling = {"node_id": "count", "type": "count", "depends_on": ["crawl"], "io": io}
    graph = {"nodes": [{"node_id": "crawl", "type": "crawl"}, pulling]}
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    crawl, count = (["--handler", f"fitting_shop:{name}"] for name in ("Crawl", "Count"))
    assert run(["validate", "graph.json", *crawl, *count, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    text = (
        "graph.json:1: node 'count' pulls from 'crawl', but the output of role 'crawl', Page, does not fit the "
        "input of role "
        "'count', Words: 'url' is string, not integer; use one type for it in the output "
        "(fitting_shop.py:6) and the input (fitting_shop.py:11)"
    )
    assert (found["valid"], found["problems"]) == (False, [text])
    assert run(["validate", "graph.json", *crawl]) == 0
    assert capsys.readouterr().out.startswith("graph.json is valid: 2 nodes")
