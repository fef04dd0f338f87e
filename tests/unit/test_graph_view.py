"""The graph of a task as people see it: the kinds of its edges."""

from __future__ import annotations

from flowkit.reading.graphs import EdgeKind, view_graph


def test_each_edge_has_its_kind_and_its_condition() -> None:
    view = view_graph(
        {
            "name": "g",
            "edges_ex": [{"from": "a", "to": "d", "when": "params.go"}],
            "nodes": [
                {"node_id": "a", "type": "x"},
                {"node_id": "b", "type": "x", "depends_on": ["a"]},
                {"node_id": "c", "type": "x", "depends_on": ["a"], "io": {"start_when": "first_batch"}},
                {"node_id": "d", "type": "x"},
                {"node_id": "r", "type": "x", "routing": {"on_failure": ["f"], "on_success": ["s"]}},
                {"node_id": "f", "type": "x"},
                {"node_id": "s", "type": "x"},
            ],
        }
    )
    ids = [each.node_id for each in view.nodes]
    found = {(ids[each.source], ids[each.target]): (each.kind, each.condition) for each in view.edges}
    assert view.name == "g"
    assert found == {
        ("a", "b"): (EdgeKind.PLAIN, None),
        ("a", "c"): (EdgeKind.STREAMING, None),
        ("a", "d"): (EdgeKind.CONDITIONAL, "params.go"),
        ("r", "f"): (EdgeKind.FAILURE, None),
        ("r", "s"): (EdgeKind.SUCCESS, None),
    }
