"""The schema accepts what validation accepts, and rejects every invalid graph that a schema can detect."""

from __future__ import annotations

import copy
import importlib
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowkit.errors import GraphError
from flowkit.graph import encoding, field_checks, fields, input_adapters
from flowkit.graph.routes import ROUTING_KEYS
from flowkit.models import RUNTIME_KEYS
from flowkit.schema import graph_schema
from tests.unit.graphs import node, one, pulling, two
from tests.unit.test_validation import BAD_FIELDS, BAD_GRAPHS
from tests.unit.test_validation_fuzz import FULL, JSON, Path, paths, planted

SCHEMA = graph_schema()
VALIDATOR: Any = importlib.import_module("jsonschema").Draft202012Validator(SCHEMA)

RELATIONS = {
    *("count_zero", "count_too_many", "parent_unknown", "parent_typo", "own_parent", "pull_unknown"),
    *("alias_unknown", "twice", "edge_unknown", "edge_child", "cycle"),
    *("route_typo", "route_unknown", "route_self", "route_back"),
    "backoff_above_its_limit",
}
"""Errors in the relations between nodes, or between two numbers, which a schema cannot detect."""


def fits(graph: object) -> bool:
    """Return whether the schema accepts a graph."""
    return bool(VALIDATOR.is_valid(graph))


def well_formed(graph: object) -> bool:
    """Return whether validation accepts the format of a graph."""
    try:
        encoding.json_bytes(graph)
    except GraphError:
        return False
    if list(field_checks.graph_problems(graph)) or not isinstance(graph, dict):
        return False
    return not any(map(fields.when_problem, conditions_of_edges(graph)))


def conditions_of_edges(graph: dict[str, Any]) -> list[object]:
    """Return the conditions of edges. `create_task` and the engine check them later than the format."""
    edges = graph.get("edges_ex") or []
    return [edge["when"] for edge in edges if edge.get("when") is not None]


def test_schema_is_draft_2020_12_in_plain_json() -> None:
    VALIDATOR.check_schema(SCHEMA)
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
    assert SCHEMA["$schema"].endswith("2020-12/schema")


BAD = [(name, two(**fields)) for name, fields, _ in BAD_FIELDS] + [(name, g) for name, g, _ in BAD_GRAPHS]


def test_schema_accepts_an_invalid_graph_only_if_the_error_is_between_nodes() -> None:
    for name, graph in BAD:
        assert fits(graph) == (name in RELATIONS)


@pytest.mark.parametrize("node_id", ["", "*", "a[0]", "[12]", "a\nb", "a\x00", "tab\t", 7, None, "é" * 201])
def test_schema_rejects_an_invalid_node_id(node_id: object) -> None:
    assert not fits({"nodes": [{"node_id": node_id, "type": "t"}]})


@pytest.mark.parametrize("role", ["", "-a", ".a", "a b", "é", "a/b", "a\n", "a" * 101, 7, None])
def test_schema_rejects_an_invalid_role(role: object) -> None:
    assert not fits(one(type=role))


GOOD: dict[str, dict[str, Any]] = {
    "full": FULL,
    "runtime keys": one(**dict.fromkeys(RUNTIME_KEYS, 7)),
    "nulls": one(**dict.fromkeys(fields.NODE.fields.keys() - {"node_id", "type"})),
    "nulls in io": one(io=dict.fromkeys(fields.IO.fields.keys())),
    "nulls in retry_policy": one(retry_policy=dict.fromkeys(fields.RETRY_POLICY.fields.keys())),
    "own keys": one(**{"x-own": 1, "io": {"x-own": 1}, "retry_policy": {"x-own": 1}}),
    "own keys of the graph": {**one(), "nodess": 1, "edges": None, "edges_ex": None},
    "fan_in in capitals": two(fan_in="COUNT:1"),
    "start_when in capitals": one(io={"start_when": "READY"}),
    "start_when first_batch": two(io={"start_when": "First_Batch"}),
    "async edge": {**two(), "edges_ex": [{"from": "extract", "to": "load", "mode": "async", "on_batch": 7}]},
    "max_ahead": one(io={"max_ahead": 1}),
    "whole number as a fraction": one(retry_policy={"max": 2.0}),
    "noop with anything": one(io={"input_inline": {"input_adapter": input_adapters.NOOP, "input_args": 7}}),
    "no adapter": one(io={"input_inline": {"input_args": {"size": "any"}}}),
    "pull": two(io=pulling()),
    "ids": {"nodes": [node(name) for name in ("*a", "a[0]b", "a[x]", "[]", "a b", "漢字", "a.b/c:d")]},
    "on_batch_failure": one(on_batch_failure={"attempts": 1, "then": None, "max": "12.5%"}),
    "map": one(map={"over": "params.all", "batch_size": 10, "parallel": None}),
    "routing": one(routing={"on_success": ["a"], "on_failure": None, "x-own": 1}),
    "empty routing": one(routing={"on_success": [], "on_failure": None}),
    "empty routing of the first release": one(routing={"on_success": "", "other": False}),
}


@pytest.mark.parametrize("graph", GOOD.values(), ids=GOOD.keys())
def test_schema_accepts_what_validation_accepts(graph: dict[str, Any]) -> None:
    assert well_formed(graph)
    assert fits(graph)


@settings(max_examples=80)
@given(path=st.sampled_from(list(paths(FULL))), value=JSON)
@example(path=("nodes", 4, "retry_policy", "max"), value=10_001)
def test_schema_accepts_every_field_value_that_validation_accepts(path: Path, value: object) -> None:
    graph = planted(path, copy.deepcopy(value))
    assert fits(graph) or not well_formed(graph)


def test_schema_contains_every_key_that_validation_knows() -> None:
    own = SCHEMA["properties"]["nodes"]["items"]["properties"]
    assert own.keys() == fields.NODE.fields.keys() | RUNTIME_KEYS
    assert own["io"]["properties"].keys() == fields.IO.fields.keys()
    assert own["retry_policy"]["properties"].keys() == fields.RETRY_POLICY.fields.keys()
    assert own["routing"]["anyOf"][0]["properties"].keys() == ROUTING_KEYS
