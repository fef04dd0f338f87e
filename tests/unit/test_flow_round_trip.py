"""A graph as JSON, a flow, and JSON again: the normal form of a graph means the same."""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.fuzz.adapter import graph_of
from tests.fuzz.campaign import plan_of
from tests.unit.graphs import RECHUNK, node, pulling
from tests.unit.property_examples import examples
from tests.unit.test_validation_fuzz import FULL, JSON, Path, paths, planted

from flowkit import Flow, cel
from flowkit.errors import GraphError
from flowkit.flow import FlowNode
from flowkit.graph.submission import validate_input
from flowkit.testing import run_graph
from flowkit.worker import Batch, BatchResult, RoleHandler, RunContext

if TYPE_CHECKING:
    from collections.abc import Callable

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


@settings(max_examples=examples(40))
@given(path=st.sampled_from(list(paths(FULL))), value=JSON)
def test_a_graph_with_any_valid_value_keeps_its_meaning(path: Path, value: object) -> None:
    graph = planted(path, value)
    assume(is_valid(graph))
    check_round_trip(graph)


@settings(max_examples=examples(40))
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


class Chancy(RoleHandler):
    """Fails in some nodes, by their ids."""

    role = "role"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Fail permanently in every third node."""
        return BatchResult(success=int(ctx.node_id[1:]) % 3 != 2, permanent=True)


async def statuses(graph: dict[str, Any]) -> dict[str, str]:
    """Run a graph, and return how its nodes end.

    A node that two of its sources skip for different reasons has the reason of the one that ends first.
    """
    run = await run_graph(graph, Chancy())
    return {node_id: each.status for node_id, each in run.nodes.items()}


@pytest.mark.slow(3)
async def test_random_flows_run_like_their_json() -> None:
    graphs = [graph_of(plan_of(47, number)) | {"on_node_failure": "continue"} for number in range(40)]
    valid = [graph for graph in graphs if is_valid(graph)][:30]
    assert len(valid) == 30
    seen: Counter[str] = Counter()
    for graph in valid:
        found = await statuses(graph)
        assert await statuses(Flow.from_dict(graph).to_dict()) == found
        seen.update(found.values())
    assert seen["finished"] > 20 and seen["failed"] > 10 and seen["skipped"] > 10, seen


CHANGES: list[Callable[[FlowNode, list[FlowNode]], object]] = [
    lambda node, earlier: node.pulls(*earlier[:2], streaming=True),
    lambda node, earlier: node.pulls(*earlier[1:], poll_ms=5, when="true"),
    lambda node, earlier: node.pulls(*earlier, streaming="first_batch", waits=len(earlier) < 3),
    lambda node, earlier: node.after(*earlier[-1:]).gate("any"),
    lambda node, earlier: node.after(*earlier, is_edge=True).gate("all_done"),
    lambda node, earlier: node.input(day=cel("params.day"), limit=3).input_ref(path="x"),
    lambda node, earlier: node.retry(3, backoff_sec=timedelta(seconds=1.5), permanent_on=["x"]),
    lambda node, earlier: node.when("params.x > 1 || vars.y == 2").timeout(60).deadline(timedelta(hours=1)),
    lambda node, earlier: node.quarantine(max="5%").quarantine(attempts=2),
    lambda node, earlier: node.needs("data:eu").holds(60, on_failure=None).allow_failure(),
    lambda node, earlier: [each.routes(on_failure=[node]) for each in earlier[-1:]],
    lambda node, earlier: [each.routes(on_success=[node]) for each in earlier[:1]],
    lambda node, earlier: node.named(7).meta(owner="data").meta(team=1).extra({"x-a": None}),
    lambda node, earlier: node.max_ahead(5).batching(size=1).extra({"x-b": 1}, at="io"),
]


@settings(max_examples=examples(100))
@given(
    nodes=st.lists(st.lists(st.sampled_from(CHANGES), max_size=4), min_size=1, max_size=7),
)
def test_a_random_flow_reads_back_as_it_was_written(nodes: list[list[Any]]) -> None:
    flow, made = Flow("random", deadline_sec=60, extra={"owner": [1]}), list[FlowNode]()
    for number, changes in enumerate(nodes):
        made.append(flow.external(f"n{number}", "role"))
        for change in changes:
            change(made[-1], made[:-1])
    try:
        graph = flow.to_dict()
    except GraphError:  # a node that pulls from nothing, or a condition without effect
        assume(False)
    assert json.dumps(Flow.from_dict(graph).to_dict()) == json.dumps(graph)
