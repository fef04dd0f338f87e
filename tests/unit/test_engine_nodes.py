"""Nodes that the workflow runs itself: approvals and delays."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.graphs import node, refusal

from flowkit.config import CoordinatorConfig, WorkerConfig
from flowkit.errors import ConfigError
from flowkit.graph.field_checks import graph_problems
from flowkit.graph.validation import parse_graph
from flowkit.models import Approval, Delay, Node
from flowkit.schema import graph_schema
from flowkit.testing import run_graph
from flowkit.worker import Batch, BatchResult, RoleHandler

if TYPE_CHECKING:
    from flowkit.worker import RunContext

VALIDATOR: Any = importlib.import_module("jsonschema").Draft202012Validator(graph_schema())

NOON = 1_769_857_200.0
"""2026-01-31, 11:00 in UTC."""


def engine_node(kind: str, inline: object = None, **fields: Any) -> dict[str, Any]:
    """Return a graph with one engine node."""
    return {"nodes": [{"node_id": "n", "type": kind, "io": {"input_inline": inline}, **fields}]}


def parsed(kind: str, inline: object = None, **fields: Any) -> Node:
    """Return the normalized node; the JSON schema must accept it, too."""
    graph = engine_node(kind, inline, **fields)
    assert VALIDATOR.is_valid(graph)
    return parse_graph(graph).nodes[0]


@pytest.mark.parametrize(
    ("inline", "approval"),
    [
        (None, Approval()),
        ({}, Approval(text="", default="reject")),
        ({"text": "Publish?"}, Approval(text="Publish?")),
        ({"text": None, "default": "approve", "x-own": 1}, Approval(default="approve")),
        ({"text": "x" * 2_000, "default": "reject"}, Approval(text="x" * 2_000)),
    ],
)
def test_approval_has_a_text_and_a_default(inline: object, approval: Approval) -> None:
    found = parsed("approval", inline)
    assert (found.approval, found.delay, found.is_engine_node) == (approval, None, True)


@pytest.mark.parametrize(("own", "warns"), [(3_600, True), (86_400, True), (60, False), (None, False)])
def test_a_deadline_that_the_deadline_of_the_task_precedes_causes_a_warning(
    own: float | None, warns: bool
) -> None:
    graph = engine_node("approval", {"default": "approve"}, **({"deadline_sec": own} if own else {}))
    warnings = parse_graph({**graph, "deadline_sec": 3_600}).warnings
    assert [each.startswith("node 'n': deadline_sec (") for each in warnings] == [True] * warns
    assert all(each.endswith("and the default of the approval is never chosen") for each in warnings)
    assert parse_graph(graph).warnings == ()


@pytest.mark.parametrize(
    ("inline", "delay"),
    [
        ({"sec": 0.5}, Delay(sec=0.5)),
        ({"sec": 60, "until": None}, Delay(sec=60)),
        ({"until": "2026-01-31T11:00:00Z"}, Delay(until=NOON)),
        ({"until": "2026-01-31T12:00:00+01:00"}, Delay(until=NOON)),
    ],
)
def test_delay_has_seconds_or_a_moment(inline: object, delay: Delay) -> None:
    found = parsed("delay", inline)
    assert (found.delay, found.approval, found.is_engine_node) == (delay, None, True)


def test_other_nodes_have_neither() -> None:
    found = parse_graph({"nodes": [node("a"), {"node_id": "f", "type": "coordinator_fn"}]}).nodes
    assert [(each.approval, each.delay, each.is_engine_node) for each in found] == [(None, None, False)] * 2


def test_engine_nodes_take_the_keys_that_concern_no_attempt() -> None:
    found = parsed("approval", deadline_sec=60, allow_failure=True, when="true", prerequisites=["data:eu"])
    assert (found.deadline_sec, found.allow_failure, found.prerequisites) == (60, True, ("data:eu",))


A_MOMENT = "a moment in ISO 8601 with its time zone, such as '2026-01-31T06:00:00+01:00'"
ONE_OF_BOTH = "io.input_inline must have either 'sec', a number of seconds, or 'until', a moment"
REJECTED: list[tuple[str, dict[str, Any], str]] = [
    (
        "approval",
        {"inline": {"text": 7}},
        "io.input_inline.text 7 must be a text of at most 2,000 characters",
    ),
    ("approval", {"inline": {"text": "x" * 2_001}}, "must be a text of at most 2,000 characters"),
    (
        "approval",
        {"inline": {"default": "yes"}},
        "io.input_inline.default 'yes' must be 'approve' or 'reject'",
    ),
    ("approval", {"inline": {"txt": "a"}}, "io.input_inline.txt is unknown; did you mean 'text'?"),
    (
        "approval",
        {"inline": {"recipients": []}},
        "recipients is unknown; a node of the type 'approval' takes 'text' and 'default'",
    ),
    (
        "approval",
        {"inline": {"text": {"$cel": "params.text"}}},
        "io.input_inline.text must not be an expression in a node of the type 'approval'; write the value",
    ),
    (
        "approval",
        {"retry_policy": {"max": 0}},
        "retry_policy has no meaning in a node of the type 'approval'",
    ),
    ("approval", {"timeout_sec": 5}, "timeout_sec has no meaning"),
    ("approval", {"timeout_sec": 5}, "set 'deadline_sec' instead"),
    ("approval", {"io": {"input_ref": {}}}, "io.input_ref has no meaning in a node of the type 'approval'"),
    ("approval", {"io": {"fn": "noop"}}, "io.fn has no meaning"),
    ("approval", {"io": {"start_when": "first_batch"}}, "io.start_when has no meaning"),
    ("delay", {"io": {"max_ahead": 1}}, "io.max_ahead has no meaning"),
    (
        "delay",
        {"inline": {"input_adapter": "pull.from_artifacts"}},
        "io.input_inline.input_adapter is unknown",
    ),
    ("delay", {}, ONE_OF_BOTH),
    ("delay", {"inline": {"sec": 1, "until": "2026-01-31T06:00:00Z"}}, ONE_OF_BOTH),
    ("delay", {"inline": {"sec": 0}}, "io.input_inline.sec 0 must be a number of seconds above 0"),
    ("delay", {"inline": {"sec": True}}, "io.input_inline.sec True must be a number of seconds"),
    ("delay", {"inline": {"sec": 4e7}}, "31,536,000 at most"),
    ("delay", {"inline": {"until": 7}}, f"io.input_inline.until 7 must be {A_MOMENT}"),
    ("delay", {"inline": {"sec": {"$cel": "1"}}}, "io.input_inline.sec must not be an expression"),
]


@pytest.mark.parametrize(("kind", "fields", "problem"), REJECTED)
def test_what_an_engine_node_cannot_have_is_rejected(kind: str, fields: dict[str, Any], problem: str) -> None:
    graph = engine_node(kind, **fields)
    text = str(refusal(graph))
    assert problem in text
    assert "node 'n'" in text
    assert not VALIDATOR.is_valid(graph)


@pytest.mark.parametrize(
    "until",
    ["2026-01-31", "2026-01-31T06:00:00", "tomorrow", "", "0001-01-01T00:00:00+14:00", "2026-13-01T00:00Z"],
)
def test_moment_without_a_time_zone_or_outside_the_calendar_is_rejected(until: str) -> None:
    assert f"must be {A_MOMENT}" in str(refusal(engine_node("delay", {"until": until})))


@pytest.mark.parametrize("fields", [{"io": 7}, {"io": {"input_inline": []}}, {"type": []}, {"type": {}}])
def test_values_of_the_wrong_type_are_problems_and_no_exceptions(fields: dict[str, Any]) -> None:
    assert list(graph_problems(engine_node("approval", **fields)))


@pytest.mark.parametrize("kind", ["approval", "delay"])
def test_child_cannot_start_on_a_batch_of_an_engine_node_but_can_pull_from_it(kind: str) -> None:
    (above,) = engine_node(kind, {"sec": 1} if kind == "delay" else {})["nodes"]
    io = {"start_when": "first_batch", "input_inline": {"input_adapter": "pull.from_artifacts"}}
    graph = parse_graph({"nodes": [above, node("child", depends_on=["n"], io=io)]})
    assert (graph.nodes[1].streams_from, graph.nodes[1].pulls_from) == ((), ("n",))
    assert any(f"because a node of the type '{kind}' stores no batches" in each for each in graph.warnings)


@pytest.mark.parametrize("role", ["approval", "delay", "prerequisite", "coordinator_fn"])
def test_reserved_names_are_rejected_as_roles_of_workers_and_engines(role: str) -> None:
    reserved = "it must be another name, because the engine reserves this one for its own nodes"
    with pytest.raises(ConfigError, match=reserved):
        CoordinatorConfig(worker_types=[role])
    with pytest.raises(ConfigError, match=reserved):
        CoordinatorConfig(max_type_concurrency={role: 1})
    with pytest.raises(ConfigError, match=reserved):
        WorkerConfig(roles=[role])


class Publish(RoleHandler):
    """Publishes without input from other nodes."""

    role = "publish"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Succeed."""
        return BatchResult(success=True)


async def test_run_graph_approves_and_waits_for_nothing() -> None:
    graph = {
        "on_node_failure": "hold",
        "nodes": [
            {"node_id": "night", "type": "delay", "io": {"input_inline": {"sec": 3_600}}},
            {"node_id": "review", "type": "approval", "depends_on": ["night"]},
            {"node_id": "publish", "type": "publish", "depends_on": ["review"], "prerequisites": ["legal"]},
        ],
    }
    run = await run_graph(graph, Publish())
    assert (run.status, {each.status for each in run.nodes.values()}) == ("finished", {"finished"})
