"""A graph as JSON, a flow, and JSON again: the normal form of a graph means the same."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.fuzz.adapter import graph_of
from tests.fuzz.campaign import plan_of
from tests.unit.graphs import RECHUNK, node, pulling
from tests.unit.property_examples import examples
from tests.unit.test_validation_fuzz import FULL, JSON, Path, paths, planted

from flowkit import Flow
from flowkit.errors import GraphError
from flowkit.graph.submission import validate_input

if TYPE_CHECKING:
    from flowkit.models import Graph


def meaning(graph: dict[str, Any]) -> Graph:
    """Return what a graph means. Its warnings, and the size of inputs, concern only how it is written."""
    parsed = validate_input("t", {"graph": graph})
    return replace(parsed, warnings=(), nodes=tuple(replace(each, io_bytes=0) for each in parsed.nodes))


def is_valid(graph: dict[str, Any]) -> bool:
    """Return whether a task may have this graph."""
    try:
        return bool(meaning(graph).nodes)
    except GraphError:
        return False


def check_round_trip(graph: dict[str, Any]) -> None:
    """Check that the normal form of a valid graph means the same, and is its own normal form."""
    before = copy.deepcopy(graph)
    normal = Flow.from_dict(graph).to_dict()
    assert meaning(normal) == meaning(graph)
    assert json.dumps(Flow.from_dict(normal).to_dict()) == json.dumps(normal)
    assert graph == before


def test_a_graph_with_every_field_keeps_its_meaning() -> None:
    check_round_trip(FULL)


@settings(max_examples=examples(150))
@given(path=st.sampled_from(list(paths(FULL))), value=JSON)
def test_a_graph_with_any_valid_value_keeps_its_meaning(path: Path, value: object) -> None:
    graph = planted(path, value)
    assume(is_valid(graph))
    check_round_trip(graph)


@settings(max_examples=examples(150))
@given(number=st.integers(0, 100_000))
def test_a_random_graph_keeps_its_meaning(number: int) -> None:
    graph = graph_of(plan_of(47, number))
    assume(is_valid(graph))
    check_round_trip(graph)


UNUSUAL: dict[str, list[dict[str, Any]]] = {
    "input without an adapter, but with its arguments": [
        node(io={"input_inline": {"input_adapter": None, "input_args": {"a": 1}}})
    ],
    "no sources": [node("a"), node("b", depends_on=["a"], io=pulling(from_nodes=[]))],
    "a source that is no parent": [node("a"), node("b", io=pulling(from_node="a"))],
    "sources in another order": [
        node("a"),
        node("b"),
        node("c", depends_on=["a", "b"], io=pulling(from_nodes=["b", "a", "b"])),
    ],
    "children before parents": [
        node("c", depends_on=["b"], io=pulling(RECHUNK, size=2, meta_list_key="items", poll_ms=5)),
        node("b", depends_on=["a"], fan_in="ALL"),
        node("a", routing={"on_failure": ["b"], "x-why": 1}),
    ],
    "values by expression": [
        node("a", io={"input_inline": {"day": {"$cel": "params.day"}, "deep": [{"$cel": "1 + 1"}]}}),
        node(
            "b", depends_on=["a"], io=pulling(poll_ms={"$cel": "params.poll"}), when='nodes["a"].stats.x > 1'
        ),
        node("c", map={"over": "params.list", "batch_size": 2, "parallel": None, "x-own": 1}),
    ],
    "empty objects": [
        node("a", io={"input_inline": {}, "input_ref": {}, "batching": {}, "fn_args": {}, "x-own": None}),
        node("b", on_batch_failure={}, retry_policy={}, routing={}, prerequisites=[], meta={}, name=""),
    ],
    "keys of an engine": [node("a", status="finished", attempt_epoch=3, stats={"x": 1})],
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_graph_keeps_its_meaning(name: str) -> None:
    check_round_trip({"nodes": UNUSUAL[name], "version_policy": "pin", "owner": "data", "name": 7})


def test_an_edge_that_takes_precedence_over_a_route_stays_one() -> None:
    nodes = [node("a", routing={"on_success": ["b", "c"]}), node("b"), node("c")]
    check_round_trip({"nodes": nodes, "edges": [["a", "b"]]})
    check_round_trip({"nodes": nodes, "edges_ex": [{"from": "a", "to": "b", "mode": "async", "owner": 1}]})


def test_a_repeated_route_stays_no_edge_beside_a_special_one() -> None:
    nodes = [
        node("a", routing={"on_success": ["c"]}),
        node("b"),
        node("c", depends_on=["a", "b"]),
    ]
    check_round_trip({"nodes": nodes, "edges_ex": [{"from": "b", "to": "c", "when": "true"}]})


def test_a_graph_that_is_not_valid_is_refused() -> None:
    with pytest.raises(GraphError, match="has a cycle"):
        Flow.from_dict({"nodes": [node("a", depends_on=["b"]), node("b", depends_on=["a"])]})


def test_json_of_a_flow_is_no_part_of_the_flow() -> None:
    flow = Flow.from_dict(FULL)
    before = json.dumps(flow.to_dict())
    flow.to_dict()["nodes"][0].clear()
    assert json.dumps(flow.to_dict()) == before
