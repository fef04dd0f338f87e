"""The normalized form of an accepted graph."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.graphs import PULL, RECHUNK, node, one, pulling, two

from flowkit.graph import validation
from flowkit.graph.validation import normalized, parse_graph
from flowkit.models import FanIn, NodeIO, OnNodeFailure, RetryPolicy

RUNTIME: dict[str, Any] = {
    "status": "finished",
    "attempt_epoch": 3,
    "lease": {"worker_id": "w"},
    "stats": {"count": 1},
    "streaming": {},
    "started_at": "2024-01-01T00:00:00+00:00",
    "finished_at": None,
    "last_event_recv_ms": 0,
    "next_retry_at_ms": None,
    "last_error": "boom",
    "stats_cached_at": None,
    "cancel_requested_at": None,
    "coordinator": {"cancelled": True},
}


def parents(graph: dict[str, Any]) -> dict[str, list[str]]:
    """Return the parents of each node after normalization."""
    return {n.node_id: list(n.depends_on) for n in parse_graph(graph).nodes}


def sources(io: dict[str, Any], **fields: Any) -> list[str]:
    """Return `from_nodes` of the pulling node `load` after normalization."""
    inline = parse_graph(two(io=io, **fields)).nodes[1].io.input_inline
    assert inline is not None
    assert "from_node" not in inline["input_args"]
    return list(inline["input_args"]["from_nodes"])


def test_minimal_node_gets_the_documented_defaults() -> None:
    graph = parse_graph(one())
    (bare,) = graph.nodes
    assert (bare.node_id, bare.index, bare.type, bare.depends_on) == ("extract", 0, "crawler", ())
    assert (bare.fan_in, bare.io, bare.allow_failure, bare.timeout_sec) == (
        FanIn(mode="all"),
        NodeIO(),
        False,
        None,
    )
    assert graph.on_node_failure is OnNodeFailure.FAIL
    assert graph.warnings == ()


def test_default_retries_are_two_after_300_seconds() -> None:
    assert parse_graph(one()).nodes[0].retry_policy == RetryPolicy(
        max=2, backoff_sec=300, permanent_on=("bad_input", "schema_mismatch")
    )


def test_null_is_equivalent_to_a_missing_field() -> None:
    keys = ("depends_on", "fan_in", "io", "retry_policy", "routing", "allow_failure", "timeout_sec")
    assert parse_graph(one(**dict.fromkeys(keys))) == parse_graph(one())


def test_null_in_io_and_retry_policy_is_equivalent_to_a_missing_field() -> None:
    io = dict.fromkeys(("input_ref", "input_inline", "batching", "start_when", "fn", "fn_args"))
    retry = dict.fromkeys(
        ("max", "backoff_sec", "backoff_coefficient", "max_backoff_sec", "jitter", "permanent_on")
    )
    nulls = parse_graph(one(io=io, retry_policy=retry)).nodes[0]
    assert (nulls.io, nulls.retry_policy) == (NodeIO(), RetryPolicy())


def test_documented_runtime_field_is_accepted_and_ignored() -> None:
    for key, value in RUNTIME.items():
        assert parse_graph(one(**{key: value})) == parse_graph(one())


def test_custom_keys_of_a_node_are_accepted() -> None:
    value: Any
    for key in ["x-owner", "x-", "name", "meta"]:
        for value in [None, 7, "text", {"a": []}]:
            assert parse_graph(one(**{key: value})) == parse_graph(one())


def test_custom_keys_of_io_and_retry_policy_are_accepted() -> None:
    free = parse_graph(one(io={"x-a": 1}, retry_policy={"x-b": 2})).nodes[0]
    assert (free.io, free.retry_policy) == (NodeIO(), RetryPolicy())


def test_custom_keys_of_the_graph_are_accepted() -> None:
    assert parse_graph({**one(), "schema_version": "1.0", "x-a": 1, "name": "nightly"}).name == "nightly"


@pytest.mark.parametrize("routing", [{}, {"on_success": [], "on_failure": []}])
def test_empty_routing_is_accepted(routing: dict[str, Any]) -> None:
    assert parse_graph(one(routing=routing)) == parse_graph(one())


@pytest.mark.parametrize("word", ["any", "ANY", "Any"])
def test_fan_in_is_case_insensitive(word: str) -> None:
    assert parse_graph(two(fan_in=word)).nodes[1].fan_in == FanIn(mode="any")


@pytest.mark.parametrize("n", [1, 2])
def test_fan_in_counts_from_one_to_the_number_of_parents(n: int) -> None:
    graph = {"nodes": [node("a"), node("b"), node("c", depends_on=["a", "b"], fan_in=f"Count:{n}")]}
    assert parse_graph(graph).nodes[2].fan_in == FanIn(mode="count", count=n)


@pytest.mark.parametrize("word", ["ready", "READY", None])
def test_start_when_ready_is_case_insensitive(word: str | None) -> None:
    assert parse_graph(one(io={"start_when": word})).nodes[0].io == NodeIO()


def test_fractional_seconds_are_kept() -> None:
    retry: dict[str, Any] = {
        "backoff_sec": 0.05,
        "max_backoff_sec": 0.5,
        "backoff_coefficient": 1.5,
        "jitter": 0.25,
    }
    kept = parse_graph(one(retry_policy=retry, timeout_sec=0.5)).nodes[0]
    assert kept.retry_policy == RetryPolicy(**retry)
    assert kept.timeout_sec == 0.5


@pytest.mark.parametrize(
    "field, value",
    [
        ("max", 0),
        ("backoff_sec", 0),
        ("backoff_coefficient", 1),
        ("max_backoff_sec", 0),
        ("jitter", 0),
        ("jitter", 1),
    ],
)
def test_largest_and_smallest_retry_settings_are_accepted(field: str, value: int) -> None:
    assert getattr(parse_graph(one(retry_policy={field: value})).nodes[0].retry_policy, field) == value


def test_io_is_unchanged() -> None:
    io: dict[str, Any] = {"input_ref": {"a": 1}, "input_inline": {"b": 2}, "batching": {"size": 3}, "fn": "f"}
    assert parse_graph(one(io={**io, "fn_args": {"c": 4}})).nodes[0].io == NodeIO(**io, fn_args={"c": 4})


def test_repeated_parent_counts_once() -> None:
    assert parents(two(depends_on=["extract", "extract"]))["load"] == ["extract"]


@pytest.mark.parametrize(
    "given", [{}, {"depends_on": None}, {"depends_on": []}], ids=["absent", "null", "empty"]
)
def test_edges_define_parents_if_depends_on_is_missing(given: dict[str, Any]) -> None:
    graph = {"nodes": [node(), node("load", **given)], "edges": [["extract", "load"], ["extract", "load"]]}
    assert parents(graph) == {"extract": [], "load": ["extract"]}
    assert parse_graph(graph).warnings == ()


@pytest.mark.parametrize("empty", [{}, {"edges": None}, {"edges": []}, {"edges_ex": []}, {"edges_ex": None}])
def test_depends_on_alone_defines_parents_if_edges_are_missing(empty: dict[str, Any]) -> None:
    graph = {**two(), **empty}
    assert parents(graph)["load"] == ["extract"]
    assert parse_graph(graph).warnings == ()


@pytest.mark.parametrize("mode", [{}, {"mode": "sync"}])
def test_extended_edges_without_streaming_define_parents(mode: dict[str, str]) -> None:
    graph = {"nodes": [node(), node("load")], "edges_ex": [{"from": "extract", "to": "load", **mode}]}
    assert parents(graph)["load"] == ["extract"]


def test_both_kinds_of_edges_are_combined() -> None:
    nodes = [node("a"), node("b"), node("c")]
    graph = {"nodes": nodes, "edges": [["a", "c"]], "edges_ex": [{"from": "b", "to": "c"}]}
    assert parents(graph)["c"] == ["a", "b"]


def test_depends_on_overrides_different_edges_with_a_warning() -> None:
    nodes = [node("a"), node("b"), node("c", depends_on=["a"])]
    graph = {"nodes": nodes, "edges": [["b", "c"]]}
    assert parents(graph)["c"] == ["a"]
    (warning,) = parse_graph(graph).warnings
    for part in ("'c'", "depends_on ['a']", "edges ['b']", "depends_on takes precedence"):
        assert part in warning


def test_equal_edges_in_another_order_cause_no_warning() -> None:
    nodes = [node("a"), node("b"), node("c", depends_on=["a", "b"])]
    assert parse_graph({"nodes": nodes, "edges": [["b", "c"], ["a", "c"]]}).warnings == ()


def test_nodes_without_edges_cause_no_warning() -> None:
    nodes = [node("a"), node("b", depends_on=["a"]), node("c")]
    assert parse_graph({"nodes": nodes, "edges": [["b", "c"]]}).warnings == ()


def test_cycle_in_overridden_edges_is_ignored() -> None:
    nodes = [node("a"), node("b", depends_on=["a"]), node("c", depends_on=["b"])]
    assert parents({"nodes": nodes, "edges": [["c", "b"]]})["b"] == ["a"]


@pytest.mark.parametrize("args", [{}, {"poll_ms": 5}])
def test_pulling_node_without_sources_pulls_from_its_parents(args: dict[str, Any]) -> None:
    assert sources(pulling(PULL, **args)) == ["extract"]


@pytest.mark.parametrize("parents", [{}, {"depends_on": []}])
def test_explicit_empty_source_list_is_kept(parents: dict[str, Any]) -> None:
    graph = two(io=pulling(from_nodes=[]), **parents)
    assert parse_graph(graph).nodes[1].pulls_from == ()
    assert sources(pulling(from_nodes=[]), **parents) == []


def test_whole_number_of_retries_is_an_integer() -> None:
    retries = parse_graph(one(retry_policy={"max": 3.0})).nodes[0].retry_policy.max
    assert (retries, type(retries)) == (3, int)


def test_pulling_node_without_args_pulls_from_its_parents() -> None:
    assert sources({"input_inline": {"input_adapter": PULL}}) == ["extract"]


def test_rechunking_node_without_sources_pulls_from_its_parents() -> None:
    assert sources(pulling(RECHUNK, size=3, meta_list_key="items")) == ["extract"]


def test_default_sources_of_a_pulling_node_include_parents_from_edges() -> None:
    graph = {"nodes": [node(), node("load", io=pulling())], "edges": [["extract", "load"]]}
    inline = parse_graph(graph).nodes[1].io.input_inline
    assert inline == {"input_adapter": PULL, "input_args": {"from_nodes": ["extract"]}}


def test_explicit_sources_are_kept() -> None:
    nodes = [node("a"), node("b"), node("c", depends_on=["a", "b"], io=pulling(from_nodes=["b"]))]
    inline = parse_graph({"nodes": nodes}).nodes[2].io.input_inline
    assert inline == {"input_adapter": PULL, "input_args": {"from_nodes": ["b"]}}


def test_from_node_is_an_alias_for_one_source() -> None:
    assert sources(pulling(from_node="extract")) == ["extract"]


def test_normalization_does_not_change_its_input() -> None:
    graph = two(io=pulling(from_node="extract"), retry_policy={"permanent_on": ["a"]})
    parse_graph(graph)
    assert graph == two(io=pulling(from_node="extract"), retry_policy={"permanent_on": ["a"]})


@pytest.mark.parametrize(("nodes", "steps"), [(4, 1), (5, 3), (9, 4)])
def test_large_graph_is_normalized_in_steps(monkeypatch: pytest.MonkeyPatch, nodes: int, steps: int) -> None:
    monkeypatch.setattr(validation, "STEP_NODES", 4)
    graph = {"nodes": [{"node_id": f"n{index}", "type": "quick"} for index in range(nodes)]}
    *pauses, last = validation.normalizing(graph)
    assert (set(pauses), len(pauses) + 1) == ({None} if steps > 1 else set(), steps)
    assert last == normalized(graph)
    assert last is not None
    assert [node.node_id for node in last.nodes] == [node["node_id"] for node in graph["nodes"]]
