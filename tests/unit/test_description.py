"""The description of a graph: when each node starts, and how it differs from the defaults."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.adapter import graph_of
from tests.fuzz.campaign import plan_of
from tests.fuzz.plans import Features
from tests.unit.graphs import RECHUNK, node, pulling

from flowkit.graph.description import NodeDescription, describe, describe_graph, group_rows
from flowkit.graph.validation import parse_graph
from flowkit.models import NodeState
from flowkit.workflows.scheduling.scheduler import Scheduler


def described(*nodes: dict[str, Any], **fields: Any) -> list[NodeDescription]:
    """Return the descriptions of these nodes."""
    return describe(parse_graph({"nodes": list(nodes), **fields}))


def last(*nodes: dict[str, Any]) -> NodeDescription:
    """Return the description of the last of these nodes."""
    (found,) = (each for each in described(*nodes) if each.node_id == nodes[-1]["node_id"])
    return found


def parents(count: int) -> list[dict[str, Any]]:
    """Return the nodes `p0`, `p1`, …"""
    return [node(f"p{i}") for i in range(count)]


GATES: list[tuple[int, str, str]] = [
    (0, "all", "at once"),
    (1, "all", "after p0"),
    (1, "any", "after p0"),
    (2, "all", "after p0 and p1"),
    (4, "all", "after p0, p1, p2 and p3"),
    (9, "all", "after p0, p1, p2 and 6 more"),
    (3, "all_done", "after the end of p0, p1 and p2"),
    (2, "any", "after any of p0, p1"),
    (3, "count:2", "after 2 of p0, p1, p2"),
    (9, "count:2", "after 2 of p0, p1, p2 and 6 more"),
]


@pytest.mark.parametrize(("count", "fan_in", "starts"), GATES)
def test_gate_names_the_parents_and_how_many_must_finish(count: int, fan_in: str, starts: str) -> None:
    above = parents(count)
    child = last(*above, node("child", depends_on=[each["node_id"] for each in above], fan_in=fan_in))
    assert child.starts == starts
    expected = {"depends_on": [f"p{i}" for i in range(count)], "fan_in": fan_in} if count else {}
    assert child.as_json == {"node_id": "child", "role": "crawler", "starts": starts, **expected}


ROUTES: list[tuple[list[dict[str, Any]], str]] = [
    ([{"on_success": ["t"]}], "if r0 succeeds"),
    ([{"on_failure": ["t"]}], "if r0 fails"),
    ([{"on_success": ["t"], "on_failure": ["t"]}], "if r0 succeeds or fails"),
    ([{"on_failure": ["t"]}, {"on_failure": ["t"]}], "if r0 or r1 fails"),
    ([{"on_failure": ["t"]}, {"on_success": ["t"]}], "if r1 succeeds or r0 fails"),
]


@pytest.mark.parametrize(("routing", "starts"), ROUTES)
def test_target_names_its_routers(routing: list[dict[str, Any]], starts: str) -> None:
    routers = [node(f"r{i}", routing=each) for i, each in enumerate(routing)]
    target = last(*routers, node("t"))
    assert target.starts == starts
    assert target.as_json["routed_by"] == {f"r{i}": list(each) for i, each in enumerate(routing)}


def test_target_with_parents_names_both() -> None:
    router = node("load", routing={"on_failure": ["restore"]})
    target = last(router, node("backup"), node("restore", depends_on=["load", "backup"]))
    assert target.starts == "if load fails; after backup"


def test_node_that_only_an_ignored_list_names_never_starts() -> None:
    nodes = described(node("a", routing={"on_success": ["b"]}), node("b"), node("c", depends_on=["a"]))
    assert [each.starts for each in nodes] == ["at once", "never: only ignored routes lead to it", "after a"]


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"retry_policy": {"max": 2, "backoff_sec": 300}}, ""),
    ({"retry_policy": {"max": 0}}, "no retries"),
    ({"retry_policy": {"max": 1}}, "1 retry after 5 min"),
    ({"retry_policy": {"max": 5000, "backoff_sec": 0.5}}, "5,000 retries after 0.5 s"),
    (
        {"retry_policy": {"backoff_coefficient": 1.5, "max_backoff_sec": 7200}},
        "2 retries after 5 min ×1.5 up to 2 h",
    ),
    (
        {"retry_policy": {"permanent_on": ["a", "b", "c"]}},
        "2 retries after 5 min, not after a, b or c",
    ),
    ({"retry_policy": {"permanent_on": []}}, "2 retries after 5 min"),
    ({"timeout_sec": 90}, "timeout 90 s"),
    ({"timeout_sec": 90, "deadline_sec": 3600}, "timeout 90 s; deadline 1 h"),
    ({"allow_failure": True}, "may fail"),
    ({"routing": {"on_success": ["up"]}}, ""),
    ({"routing": {"on_failure": ["up"]}}, "failure starts up"),
    ({"io": pulling(from_nodes=["up"])}, "pulls from up"),
    ({"io": pulling(RECHUNK, from_nodes=[], size=2)}, "pulls from no node"),
    ({"timeout_sec": 7200, "allow_failure": True}, "timeout 2 h; may fail"),
]


@pytest.mark.parametrize(("fields", "text"), OPTIONS)
def test_only_what_differs_from_the_defaults_is_described(fields: dict[str, Any], text: str) -> None:
    found = last(node("up"), node("own", **fields))
    assert found.differs == text
    given = {key: value for key, value in fields.items() if key not in ("io", "retry_policy", "routing")}
    assert given.items() <= found.as_json.items()


def test_child_that_pulls_from_its_parents_needs_no_words() -> None:
    child = last(node("up"), node("own", depends_on=["up"], io=pulling()))
    assert child.differs == ""
    assert child.as_json["pulls_from"] == ["up"]


def test_function_is_described_by_its_name() -> None:
    found = last(node(type="coordinator_fn", io={"fn": "vars.set"}))
    assert found.as_json == {"node_id": "extract", "fn": "vars.set", "starts": "at once"}


@pytest.mark.parametrize(("policy", "fields"), [("any", {}), ("pin", {"version_policy": "pin"})])
def test_graph_that_pins_versions_says_so(policy: str, fields: dict[str, Any]) -> None:
    details = describe_graph(parse_graph({"nodes": [node()], "version_policy": policy}))
    assert {key: value for each in details for key, value in each.fields.items()} == fields
    expected = ["the first attempt of each role fixes the version of its handler"] if fields else []
    assert [each.text for each in details] == expected


@pytest.mark.parametrize(("mode", "fields"), [("fail", {}), ("continue", {"on_node_failure": "continue"})])
def test_graph_that_continues_after_a_failure_says_so(mode: str, fields: dict[str, Any]) -> None:
    graph = parse_graph({"nodes": [node()], "on_node_failure": mode})
    assert {key: value for each in describe_graph(graph) for key, value in each.fields.items()} == fields


def test_order_is_that_of_the_graph_where_dependencies_allow_it() -> None:
    found = described(node("join", depends_on=["b", "a"]), node("b"), node("z"), node("a", depends_on=["b"]))
    assert [each.node_id for each in found] == ["b", "z", "a", "join"]


def test_description_of_any_graph_matches_its_first_schedule() -> None:
    for number in range(40):
        graph = parse_graph(graph_of(plan_of(1, number, Features())))
        found = describe(graph)
        place = {each.node_id: position for position, each in enumerate(found)}
        assert len(place) == len(found) == len(graph.nodes)
        scheduler = Scheduler(graph, [NodeState() for _ in graph.nodes])
        ready = {graph.nodes[index].node_id for index in scheduler.pop_ready()}
        assert {each.node_id for each in found if each.starts == "at once"} == ready
        for each in found:
            described_fields = json.loads(json.dumps(each.as_json))
            for earlier in (*described_fields.get("depends_on", ()), *described_fields.get("routed_by", ())):
                assert place[earlier] < place[each.node_id]


@given(most=st.integers(1, 9), series=st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_rows_of_a_large_graph_join_equal_neighbors(most: int, series: list[int]) -> None:
    nodes = [node(f"{i}.{j}", type=f"t{i}") for i, size in enumerate(series) for j in range(size)]
    found = group_rows(described(*nodes), most)
    assert sum(1 + row.others for row in found) == len(nodes)
    assert len(found) == (len(nodes) if len(nodes) <= most else len(series))


def test_share_of_batches_is_shown_in_percent() -> None:
    policy = {"attempts": 2, "then": "quarantine", "max": "12.5%"}
    [described] = describe(parse_graph({"nodes": [node("a", on_batch_failure=policy)]}))
    assert "sets up to 12.5 % of the batches aside that fail 2 times" in str(described)
