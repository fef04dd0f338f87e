"""How a graph says which nodes start on the first batch of a parent."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.graphs import node, pulling, two

from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskClient
from flowkit.graph.submission import external_warnings, validate_input
from flowkit.graph.validation import parse_graph
from flowkit.models import StartWhen
from flowkit.testing import memory_database

FIRST = {"start_when": "first_batch"}


def graph_with(*nodes: dict[str, Any], **graph: Any) -> dict[str, Any]:
    """Return a graph with the parents `a` and `b`, and these nodes."""
    return {"nodes": [node("a"), node("b"), *nodes], **graph}


def streams(graph: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the parents from which each node streams, without the nodes that stream from none."""
    return {each.node_id: each.streams_from for each in parse_graph(graph).nodes if each.streams_from}


def edge(parent: str, child: str, **fields: Any) -> dict[str, Any]:
    """Return an entry of `edges_ex`."""
    return {"from": parent, "to": child, **fields}


@pytest.mark.parametrize("word", ["first_batch", "First_Batch"])
@pytest.mark.parametrize("fan_in", ["all", "any"])
def test_first_batch_makes_every_edge_of_a_node_stream(word: str, fan_in: str) -> None:
    graph = graph_with(node("c", depends_on=["a", "b"], fan_in=fan_in, io={"start_when": word}))
    assert streams(graph) == {"c": ("a", "b")}
    assert parse_graph(graph).nodes[2].io.start_when is StartWhen.FIRST_BATCH
    assert parse_graph(graph).warnings == ()


@pytest.mark.parametrize("asks", [{"mode": "async"}, {"on_batch": True}, {"mode": "async", "on_batch": True}])
def test_only_an_async_edge_streams(asks: dict[str, Any]) -> None:
    graph = graph_with(node("c"), edges_ex=[edge("a", "c", **asks), edge("b", "c")])
    assert streams(graph) == {"c": ("a",)}
    assert parse_graph(graph).nodes[2].depends_on == ("a", "b")
    assert parse_graph(graph).nodes[2].io.start_when is StartWhen.READY


def test_async_edge_beside_the_same_plain_edge_streams() -> None:
    graph = graph_with(node("c"), edges=[["a", "c"]], edges_ex=[edge("a", "c", mode="async")])
    assert streams(graph) == {"c": ("a",)}


def test_async_edge_beside_depends_on_streams_if_it_names_a_parent() -> None:
    child = node("c", depends_on=["a"])
    assert streams(graph_with(child, edges_ex=[edge("a", "c", mode="async")])) == {"c": ("a",)}
    graph = graph_with(child, edges_ex=[edge("a", "c"), edge("b", "c", mode="async")])
    assert streams(graph) == {}
    assert any("'b' -> 'c': the async edge is ignored" in text for text in parse_graph(graph).warnings)


def test_first_batch_of_the_node_overrides_its_async_edges_with_a_warning() -> None:
    graph = graph_with(node("c", io=FIRST), edges_ex=[edge("a", "c", mode="async"), edge("b", "c")])
    assert streams(graph) == {"c": ("a", "b")}
    (warning,) = parse_graph(graph).warnings
    assert "'c'" in warning and "async edges that lead to the node are ignored" in warning


def test_first_batch_has_no_effect_with_a_count_of_finished_parents() -> None:
    graph = graph_with(node("c", depends_on=["a", "b"], fan_in="count:2", io=FIRST))
    assert streams(graph) == {}
    (warning,) = parse_graph(graph).warnings
    assert "no effect with fan_in 'count:2'" in warning and "mode 'async'" in warning


def test_async_edges_of_a_node_with_first_batch_and_a_count_do_not_stream() -> None:
    child = node("c", fan_in="count:2", io=FIRST)
    graph = graph_with(child, edges_ex=[edge("a", "c", mode="async"), edge("b", "c")])
    assert streams(graph) == {}


def test_async_edges_count_with_a_count() -> None:
    edges = [edge("a", "c", mode="async"), edge("b", "c", mode="async")]
    assert streams(graph_with(node("c", fan_in="count:2"), edges_ex=edges)) == {"c": ("a", "b")}


def test_first_batch_of_a_node_without_parents_has_no_effect() -> None:
    graph = graph_with(node("c", io=FIRST))
    assert streams(graph) == {}
    assert "'c'" in parse_graph(graph).warnings[0] and "no parents" in parse_graph(graph).warnings[0]


def test_coordinator_function_never_streams() -> None:
    graph = {
        "nodes": [
            node("a"),
            node("f", type="coordinator_fn"),
            node("c", depends_on=["a", "f"], io=FIRST),
        ]
    }
    assert streams(graph) == {"c": ("a",)}
    (warning,) = parse_graph(graph).warnings
    assert "'c' cannot start on a batch of 'f'" in warning and "stores no batches" in warning


def test_route_never_streams() -> None:
    routing = node("r", routing={"on_success": ["c"]})
    assert streams(graph_with(routing, node("c", depends_on=["a", "r"], io=FIRST))) == {"c": ("a",)}


@pytest.mark.parametrize("value", ["yes", 1, []])
def test_malformed_on_batch_is_ignored_with_a_warning(value: object) -> None:
    """Earlier releases accepted any value, so a graph that they accepted must stay valid."""
    graph = graph_with(node("c"), edges_ex=[edge("a", "c", on_batch=value), edge("b", "c", on_batch=True)])
    assert streams(graph) == {"c": ("b",)}
    assert "on_batch" in parse_graph(graph).warnings[0] and "true or false" in parse_graph(graph).warnings[0]


def test_max_ahead_is_kept() -> None:
    parent = node("a", io={"max_ahead": 5})
    child = node("c", depends_on=["a"], io={**FIRST, **pulling()})
    graph = parse_graph({"nodes": [parent, child]})
    assert [each.max_ahead for each in graph.nodes] == [5, 0]
    assert graph.warnings == ()


@pytest.mark.parametrize("child", [{}, {"io": pulling()}, {"io": FIRST}], ids=["plain", "pulls", "streams"])
def test_max_ahead_without_a_streaming_child_that_pulls_has_no_effect(child: dict[str, Any]) -> None:
    graph = {"nodes": [node("a", io={"max_ahead": 5}), node("c", **{"depends_on": ["a"], **child})]}
    (warning,) = parse_graph(graph).warnings
    assert "'a'" in warning and "io.max_ahead has no effect" in warning


def test_max_ahead_of_an_external_role_has_no_effect() -> None:
    graph = two(io={**FIRST, **pulling()})
    graph["nodes"][0]["io"] = {"max_ahead": 2}
    parsed = parse_graph(graph)
    (warning,) = external_warnings(parsed, ["crawler"])
    assert "'extract'" in warning and "external role 'crawler'" in warning
    assert not [*external_warnings(parsed, ["other"])]


@pytest.mark.parametrize(
    ("fields", "warns"),
    [
        ({}, True),
        ({"io": {"input_inline": {"day": 1}}}, True),
        ({"io": {"start_when": "first_batch"}}, True),
        ({"io": pulling()}, False),
        ({"io": {"input_inline": {"input_adapter": "noop"}}}, False),
        ({"io": {"input_inline": {"day": {"$cel": "params.day"}}}}, False),
        ({"map": {"over": "params.days"}}, False),
        ({"type": "coordinator_fn", "io": {"fn": "noop"}}, False),
        ({"depends_on": ["f"]}, False),
        ({"depends_on": []}, False),
    ],
)
def test_node_that_runs_after_others_and_reads_none_of_their_data_is_named(
    fields: dict[str, Any], warns: bool
) -> None:
    function = {"node_id": "f", "type": "coordinator_fn", "depends_on": ["a"]}
    nodes = [node("a"), function, node("c", **{"depends_on": ["a", "f"], **fields})]
    given = {"params": {"day": 1, "days": [1]}, "graph": {"nodes": nodes}}
    found = [each for each in validate_input("t", given).warnings if "names no input adapter" in each]
    assert bool(found) is warns
    if warns:
        assert found[0].startswith("node 'c' runs after a but names no input adapter")
        assert found[0].endswith(
            '\n  | "input_adapter": "pull.from_artifacts",\n  | "input_args": {"from_nodes": ["a"]}'
        )


class NotStarted(Exception):
    """Raised in place of starting the workflow."""


class Refusing:
    """Temporal's client, as far as the start of a task needs it."""

    async def start_workflow(self, *given: Any, **options: Any) -> None:
        """Raise NotStarted."""
        raise NotStarted


async def test_client_logs_a_warning_about_a_graph_once(caplog: pytest.LogCaptureFixture) -> None:
    temporal: Any = Refusing()
    client = TaskClient(temporal, TaskStore(memory_database()), queue="q")
    for child in ("c", "c", "d", "c"):
        with pytest.raises(NotStarted):
            await client.create_task(params={}, graph=graph_with(node(child, depends_on=["a"])))
    logged = [
        record.getMessage() for record in caplog.records if "names no input adapter" in record.getMessage()
    ]
    assert [text.partition("node ")[2][:3] for text in logged] == ["'c'", "'d'"]
