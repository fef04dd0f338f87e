"""Any graph is either normalized or rejected, and nothing else happens."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.graphs import RECHUNK, node, one, pulling, refusal, two
from tests.unit.property_examples import examples

from flowkit.errors import GraphError
from flowkit.graph.validation import parse_graph

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowkit.models import Graph

HUGE = 10**400
FULL: dict[str, Any] = {
    "name": "nightly",
    "on_node_failure": "continue",
    "edges": [["a", "b"]],
    "edges_ex": [{"from": "a", "to": "c", "mode": "async", "on_batch": True, "when": "vars.x"}],
    "nodes": [
        node(
            "a", io={"input_inline": {"input_args": {"from_nodes": ["b"], "from_node": "c"}}, "max_ahead": 3}
        ),
        node("b", depends_on=["a"], fan_in="count:1", io=pulling(RECHUNK, size=2, from_nodes=["a"])),
        node(
            "c",
            io=pulling("noop", from_node="a"),
            allow_failure=True,
            timeout_sec=1.5,
            when="true",
            meta={"k": 1},
        ),
        node("e", routing={"on_success": ["d"], "on_failure": ["d"]}),
        {
            "node_id": "d",
            "type": "coordinator_fn",
            "io": {
                "fn": "noop",
                "fn_args": {"k": [1]},
                "start_when": "first_batch",
                "batching": {},
                "input_ref": {},
            },
            "routing": {"on_success": [], "on_failure": []},
            "retry_policy": {"max": 1, "backoff_sec": 0.5, "permanent_on": ["x"], "jitter": 1, "x-a": 2},
            "status": "queued",
        },
        node("f", hold_sec=5, hold_on_failure=True, prerequisites=["data:eu"]),
        {
            "node_id": "g",
            "type": "approval",
            "io": {"input_inline": {"text": "Publish?", "default": "approve"}},
        },
        {"node_id": "h", "type": "delay", "io": {"input_inline": {"sec": 1.5}, "fn_args": None}},
        {"node_id": "i", "type": "delay", "io": {"input_inline": {"until": "2026-01-31T06:00:00Z"}}},
    ],
    "hold_sec": 60,
}
WRONG: list[Any] = [None, True, 7, 1.5, HUGE, "text", [], [7], [[7]], [{}], {}, {"a": 7}, {"a": [7]}]
WORDS = [
    "a",
    "nodes",
    "node_id",
    "type",
    "depends_on",
    "io",
    "input_inline",
    "input_args",
    "from_nodes",
    "count:2",
]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 2**63, HUGE, -HUGE, 1e308, 5e-324, "", "*", "count:0", "first_batch"])
    | st.floats()
    | st.sampled_from(WORDS)
    | st.text(max_size=5)
)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
Path = tuple[str | int, ...]


def paths(value: object, here: Path = ()) -> Iterator[Path]:
    """Return every path inside `value`."""
    items: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, inner in items:
        yield (*here, key)
        yield from paths(inner, (*here, key))


def planted(path: Path, value: object) -> dict[str, Any]:
    """Return the full graph with `value` at `path`."""
    graph = copy.deepcopy(FULL)
    holder: Any = graph
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return graph


def outcome(graph: object) -> Graph | str:
    """Return the graph, or the text of its error; any other exception fails the test."""
    try:
        return parse_graph(graph)
    except GraphError as error:
        assert error.problems
        assert all(error.problems)
        return str(error)


def test_graph_with_every_field_is_accepted() -> None:
    graph = copy.deepcopy(FULL)
    assert [n.node_id for n in parse_graph(graph).nodes] == [*"abcedfghi"]
    assert graph == FULL


@settings(max_examples=examples(80))
@given(graph=JSON)
def test_any_json_value_is_normalized_or_rejected(graph: object) -> None:
    assert outcome(graph)


@settings(max_examples=examples(80))
@given(nodes=JSON, edges=JSON, edges_ex=JSON)
def test_any_nodes_and_edges_are_normalized_or_rejected(
    nodes: object, edges: object, edges_ex: object
) -> None:
    assert outcome({"nodes": nodes, "edges": edges, "edges_ex": edges_ex})


@settings(max_examples=examples(150))
@given(path=st.sampled_from(list(paths(FULL))), value=JSON)
def test_any_field_value_is_normalized_or_rejected(path: Path, value: object) -> None:
    assert outcome(planted(path, value))


def test_wrong_type_in_any_field_raises_only_validation_errors() -> None:
    for path in list(paths(FULL)):
        for value in WRONG:
            assert outcome(planted(path, value))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "field, reported",
    [("max", "whole number"), ("backoff_sec", "number of seconds"), ("jitter", "between 0 and 1")],
)
def test_retry_number_beyond_every_float_is_rejected(field: str, reported: str, sign: int) -> None:
    text = str(refusal(one(retry_policy={field: sign * HUGE})))
    for part in ("node 'extract'", f"retry_policy.{field}", reported):
        assert part in text


def test_timeout_beyond_every_float_is_rejected() -> None:
    text = str(refusal(one(timeout_sec=HUGE)))
    for part in ("node 'extract'", "timeout_sec", "number of seconds"):
        assert part in text


def test_input_args_without_a_pulling_adapter_are_not_validated() -> None:
    for args in [7, "text", [], {"from_nodes": 7}, {"from_nodes": [[7]]}, {"from_node": {}}]:
        for adapter in [{}, {"input_adapter": "noop"}]:
            inline = {**adapter, "input_args": args}
            assert parse_graph(two(io={"input_inline": inline})).nodes[1].io.input_inline == inline


@pytest.mark.parametrize("field", ["meta", "x-own", "io", "fan_in"])
def test_excessive_nesting_is_rejected(field: str) -> None:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    assert "JSON" in str(refusal(one(**{field: deep})))


@settings(max_examples=examples(60))
@given(params=JSON)
def test_any_params_are_measured_or_rejected(params: object) -> None:
    try:
        parse_graph(one(), params=params)
    except GraphError as error:
        assert "params" in str(error)
