"""Documents show parents by the rules of validation, and graphs are compared by what they run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkit.adapters.tasks.fields import graph_difference, new_task
from flowkit.graph.validation import parents_of, parse_graph

IDS = ["a", "b", "c", "d", "e"]


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, Any]:
    """Generate graphs with parents in the nodes, in the edges, or in both."""
    pairs = [(one, other) for place, other in enumerate(IDS) for one in IDS[:place]]
    some = st.lists(st.sampled_from(pairs), max_size=6)
    own, empty = draw(some), draw(st.sets(st.sampled_from(IDS)))
    nodes: list[dict[str, Any]] = []
    for node_id in IDS:
        parents = [source for source, target in own if target == node_id]
        given_parents = {"depends_on": parents} if parents or node_id in empty else {}
        nodes.append({"node_id": node_id, "type": "crawler", **given_parents})
    edges = [list(pair) for pair in draw(some)]
    extended = [{"from": source, "to": target} for source, target in draw(some)]
    return {"nodes": nodes, "edges": edges, "edges_ex": extended}


@given(graphs())
def test_document_lists_the_parents_determined_by_validation(graph: dict[str, Any]) -> None:
    shown = new_task("t", {}, graph, 0.0)["graph"]
    expected = {node.node_id: list(node.depends_on) for node in parse_graph(graph).nodes}
    assert {node["node_id"]: node["depends_on"] for node in shown["nodes"]} == expected
    assert {node_id: parents_of(shown, node_id) for node_id in IDS} == expected
    assert graph_difference(shown, graph) is None


@pytest.mark.parametrize(
    "stored", [{}, {"nodes": 3}, {"nodes": [{}]}, {"nodes": [{"node_id": "a"}], "edges": [1]}]
)
def test_document_without_a_valid_graph_differs_from_every_graph(stored: dict[str, Any]) -> None:
    given_graph = {"nodes": [{"node_id": "a", "type": "crawler"}]}
    assert graph_difference(stored, given_graph) == "its document contains no graph"


def test_task_has_a_namespace_and_database_id_only_if_they_are_known() -> None:
    graph = {"nodes": [{"node_id": "a", "type": "crawler"}]}
    assert not {"namespace_id", "database_id"} & new_task("t", {}, graph, 0.0).keys()
    known = new_task("t", {}, graph, 0.0, namespace_id="ns", database_id="db")
    assert (known["namespace_id"], known["database_id"]) == ("ns", "db")
