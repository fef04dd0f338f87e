"""The description of a graph: edges that stream, and conditions of edges and nodes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.graphs import node, pulling

from flowkit.graph.description import NodeDescription, describe
from flowkit.graph.validation import parse_graph


def child(*edges: dict[str, Any], parents: int = 2, **fields: Any) -> NodeDescription:
    """Return the description of a node with the parents `p0`, `p1`, … and these entries of `edges_ex`."""
    ids = [f"p{i}" for i in range(parents)]
    nodes = [*map(node, ids), node("child", depends_on=ids, **fields)]
    wired = [{"from": each, "to": "child"} for each in ids if each not in {edge["from"] for edge in edges}]
    return describe(parse_graph({"nodes": nodes, "edges_ex": [*edges, *wired]}))[-1]


def edge(parent: str, **fields: Any) -> dict[str, Any]:
    """Return an entry of `edges_ex` that leads to the child."""
    return {"from": parent, "to": "child", **fields}


FIRST_BATCH = {"io": {"start_when": "first_batch"}}
STREAMS: list[tuple[list[dict[str, Any]], dict[str, Any], str, list[str]]] = [
    ([], {"parents": 1, **FIRST_BATCH}, "after the first batch of p0", ["p0"]),
    ([], {"fan_in": "any", **FIRST_BATCH}, "after the first batch of p0 or p1", ["p0", "p1"]),
    ([edge("p0", mode="async")], {}, "after p0 (first batch) and p1", ["p0"]),
    ([edge("p1", on_batch=True)], {"fan_in": "any"}, "after any of p0, p1 (first batch)", ["p1"]),
    (
        [edge("p0", mode="async")],
        {"parents": 3, "fan_in": "count:2"},
        "after 2 of p0 (first batch), p1, p2",
        ["p0"],
    ),
]


@pytest.mark.parametrize(("edges", "fields", "starts", "streams"), STREAMS)
def test_streaming_edges_are_marked(
    edges: list[dict[str, Any]], fields: dict[str, Any], starts: str, streams: list[str]
) -> None:
    found = child(*edges, **fields)
    assert found.starts == starts
    assert found.as_json["streams_from"] == streams


def test_mark_of_a_streaming_edge_is_shown_after_a_long_id() -> None:
    parents = [node("x" * 100), node("child", depends_on=["x" * 100])]
    edges = [{"from": "x" * 100, "to": "child", "mode": "async"}]
    found = describe(parse_graph({"nodes": parents, "edges_ex": edges}))[-1]
    assert found.starts == f"after {'x' * 25}… (first batch)"


def test_limit_ahead_of_streaming_children_is_an_option() -> None:
    above = node("p", io={"max_ahead": 4})
    below = node("c", depends_on=["p"], io={**pulling(), "start_when": "first_batch"})
    found = describe(parse_graph({"nodes": [above, below]}))[0]
    assert (found.differs, found.as_json["max_ahead"]) == ("at most 4 batches ahead", 4)


def test_condition_of_a_node_follows_its_gate() -> None:
    found = child(when="vars.sla == 'gold'")
    assert found.starts == "after p0 and p1; when vars.sla == 'gold'"
    assert found.as_json["when"] == "vars.sla == 'gold'"
    assert child(parents=0, when="params.day != ''").starts == "when params.day != ''"


def test_condition_of_an_edge_names_its_parent() -> None:
    found = child(edge("p1", when="params.full"))
    assert found.starts == "after p0 and p1; edge from p1 when params.full"
    assert found.as_json["edge_when"] == {"p1": "params.full"}


def test_long_conditions_are_shortened_and_many_are_counted() -> None:
    edges = [edge(f"p{i}", when=" ||\n ".join(["params.a"] * 50)) for i in range(9)]
    found = child(*edges, parents=9)
    assert found.starts.endswith("; 6 more edges with conditions")
    assert len(found.starts) < 400
    assert "\n" not in found.starts
