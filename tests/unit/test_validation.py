"""Rejected graphs: every message names the node, the field, the value and the allowed values."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.unit.graphs import PULL, RECHUNK, node, one, pulling, refusal, two

from flowkit import limits
from flowkit.errors import FlowKitError, GraphError
from flowkit.graph.validation import parse_graph, too_many_nodes, unknown_function

ROLE_RULE = "letters, digits, '.', '_', '-'"
ID_RULE = "1 to 200 printable characters"

BAD_FIELDS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("fan_in_word", {"fan_in": "some"}, ["fan_in", "'some'", "'all', 'any', 'all_done' or 'count:n'"]),
    ("fan_in_type", {"fan_in": 2}, ["fan_in", "2", "'count:n'"]),
    ("fan_in_without_n", {"fan_in": "count:"}, ["fan_in", "'count:'", "'count:n'"]),
    ("fan_in_negative", {"fan_in": "count:-1"}, ["fan_in", "'count:-1'", "'count:n'"]),
    ("fan_in_spaces", {"fan_in": " all"}, ["fan_in", "' all'", "'all', 'any', 'all_done' or 'count:n'"]),
    ("count_zero", {"fan_in": "count:0"}, ["fan_in", "'count:0'", "between 1 and", "parents (1)"]),
    ("count_too_many", {"fan_in": "count:2"}, ["fan_in", "'count:2'", "between 1 and", "parents (1)"]),
    ("parents_type", {"depends_on": "extract"}, ["depends_on", "'extract'", "list of node ids"]),
    ("parents_items", {"depends_on": [7]}, ["depends_on", "[7]", "list of node ids"]),
    ("parent_unknown", {"depends_on": ["zzz"]}, ["depends_on", "'zzz'", "not a node"]),
    ("parent_typo", {"depends_on": ["extrct"]}, ["depends_on", "'extrct'", "did you mean 'extract'?"]),
    ("own_parent", {"depends_on": ["load"]}, ["cycle", "load -> load", "remove one"]),
    ("allow_failure", {"allow_failure": "yes"}, ["allow_failure", "'yes'", "true or false"]),
    ("timeout_zero", {"timeout_sec": 0}, ["timeout_sec", "0", "seconds above 0"]),
    ("timeout_text", {"timeout_sec": "10"}, ["timeout_sec", "'10'", "number of seconds"]),
    ("when_empty", {"when": ""}, ["when", "''", "CEL expression", "2,000"]),
    ("when_true", {"when": True}, ["when", "True", "CEL expression"]),
    ("when_long", {"when": "x" * 2_001}, ["when", "2,001 characters", "2,000"]),
    ("timeout_true", {"timeout_sec": True}, ["timeout_sec", "True", "number of seconds"]),
    ("deadline_zero", {"deadline_sec": 0}, ["deadline_sec", "0", "seconds above 0"]),
    ("deadline_long", {"deadline_sec": 4e7}, ["deadline_sec", "40000000.0", "31,536,000 at most"]),
    ("hold_zero", {"hold_sec": 0}, ["hold_sec", "0", "seconds above 0"]),
    ("hold_long", {"hold_sec": 4e7}, ["hold_sec", "40000000.0", "31,536,000 at most"]),
    ("hold_flag", {"hold_on_failure": 1}, ["hold_on_failure", "1", "true or false"]),
    ("prerequisites_type", {"prerequisites": "a"}, ["prerequisites", "'a'", "list of at most 50"]),
    ("prerequisites_items", {"prerequisites": [7]}, ["prerequisites", "[7]", "texts"]),
    ("prerequisites_twice", {"prerequisites": ["a", "a"]}, ["prerequisites", "['a', 'a']", "different"]),
    ("prerequisites_empty", {"prerequisites": [""]}, ["prerequisites", "['']", "1 to 200"]),
    ("prerequisites_long", {"prerequisites": ["x" * 201]}, ["prerequisites", "1 to 200"]),
    ("prerequisites_control", {"prerequisites": ["a\n"]}, ["prerequisites", "printable"]),
    (
        "backoff_above_its_limit",
        {"retry_policy": {"backoff_sec": 300, "max_backoff_sec": 0}},
        ["retry_policy.max_backoff_sec 0 is below backoff_sec 300"],
    ),
    ("prerequisites_blank", {"prerequisites": ["a "]}, ["prerequisites", "without blanks at their ends"]),
    ("prerequisites_many", {"prerequisites": [*map(str, range(51))]}, ["prerequisites", "at most 50"]),
    ("reserved_type", {"type": "prerequisite"}, ["type", "'prerequisite'", "reserved", "'prerequisites'"]),
    ("key_typo", {"dependson": []}, ["unknown key", "'dependson'", "did you mean 'depends_on'?"]),
    ("key_unknown", {"qqqq": 1}, ["unknown key", "'qqqq'", "'x-'"]),
    ("routing_type", {"routing": ["a"]}, ["routing", "['a']", "'on_success' and 'on_failure'"]),
    ("routing_key", {"routing": {"on_sucess": ["a"]}}, ["'on_sucess'", "did you mean 'on_success'?"]),
    ("routing_list", {"routing": {"on_failure": "a"}}, ["routing.on_failure", "'a'", "list of node ids"]),
    ("routing_items", {"routing": {"on_success": [7]}}, ["routing.on_success", "[7]", "list of node ids"]),
    ("route_typo", {"routing": {"on_failure": ["lod"]}}, ["on_failure", "'lod'", "did you mean 'load'?"]),
    ("route_unknown", {"routing": {"on_success": ["zzz"]}}, ["on_success", "'zzz'", "not a node"]),
    ("route_self", {"routing": {"on_failure": ["load"]}}, ["on_failure", "the node itself", "retry_policy"]),
    ("route_back", {"routing": {"on_failure": ["extract"]}}, ["cycle", "-> load ->", "or routes"]),
    ("io_type", {"io": "s3"}, ["io", "'s3'", "object"]),
    ("io_key", {"io": {"input_inlin": {}}}, ["io", "'input_inlin'", "did you mean 'input_inline'?"]),
    ("io_ref", {"io": {"input_ref": "s3"}}, ["io.input_ref", "'s3'", "object"]),
    ("io_inline", {"io": {"input_inline": []}}, ["io.input_inline", "[]", "object"]),
    ("io_batching", {"io": {"batching": 5}}, ["io.batching", "5", "object"]),
    ("io_fn", {"io": {"fn": 5}}, ["io.fn", "5", "coordinator function"]),
    ("io_fn_args", {"io": {"fn_args": [1]}}, ["io.fn_args", "[1]", "object"]),
    ("start_when", {"io": {"start_when": "later"}}, ["io.start_when", "'later'", "'ready'"]),
    ("start_type", {"io": {"start_when": 0}}, ["io.start_when", "0", "'ready'"]),
    ("start_typo", {"io": {"start_when": "first_bach"}}, ["io.start_when", "did you mean 'first_batch'?"]),
    ("max_ahead_zero", {"io": {"max_ahead": 0}}, ["io.max_ahead 0", "1 or more"]),
    ("max_ahead_bool", {"io": {"max_ahead": True}}, ["io.max_ahead True", "whole number"]),
    ("max_ahead_part", {"io": {"max_ahead": 1.5}}, ["io.max_ahead 1.5", "whole number"]),
    ("retry_type", {"retry_policy": 3}, ["retry_policy", "3", "object"]),
    ("retry_key", {"retry_policy": {"maxx": 3}}, ["retry_policy", "'maxx'", "did you mean 'max'?"]),
    ("retry_max", {"retry_policy": {"max": -1}}, ["retry_policy.max", "-1", "whole number of retries"]),
    ("retry_many", {"retry_policy": {"max": 10_001}}, ["retry_policy.max", "10001", "10,000 at most"]),
    ("retry_vast", {"retry_policy": {"max": 1e300}}, ["retry_policy.max", "1e+300", "10,000 at most"]),
    ("retry_half", {"retry_policy": {"max": 1.5}}, ["retry_policy.max", "1.5", "whole number"]),
    ("retry_bool", {"retry_policy": {"max": True}}, ["retry_policy.max", "True", "whole number"]),
    ("backoff", {"retry_policy": {"backoff_sec": -0.1}}, ["backoff_sec", "-0.1", "0 or more"]),
    ("backoff_cap", {"retry_policy": {"max_backoff_sec": "9"}}, ["max_backoff_sec", "'9'", "seconds"]),
    ("factor", {"retry_policy": {"backoff_coefficient": 0.9}}, ["backoff_coefficient", "0.9", "1 or more"]),
    ("jitter_high", {"retry_policy": {"jitter": 1.1}}, ["jitter", "1.1", "between 0 and 1"]),
    ("jitter_low", {"retry_policy": {"jitter": -1}}, ["jitter", "-1", "between 0 and 1"]),
    ("permanent_on", {"retry_policy": {"permanent_on": "bad"}}, ["permanent_on", "'bad'", "list of reason"]),
    ("permanent_items", {"retry_policy": {"permanent_on": [1]}}, ["permanent_on", "[1]", "list of reason"]),
    ("adapter_unknown", {"io": pulling("zzz")}, ["input_adapter", "'zzz'", "known: pull.from_artifacts"]),
    ("adapter_typo", {"io": pulling("pull.from_artefacts")}, ["input_adapter", f"did you mean '{PULL}'?"]),
    ("adapter_type", {"io": pulling(7)}, ["input_adapter", "7", "known: "]),
    ("pull_key", {"io": pulling(size=3)}, ["input_args.size", "unknown to", "from_nodes"]),
    ("pull_sources", {"io": pulling(from_nodes="extract")}, ["from_nodes", "'extract'", "list of node ids"]),
    ("pull_source", {"io": pulling(from_node=["a"])}, ["input_args.from_node", "['a']", "one node id"]),
    ("pull_both", {"io": pulling(from_node="a", from_nodes=["a"])}, ["from_node", "keep from_nodes"]),
    ("pull_unknown", {"io": pulling(from_nodes=["extrat"])}, ["from_nodes", "'extrat'", "mean 'extract'?"]),
    ("alias_unknown", {"io": pulling(from_node="qqqq")}, ["from_node", "'qqqq'", "not a node"]),
    ("poll", {"io": pulling(poll_ms=0)}, ["input_args.poll_ms", "0", "above 0"]),
    ("poll_half", {"io": pulling(poll_ms=0.5)}, ["input_args.poll_ms", "0.5", "whole number"]),
    ("eof", {"io": pulling(eof_on_task_done=1)}, ["eof_on_task_done", "1", "true or false"]),
    ("pull_backoff", {"io": pulling(backoff_max_ms="1")}, ["backoff_max_ms", "'1'", "above 0"]),
    ("size_missing", {"io": pulling(RECHUNK)}, ["input_args.size", "missing", "above 0"]),
    ("size_zero", {"io": pulling(RECHUNK, size=0)}, ["input_args.size", "0", "above 0"]),
    ("size_bool", {"io": pulling(RECHUNK, size=True)}, ["input_args.size", "True", "above 0"]),
    ("meta_key", {"io": pulling(RECHUNK, size=1, meta_list_key=5)}, ["meta_list_key", "5", "name of a list"]),
    (
        "args_type",
        {"io": {"input_inline": {"input_adapter": PULL, "input_args": 7}}},
        ["input_args", "7", "object"],
    ),
]


@pytest.mark.parametrize(
    "fields, reported", [row[1:] for row in BAD_FIELDS], ids=[row[0] for row in BAD_FIELDS]
)
def test_invalid_field_is_rejected_with_node_field_value_and_remedy(
    fields: dict[str, Any], reported: list[str]
) -> None:
    error = refusal(two(**fields))
    for part in ["load", *reported]:
        assert part in str(error)
    assert len(error.problems) == 1


BAD_GRAPHS: list[tuple[str, object, list[str]]] = [
    ("none", None, ["graph", "None", "object with 'nodes'"]),
    ("text", "nodes", ["graph", "'nodes'", "object with 'nodes'"]),
    ("list", [node()], ["graph", "object with 'nodes'"]),
    ("no_nodes", {}, ["graph.nodes", "None", "at least one node"]),
    ("empty", {"nodes": []}, ["graph.nodes", "[]", "at least one node"]),
    ("nodes_type", {"nodes": {"extract": node()}}, ["graph.nodes", "extract", "list"]),
    ("node_type", {"nodes": [node(), "b"]}, ["graph.nodes[1]", "'b'", "object"]),
    ("no_id", {"nodes": [{"type": "t"}]}, ["graph.nodes[0]", "node_id", "None", ID_RULE]),
    ("no_type", {"nodes": [{"node_id": "a"}]}, ["node 'a'", "type", "None", "'coordinator_fn' or a role"]),
    ("mode", {**one(), "on_node_failure": "stop"}, ["on_node_failure", "'stop'", "'fail', 'continue'"]),
    ("mode_type", {**one(), "on_node_failure": []}, ["on_node_failure", "[]", "'fail', 'continue'"]),
    ("twice", {"nodes": [node(), node()]}, ["'extract'", "2 times", "its own id"]),
    ("edges_text", {**one(), "edges": "ab"}, ["graph.edges", "'ab'", "[parent, child] pairs"]),
    ("edges_false", {**one(), "edges": False}, ["graph.edges", "False", "[parent, child] pairs"]),
    ("edges_ex_zero", {**one(), "edges_ex": 0}, ["graph.edges_ex", "0", "'from' and 'to'"]),
    ("edge_triple", {**one(), "edges": [["a", "b", "c"]]}, ["graph.edges", "'c'", "pairs"]),
    ("edge_number", {**one(), "edges": [["extract", 7]]}, ["graph.edges", "7", "pairs of node ids"]),
    ("edge_ex_to", {**one(), "edges_ex": [{"from": "a"}]}, ["graph.edges_ex", "{'from': 'a'}", "'to'"]),
    ("edge_unknown", {**one(), "edges": [["extrac", "extract"]]}, ["edge", "'extrac'", "mean 'extract'?"]),
    ("edge_child", {**one(), "edges": [["extract", "qqqq"]]}, ["edge", "no node 'qqqq'"]),
    ("mode", {**two(), "edges_ex": [{"from": "extract", "to": "load", "mode": "asinc"}]},
     ["graph.edges_ex", "'extract' -> 'load'", "'asinc'", "did you mean 'async'?"]),
    ("mode_other", {**two(), "edges_ex": [{"from": "extract", "to": "load", "mode": 7}]},
     ["graph.edges_ex", "mode 7", "'sync' or 'async'", "omit 'mode'"]),
    ("cycle", {**two(), "edges": [["load", "extract"]]}, ["cycle", "extract -> load", "remove one"]),
]  # fmt: skip


@pytest.mark.parametrize(
    "graph, reported", [row[1:] for row in BAD_GRAPHS], ids=[row[0] for row in BAD_GRAPHS]
)
def test_invalid_graph_is_rejected_with_path_value_and_remedy(graph: object, reported: list[str]) -> None:
    text = str(refusal(graph))
    for part in reported:
        assert part in text


def test_invalid_edge_among_many_valid_ones_is_shown() -> None:
    edges: list[list[Any]] = [["n0", f"n{i}"] for i in range(1, 30)]
    edges.append(["n7", 12345])
    assert "12345" in str(refusal({"nodes": [node(f"n{i}") for i in range(30)], "edges": edges}))


def test_key_that_is_not_a_string_is_rejected() -> None:
    text = str(refusal({"nodes": [{**node(), 7: 1}]}))
    for part in ("node 'extract'", "unknown key 7", "'x-'"):
        assert part in text


def test_invalid_node_id_is_rejected() -> None:
    for node_id in ["", "*", "a[0]", "[12]", "a\nb", "a\x00", "tab\t", " ", "a ", " a", 7, None, True, ["a"]]:
        text = str(refusal({"nodes": [{"node_id": node_id, "type": "t"}]}))
        assert repr(node_id) in text
        assert ID_RULE in text
        assert "not '*', not ending in '[number]'" in text


def test_node_ids_that_are_unicode_forms_of_one_text_are_rejected() -> None:
    text = str(refusal({"nodes": [node("caf\u00e9"), node("cafe\u0301")]}))
    assert "node ids 'caf\\xe9' and 'cafe\\u0301' look the same" in text


def test_printable_node_id_is_accepted() -> None:
    for node_id in ["a", "*a", "a[0]b", "a[x]", "[]", "extract data", "é", "漢字", "a.b/c:d"]:
        assert parse_graph({"nodes": [node(node_id)]}).nodes[0].node_id == node_id


def test_invalid_role_is_rejected() -> None:
    for role in ["", "-a", ".a", "_a", "a b", "é", "a/b", "a\n", "a" * 101, 7, None, ["a"]]:
        text = str(refusal(one(type=role)))
        assert "node 'extract'" in text
        assert "type" in text
        assert ROLE_RULE in text


@pytest.mark.parametrize("role", ["a", "0", "A.b_c-d", "a" * 100, "coordinator_fn"])
def test_valid_role_is_accepted(role: str) -> None:
    assert parse_graph(one(type=role)).nodes[0].type == role


def test_longest_node_id_is_accepted_and_one_more_character_rejected() -> None:
    parse_graph({"nodes": [node("é" * limits.ID_CHARS)]})
    assert ID_RULE in str(refusal({"nodes": [node("é" * (limits.ID_CHARS + 1))]}))


def test_largest_number_of_nodes_is_accepted_and_one_more_rejected() -> None:
    nodes = [node(f"n{i}") for i in range(limits.MAX_NODES + 1)]
    parse_graph({"nodes": nodes[:-1]}, max_bytes=None)
    assert "graph.nodes has 20,001 entries, more than 20,000: split the task" in str(
        refusal({"nodes": nodes})
    )


def test_max_nodes_setting_replaces_the_limit() -> None:
    parse_graph(two(), max_nodes=2)
    assert "2 entries, more than 1" in str(refusal(two(), max_nodes=1))


def test_node_limit_can_be_left_to_the_engine() -> None:
    parse_graph({"nodes": [node(f"n{i}") for i in range(limits.MAX_NODES + 1)]}, max_nodes=None)
    assert too_many_nodes(2, 2) is None
    assert too_many_nodes(3, 2) == "graph.nodes has 3 entries, more than 2: split the task"


def test_largest_node_io_is_accepted_and_one_more_byte_rejected() -> None:
    frame = len('{"input_ref":{"key":""}}')
    largest = "x" * (limits.NODE_IO_BYTES - frame)
    assert parse_graph(one(io={"input_ref": {"key": largest}})).nodes[0].io_bytes == limits.NODE_IO_BYTES
    text = str(refusal(one(io={"input_ref": {"key": largest + "x"}})))
    for part in ("node 'extract'", "io", "64,001 bytes", "64,000", "pass a reference"):
        assert part in text


def test_node_io_is_measured_in_bytes_of_utf8() -> None:
    assert "io is" in str(refusal(one(io={"input_ref": {"key": "é" * (limits.NODE_IO_BYTES // 2)}})))


def test_largest_graph_and_params_are_accepted_and_one_more_byte_rejected() -> None:
    frame = len('{"nodes":[{"node_id":"extract","type":"crawler"}]}{"p":""}')
    largest = "x" * (limits.TASK_INPUT_BYTES - frame)
    parse_graph(one(), params={"p": largest})
    text = str(refusal(one(), params={"p": largest + "x"}))
    for part in ("graph and params", "1,000,001 bytes", "1,000,000", "pass a reference"):
        assert part in text


def test_graph_that_create_task_stores_may_be_larger() -> None:
    parse_graph(one(meta="x" * limits.TASK_INPUT_BYTES), max_bytes=None)


def test_large_graph_is_rejected_even_without_params() -> None:
    assert "graph and params" in str(refusal(one(meta="x" * limits.TASK_INPUT_BYTES)))


@pytest.mark.parametrize(("count", "fits"), [(1_900, True), (2_100, False)])
def test_default_sources_of_a_node_are_limited(count: int, fits: bool) -> None:
    names = [f"{index:0200}" for index in range(count)]
    graph = {
        "nodes": [
            *({"node_id": name, "type": "r"} for name in names),
            {"node_id": "sink", "type": "r", "depends_on": names, "io": pulling()},
        ]
    }
    if fits:
        parse_graph(graph)
    else:
        text = str(refusal(graph))
        assert "node 'sink': the ids of its 2,100 sources are 426," in text
        assert "more than 400,000" in text


NO_JSON = {"nan": math.nan, "infinity": math.inf, "set": {1}, "bytes": b"x", "surrogate": "\ud800"}


@pytest.mark.parametrize("value", NO_JSON.values(), ids=NO_JSON.keys())
def test_value_that_is_not_json_is_rejected_with_node_and_field(value: object) -> None:
    text = str(refusal(two(meta={"here": value})))
    for part in ("JSON", "load", "meta"):
        assert part in text


@pytest.mark.parametrize("params", [math.nan, {"a": {1}}, {"\ud800": 1}])
def test_params_that_are_not_json_are_rejected(params: object) -> None:
    text = str(refusal(one(), params=params))
    assert "params" in text
    assert "JSON" in text


def test_problems_of_several_nodes_are_reported_together() -> None:
    nodes = [node("a", fan_in="some"), node("b", io=7, timeout_sec=0), node("c*", type="")]
    problems = refusal({"nodes": nodes, "edges": 7, "on_node_failure": "stop"}).problems
    reported = ("on_node_failure", "graph.edges", "'a': fan_in", "'b': timeout_sec", "'b': io", "'c*': type")
    assert len(problems) == len(reported)
    assert all(any(part in problem for problem in problems) for part in reported)


def test_problems_between_nodes_are_reported_together() -> None:
    nodes = [node("a", depends_on=["qq"]), node("b", fan_in="count:1"), node("c"), node("c")]
    reported = ("'qq'", "count:1", "'c' is used 2 times", "'rr'")
    problems = refusal({"nodes": nodes, "edges": [["rr", "c"]]}).problems
    assert all(any(part in problem for problem in problems) for part in reported)


def test_long_list_of_problems_is_truncated() -> None:
    error = refusal({"nodes": [node(f"n{i}", fan_in="some") for i in range(12)]})
    assert len(error.problems) == 11
    assert str(error).endswith("and more")


def test_validation_error_is_a_value_error_and_a_flowkit_error() -> None:
    assert issubclass(GraphError, ValueError)
    assert issubclass(GraphError, FlowKitError)


UNKNOWN_FUNCTIONS = [("vars_sett", "did you mean 'vars_set'?"), ("qqqq", "known here: noop, vars_set")]


@pytest.mark.parametrize("fn, hint", UNKNOWN_FUNCTIONS)
def test_unknown_coordinator_function_is_rejected_with_a_suggestion(fn: str, hint: str) -> None:
    problem = unknown_function(node(type="coordinator_fn", io={"fn": fn}), ["vars_set", "noop"]) or ""
    for part in ("node 'extract'", "io.fn", repr(fn), hint):
        assert part in problem


@pytest.mark.parametrize("io", [None, {}, {"fn": None}, {"fn": "noop"}])
def test_coordinator_function_defaults_to_noop(io: dict[str, Any] | None) -> None:
    assert unknown_function(node(type="coordinator_fn", io=io), ["noop"]) is None


def test_function_name_of_a_role_node_is_ignored() -> None:
    assert unknown_function(node(io={"fn": "qqqq"}), []) is None


def test_largest_number_of_retries_is_accepted() -> None:
    assert parse_graph(one(retry_policy={"max": 10_000})).nodes[0].retry_policy.max == limits.MAX_RETRIES


def test_a_long_cycle_is_shown_by_its_ends() -> None:
    nodes = [node(f"n{place}", depends_on=[f"n{(place - 1) % 10_000}"]) for place in range(10_000)]
    text = str(refusal({"nodes": nodes}))
    assert "… 9,993 more …" in text
    assert text.endswith("remove one of these dependencies")
    assert len(text) < 300
