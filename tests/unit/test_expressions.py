"""Values by expression without a server: where they may be, what they may return, and what errors show of them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.graphs import node

from flowkit.activities.conditions import Evaluation, Unknown
from flowkit.cli.json_files import read_pairs
from flowkit.errors import BadExpression, ConfigError, GraphError
from flowkit.graph.conditions import SecretRule
from flowkit.graph.expressions import find_expressions, with_values
from flowkit.graph.params import params_problems
from flowkit.graph.submission import validate_input
from flowkit.graph.validation import parse_graph
from flowkit.limits import EXPRESSION_VALUE_BYTES
from flowkit.masks import hide
from flowkit.models import Graph, NodeIO

DAY = {"$cel": "params.day"}
PULL: dict[str, Any] = {"input_adapter": "pull.from_artifacts"}


def submitted(io: dict[str, Any], params: dict[str, Any] | None = None, **graph: Any) -> Graph:
    """Return the graph of a task whose node `b` has this input, below a node `a` and beside a node `c`."""
    kind = "coordinator_fn" if "fn" in io else "crawler"
    nodes = [node("a"), node("c"), {**node("b", depends_on=["a"], io=io), "type": kind}]
    return validate_input("task", {"params": params or {}, "graph": {"nodes": nodes, **graph}})


def problem(io: dict[str, Any], **more: Any) -> str:
    """Return the text with which such a task is rejected."""
    with pytest.raises(GraphError) as caught:
        submitted(io, **more)
    return str(caught.value)


def test_only_an_object_with_the_single_key_and_a_text_is_an_expression() -> None:
    plain = [{"$cel": 1}, {"$cel": "a", "b": 1}, {"cel": "a"}, "$cel", ["$cel", "a"]]
    io: dict[str, Any] = {
        "input_inline": {"list": [*plain, {"deep": DAY}]},
        "fn_args": {"x": DAY},
        "batching": DAY,
    }
    assert find_expressions(io) == (
        ("io.input_inline.list[5].deep", "params.day"),
        ("io.fn_args.x", "params.day"),
    )
    given = NodeIO(input_inline=io["input_inline"], fn_args=io["fn_args"], batching=DAY)
    filled = with_values(given, {"params.day": [1]})
    assert filled.input_inline == {"list": [*plain, {"deep": [1]}]}
    assert (filled.fn_args, filled.batching) == ({"x": [1]}, DAY)
    with pytest.raises(BadExpression, match=r"'params\.day' is not stored"):
        with_values(given, {})


@pytest.mark.parametrize(
    "io",
    [
        {"input_ref": {"day": DAY}},
        {"input_inline": {**PULL, "input_args": {"poll_ms": {"$cel": "params.ms"}}}},
        {"fn": "vars.set", "fn_args": {"kv": {"a": {"$cel": "nodes.a.status"}}}},
    ],
)
def test_any_other_value_may_be_an_expression(io: dict[str, Any]) -> None:
    assert submitted(io).nodes[2].expressions == find_expressions(io)


@pytest.mark.parametrize(
    ("io", "place"),
    [
        ({"input_inline": {"input_adapter": DAY}}, "io.input_inline.input_adapter must not be an expression"),
        (
            {"input_inline": {**PULL, "input_args": DAY}},
            "io.input_inline.input_args must not be an expression",
        ),
        ({"input_inline": {**PULL, "input_args": {"from_nodes": DAY}}}, "input_args.from_nodes must not be"),
        ({"input_inline": {**PULL, "input_args": {"from_node": DAY}}}, "input_args.from_node must not be"),
        ({"fn": "merge.generic", "fn_args": {"from_nodes": [DAY]}}, "io.fn_args.from_nodes must not be"),
        ({"fn": "merge.generic", "fn_args": {"target": {"node_id": DAY}}}, "io.fn_args.target must not be"),
        ({"fn": "metrics.aggregate", "fn_args": {"node_id": DAY}}, "io.fn_args.node_id must not be"),
        ({"input_ref": DAY}, "io.input_ref must be an object, not an expression"),
        ({"input_ref": {"day": {"$cel": ""}}}, "io.input_ref.day: the expression is empty"),
        (
            {"input_ref": {"day": {"$cel": "1" * 2_001}}},
            "io.input_ref.day: the expression has 2,001 characters",
        ),
    ],
)
def test_expression_in_another_place_is_rejected(io: dict[str, Any], place: str) -> None:
    assert place in problem(io)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("vars.day +", "the expression is incomplete"),
        ("parms.day", "did you mean 'params'?\n  | parms.day\n  |      ^"),
        ("nodes.c.status", "'c' is not an ancestor of 'b', so it may end later\n  | nodes.c.status\n  | ^"),
        (
            "duration('1h')",
            "of type duration, which JSON does not have; write string(…)\n  | duration('1h')\n  | ^",
        ),
    ],
)
def test_expression_is_checked_on_submission(text: str, shown: str) -> None:
    found = problem({"input_inline": {"list": [{"$cel": text}]}})
    assert found.startswith("node 'b': io.input_inline.list[0]: ")
    assert shown in found


def evaluated(text: str, **params: Any) -> Any:
    """Return the value of an expression, or the text of its error."""
    values = {"params": params, "vars": {}, "nodes": {}}
    (found,) = Evaluation(10, SecretRule(lambda *_: False)).run_values([text], values)
    return found.error if isinstance(found, Unknown) else found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("params.n + 1", 4),
        ("params.missing.orValue", "Key not found"),
        ("{'a': [params.n, null, 1.5, true]}", {"a": [3, None, 1.5, True]}),
        ("params.list.map(each, each * 2)", [2, 4]),
        ("{1: 'a'}", "a key that is no text"),
        ("0.0 / 0.0", "a number that JSON does not have"),
        ("[timestamp('2026-01-31T00:00:00Z')]", "a part of the result is of type timestamp"),
        ("params.long", f"the result has {EXPRESSION_VALUE_BYTES + 3:,} bytes of JSON, more than 64,000"),
        ("params.list.map(each, params.long)", "bytes of JSON, more than 64,000"),
    ],
)
def test_value_is_a_value_of_json(text: str, value: Any) -> None:
    found = evaluated(text, n=3, list=[1, 2], long="x" * (EXPRESSION_VALUE_BYTES + 1))
    assert value in found if isinstance(value, str) else found == value


def test_error_of_an_expression_hides_the_values_that_it_reads() -> None:
    found = evaluated("int(params.token) + params.n", token="tok-123", n=1)
    assert "tok-123" not in found
    assert found.endswith("in the expression int(params.token) + params.n")
    assert evaluated("params.day").endswith(", in the expression params.day; params.day is not set")


def test_values_are_hidden_in_texts() -> None:
    values = {"x": ["tok-1", {"k": 123456}], "y": "tok-1-long", "z": "is", "w": True}
    assert hide("tok-1-long is tok-1 or 123456: True", values) == "(hidden) is (hidden) or (hidden): True"


SCHEMA: dict[str, Any] = {
    "properties": {"day": {"type": "string", "format": "date"}, "n": {"$ref": "#/$defs/count"}},
    "required": ["day"],
    "$defs": {"count": {"type": "integer"}},
}


@pytest.mark.parametrize(
    ("schema", "params", "shown"),
    [
        (SCHEMA, {}, "params: 'day' is a required property"),
        (SCHEMA, {"day": "31.1."}, "params.day: '31.1.' is not a 'date'"),
        (SCHEMA, {"day": "2026-01-31", "n": "5"}, "params.n: '5' is not of type 'integer'"),
        ([], {}, "graph.params_schema must be a JSON schema, which is an object, not []"),
        ({"type": "text"}, {}, "graph.params_schema.type is not valid in a JSON schema: 'text'"),
        ({"$ref": "http://localhost/x"}, {}, "graph.params_schema refers to 'http://localhost/x'"),
        ({"$ref": "#"}, {}, "graph.params_schema cannot be applied: maximum recursion depth"),
    ],
)
def test_params_must_match_the_schema_of_the_graph(schema: Any, params: Any, shown: str) -> None:
    [problem] = params_problems({"params_schema": schema}, params)
    assert problem.startswith(shown)


def test_matching_params_are_accepted() -> None:
    assert params_problems({"params_schema": SCHEMA}, {"day": "2026-01-31", "n": 5}) == []


def test_graph_without_expressions_has_none() -> None:
    graph = parse_graph({"nodes": [node("a", io={"input_inline": {"day": "params.day"}})]})
    assert graph.nodes[0].expressions == ()


def test_single_params_are_json_or_text() -> None:
    given = ["day=2026-01-31", "n=5", "on=true", 'names=["a"]', "eq=a=b", "none=", "nan=NaN"]
    expected = {
        "day": "2026-01-31",
        "n": 5,
        "on": True,
        "names": ["a"],
        "eq": "a=b",
        "none": "",
        "nan": "NaN",
    }
    assert read_pairs(given, "--param", "day=1") == expected


@pytest.mark.parametrize(
    ("given", "shown"),
    [(["day"], "--param 'day' is not of the form key=value"), (["n=1", "n=2"], "--param n is given twice")],
)
def test_malformed_single_params_are_rejected(given: list[str], shown: str) -> None:
    with pytest.raises(ConfigError, match=shown):
        read_pairs(given, "--param", "day=1")
