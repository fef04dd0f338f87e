"""Which failures are held for a decision, for how long, and what a node waits for before it starts."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.graphs import node, one, refusal

from flowkit.graph.description import describe, describe_graph
from flowkit.graph.validation import parse_graph
from flowkit.models import DEFAULT_HOLD_SEC, OnNodeFailure

WEEK = 604_800

HELD: list[tuple[dict[str, Any], dict[str, Any], float | None]] = [
    ({}, {}, None),
    ({"hold_sec": 60}, {}, None),
    ({"on_node_failure": "continue"}, {"hold_on_failure": False}, None),
    ({"on_node_failure": "hold"}, {}, WEEK),
    ({"on_node_failure": "hold"}, {"hold_on_failure": None}, WEEK),
    ({"on_node_failure": "hold"}, {"hold_on_failure": False}, None),
    ({"on_node_failure": "hold"}, {"hold_sec": 5}, 5),
    ({"on_node_failure": "hold", "hold_sec": 60}, {}, 60),
    ({"on_node_failure": "hold", "hold_sec": 60}, {"hold_sec": 5}, 5),
    ({}, {"hold_on_failure": True}, WEEK),
    ({"hold_sec": 60}, {"hold_on_failure": True}, 60),
    ({"hold_sec": 60}, {"hold_on_failure": True, "hold_sec": 5}, 5),
    ({"on_node_failure": "hold"}, {"allow_failure": True}, None),
    ({"on_node_failure": "hold"}, {"routing": {"on_failure": ["repair"]}}, None),
    ({"on_node_failure": "hold"}, {"routing": {"on_success": ["repair"]}}, WEEK),
    ({"on_node_failure": "hold"}, {"type": "approval"}, None),
]


@pytest.mark.parametrize(("graph", "fields", "hold_sec"), HELD)
def test_failure_is_held_for_as_long_as_the_node_or_the_graph_says(
    graph: dict[str, Any], fields: dict[str, Any], hold_sec: float | None
) -> None:
    assert (
        parse_graph({**graph, "nodes": [node("a", **fields), node("repair")]}).nodes[0].hold_sec == hold_sec
    )


def test_hold_of_a_graph_lasts_a_week_by_default() -> None:
    assert (parse_graph(one()).hold_sec, parse_graph({**one(), "hold_sec": None}).hold_sec) == (WEEK, WEEK)
    assert parse_graph({**one(), "hold_sec": 60}).hold_sec == 60
    assert DEFAULT_HOLD_SEC == WEEK


@pytest.mark.parametrize("word", ["hold", "finish_running"])
def test_failure_mode_of_the_graph_is_parsed(word: str) -> None:
    assert parse_graph({**one(), "on_node_failure": word}).on_node_failure is OnNodeFailure(word)


WARNED = [
    (
        {"hold_on_failure": True, "allow_failure": True},
        "hold_on_failure",
        "'allow_failure' tolerates the failure",
    ),
    (
        {"hold_on_failure": True, "routing": {"on_failure": ["repair"]}},
        "hold_on_failure",
        "'routing.on_failure' handles the failure",
    ),
    ({"hold_on_failure": True, "type": "approval"}, "hold_on_failure", "the type 'approval' are never held"),
    ({"hold_sec": 5}, "hold_sec", "its failure is not held; set 'hold_on_failure' to true"),
    ({"hold_sec": 5, "allow_failure": True}, "hold_sec", "'allow_failure' tolerates the failure"),
]


@pytest.mark.parametrize(("fields", "key", "why"), WARNED)
def test_settings_of_a_hold_without_effect_cause_a_warning(
    fields: dict[str, Any], key: str, why: str
) -> None:
    (warning,) = parse_graph({"nodes": [node("a", **fields), node("repair")]}).warnings
    assert warning.startswith(f"node 'a': {key} has no effect, because ")
    assert why in warning


@pytest.mark.parametrize(
    "fields", [{"hold_on_failure": False, "allow_failure": True}, {"hold_on_failure": True}]
)
def test_settings_of_a_hold_with_an_effect_cause_no_warning(fields: dict[str, Any]) -> None:
    assert parse_graph(one(**fields)).warnings == ()


def test_invalid_hold_of_a_graph_is_rejected() -> None:
    assert "graph.hold_sec 0 must be a number of seconds above 0" in str(refusal({**one(), "hold_sec": 0}))


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, ()), ([], ()), (["data:eu", "x" * 200, "é ü"], ("data:eu", "x" * 200, "é ü"))],
)
def test_prerequisites_keep_their_order(given: object, expected: tuple[str, ...]) -> None:
    assert parse_graph(one(prerequisites=given)).nodes[0].prerequisites == expected


DESCRIBED: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    ({"hold_on_failure": True}, "at once", "a failure waits up to 7 d for a decision", {"hold_sec": WEEK}),
    ({"prerequisites": ["a"]}, "when a is satisfied", "", {"prerequisites": ["a"]}),
    ({"prerequisites": ["a", "b"]}, "when a and b are satisfied", "", {"prerequisites": ["a", "b"]}),
    (
        {"type": "approval", "io": {"input_inline": {"text": "Publish?"}}, "deadline_sec": 60},
        "at once",
        "asks: Publish?; its deadline rejects; deadline 60 s",
        {"approval": {"text": "Publish?", "default": "reject"}, "deadline_sec": 60},
    ),
    ({"type": "delay", "io": {"input_inline": {"sec": 90}}}, "at once", "waits 90 s", {"delay": {"sec": 90}}),
    (
        {"type": "delay", "io": {"input_inline": {"until": "2026-01-31T06:00:00+01:00"}}},
        "at once",
        "waits until 2026-01-31T05:00:00+00:00",
        {"delay": {"until": "2026-01-31T05:00:00+00:00"}},
    ),
]


@pytest.mark.parametrize(("fields", "starts", "differs", "as_json"), DESCRIBED)
def test_description_says_what_a_node_waits_for(
    fields: dict[str, Any], starts: str, differs: str, as_json: dict[str, Any]
) -> None:
    (found,) = describe(parse_graph(one(**fields)))
    assert (found.starts, found.differs) == (starts, differs)
    assert as_json.items() <= found.as_json.items()


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("hold", "after a failure, the node waits for a decision while other nodes run"),
        ("finish_running", "after a failure, no further node starts, and running nodes finish"),
    ],
)
def test_description_of_a_graph_says_what_a_failure_means(word: str, text: str) -> None:
    (found,) = describe_graph(parse_graph({**one(), "on_node_failure": word}))
    assert (found.text, found.fields) == (text, {"on_node_failure": word})
