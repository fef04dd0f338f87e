"""Random graphs with routes, as users write them: each is rejected, or every way to run it comes to an end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.property_examples import examples
from tests.unit.test_graph_properties import Move, Simulation, moves

from flowkit.errors import GraphError
from flowkit.graph.validation import parse_graph
from flowkit.models import NodeStatus

SIZE = 6
LISTS = ("on_success", "on_failure")


@st.composite
def raw_graphs(draw: st.DrawFn) -> dict[str, Any]:
    """Return a graph whose dependencies, edges and routes mostly lead from earlier to later nodes."""
    ids = [f"n{i}" for i in range(draw(st.integers(2, SIZE)))]
    backwards = draw(st.integers(0, 9)) == 0
    pairs = [(a, b) for a in ids for b in ids if a < b or (backwards and a != b)]
    some = st.lists(st.sampled_from(pairs), unique=True, max_size=len(ids))
    needs, edges, extended = draw(some), draw(some), draw(st.sampled_from([[], pairs[:1]]))
    routes = {key: draw(some) for key in LISTS}
    nodes = [
        {
            "node_id": own,
            "type": "t",
            "depends_on": [a for a, b in needs if b == own],
            "fan_in": draw(st.sampled_from(["all", "any"])),
            "allow_failure": draw(st.booleans()),
            "routing": {key: [b for a, b in routes[key] if a == own] for key in LISTS},
        }
        for own in ids
    ]
    mode = draw(st.sampled_from(["fail", "continue"]))
    wired = {"edges": [list(pair) for pair in edges], "edges_ex": [{"from": a, "to": b} for a, b in extended]}
    return {"nodes": nodes, "on_node_failure": mode, **wired}


@settings(max_examples=examples(400), print_blob=True, suppress_health_check=list(HealthCheck))
@given(graph=raw_graphs(), played=moves(SIZE))
def test_accepted_graph_comes_to_an_end_as_the_model_says(graph: dict[str, Any], played: list[Move]) -> None:
    try:
        parsed = parse_graph(graph)
    except GraphError as error:
        assert "cycle" in str(error)
        return
    simulation = Simulation(parsed)
    simulation.run(played)
    assert simulation.scheduler.done


def expected_starts(graph: dict[str, Any], ended: str) -> set[str]:
    """Return which targets of one router start after it has finished, from the rules on the page."""
    pairs = {tuple(pair) for pair in graph["edges"]}
    given = {node["node_id"]: node["depends_on"] for node in graph["nodes"]}
    parents = {own: above or [a for a, b in pairs if b == own] for own, above in given.items()}
    routing = next(node["routing"] for node in graph["nodes"] if node["node_id"] == ended)
    children = {own for own, above in parents.items() if ended in above}
    repeated = {own for own in routing["on_success"] if (ended, own) not in pairs} | set(
        routing["on_failure"]
    )
    fired = set() if children - repeated else set(routing["on_success"])
    return fired | (children - repeated)


@pytest.mark.parametrize("by_edges", [frozenset("b"), frozenset("c"), frozenset("bc"), frozenset()])
@pytest.mark.parametrize("by_parents", [frozenset("b"), frozenset("c"), frozenset("bc"), frozenset()])
@pytest.mark.parametrize("success", [["b"], ["c"], ["b", "c"]])
@pytest.mark.parametrize("failure", [[], ["b"], ["d"]])
def test_precedence_of_edges_over_routes(
    by_edges: frozenset[str], by_parents: frozenset[str], success: list[str], failure: list[str]
) -> None:
    nodes: list[dict[str, Any]] = [
        {
            "node_id": own,
            "type": "t",
            "depends_on": ["a"] if own in by_parents else [],
            "routing": {"on_success": success, "on_failure": failure} if own == "a" else {},
        }
        for own in "abcd"
    ]
    graph = {"nodes": nodes, "edges": [["a", own] for own in sorted(by_edges)]}
    simulation = Simulation(parse_graph(graph))
    before = set(simulation.released)
    simulation.scheduler.end(0, NodeStatus.FINISHED)
    started = {simulation.graph.nodes[i].node_id for i in simulation.scheduler.pop_ready()}
    assert started == expected_starts(graph, "a") - {simulation.graph.nodes[i].node_id for i in before}
