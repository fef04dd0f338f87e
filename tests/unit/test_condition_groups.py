"""Groups of conditions without a server: what the workflow sends, how results apply together, and what errors hide."""

from __future__ import annotations

import re
from itertools import permutations
from typing import Any

import pytest

from flowkit.activities.conditions import Evaluation
from flowkit.coordinator.adapters import default_adapters
from flowkit.graph.cel import ROOTS
from flowkit.graph.conditions import SecretRule
from flowkit.graph.validation import parse_graph
from flowkit.limits import CONDITIONS_SEC, REPORT_BYTES
from flowkit.models import ConditionResults, NodeState, NodeStatus
from flowkit.models.columns import unpack
from flowkit.testing import memory_database, run_graph
from flowkit.workflows.evaluations import NoResult, Results, apply_results, requests, results_of
from flowkit.workflows.payloads import json_size, without_defaults
from flowkit.workflows.scheduling.conditions import DueCondition, facts_of
from flowkit.workflows.scheduling.scheduler import Scheduler

BAD = NoResult("bad_condition", "no value")


class Text(str):
    """An expression that counts how often something is searched in it."""

    searches = 0

    def __contains__(self, part: Any) -> bool:
        Text.searches += 1
        return super().__contains__(part)


def function(name: str, *parents: str, **fields: Any) -> dict[str, Any]:
    """Return a node that does nothing."""
    return {"node_id": name, "type": "coordinator_fn", "depends_on": list(parents), **fields}


def edge(parent: str, child: str, when: str) -> dict[str, str]:
    """Return an edge with a condition."""
    return {"from": parent, "to": child, "when": when}


def scheduler_of(*nodes: dict[str, Any], edges_ex: list[dict[str, str]] | None = None) -> Scheduler:
    """Return a scheduler whose first node has finished."""
    graph = parse_graph(
        {"nodes": list(nodes), "edges_ex": edges_ex, "on_node_failure": "continue"}, max_bytes=None
    )
    scheduler = Scheduler(graph, [NodeState() for _ in graph.nodes])
    scheduler.end(0, NodeStatus.FINISHED)
    return scheduler


def fan_out(*texts: str) -> Scheduler:
    """Return a scheduler with a due condition for each text."""
    return scheduler_of(
        function("first"), *(function(f"n{i}", "first", when=text) for i, text in enumerate(texts))
    )


@pytest.mark.parametrize("order", [["q", "n"], ["n", "q"]])
async def test_conditions_with_errors_fail_all_their_nodes_in_any_order_of_the_graph(
    order: list[str],
) -> None:
    nodes = {
        "q": function("q", "p", allow_failure=True),
        "n": function("n", "p", "q", allow_failure=True),
    }
    edges = [edge("p", "q", "vars.x > 1"), edge("p", "n", "vars.y > 1")]
    run = await run_graph({"nodes": [function("p"), *(nodes[name] for name in order)], "edges_ex": edges})
    assert {name: run.nodes[name].status for name in nodes} == {"q": "failed", "n": "failed"}


@pytest.mark.parametrize("order", list(permutations(["bad", "false", "both"])))
def test_results_of_a_group_apply_in_any_order_of_the_graph(order: list[str]) -> None:
    nodes = {
        "bad": function("bad", "p"),
        "false": function("false", "p", routing={"on_failure": ["both"]}),
        "both": function("both", "p", "bad", fan_in="any"),
    }
    edges = [edge("p", name, f"vars.{name}") for name in ("bad", "false", "both")]
    scheduler = scheduler_of(function("p"), *(nodes[name] for name in order), edges_ex=edges)
    results: Results = {"vars.bad": BAD, "vars.false": False, "vars.both": False}
    apply_results(scheduler, scheduler.pop_due(), results)
    ends = {
        node.node_id: (state.status.value, state.skip_reason)
        for node, state in zip(scheduler.nodes, scheduler.states, strict=True)
    }
    assert ends["bad"] == ("failed", None)
    assert ends["false"] == ("skipped", "condition")
    assert ends["both"] == ("skipped", "upstream_failed")


def test_preparation_searches_each_expression_once_whatever_the_number_of_nodes() -> None:
    texts = [Text(f"vars.x{i} == 1") for i in range(300)]
    scheduler = fan_out(*texts)
    due = scheduler.pop_due()
    Text.searches = 0
    (request,) = requests(scheduler, due, "t", "")
    assert request.texts == texts
    assert Text.searches <= len(texts)


def test_group_sends_equal_expressions_once_and_only_the_nodes_that_they_name() -> None:
    scheduler = fan_out(*["nodes.first.status == 'finished'"] * 12_000)
    (request,) = requests(scheduler, scheduler.pop_due(), "t", "")
    assert request.texts == ["nodes.first.status == 'finished'"]
    assert unpack(request.nodes) == [["finished", None, ["first"]]]
    assert json_size(without_defaults(request)) < 1_000


def test_parts_of_a_group_are_small_and_share_its_time() -> None:
    scheduler = fan_out(*(f"""params.x == '{'"' * 1_900}{i}'""" for i in range(600)))
    due = scheduler.pop_due()
    parts = requests(scheduler, due, "t", "")
    assert len(parts) == 4
    assert [text for part in parts for text in part.texts] == [scheduler.text_of(each) for each in due]
    assert max(json_size(without_defaults(part)) for part in parts) <= 1_000_000
    assert sum(part.seconds for part in parts) == pytest.approx(CONDITIONS_SEC)


def test_parts_of_a_group_contain_the_nodes_that_they_name() -> None:
    texts = [f"nodes.n{i}.status == '{'x' * 1_900}'" for i in range(400)]
    scheduler = scheduler_of(
        function("first"), *(function(f"n{i}", when=text) for i, text in enumerate(texts))
    )
    parts = requests(scheduler, [DueCondition(index) for index in range(1, 401)], "t", "")
    named = [[node for _, _, ids in unpack(part.nodes) for node in ids] for part in parts]
    assert [len(each) for each in named] == [len(part.texts) for part in parts] == [311, 89]


def test_reason_codes_of_thousands_of_nodes_are_shortened() -> None:
    states = [NodeState(status=NodeStatus.FAILED, reason_code=f"{i:05}" * 20) for i in range(5_000)]
    states += [NodeState(status=NodeStatus.FAILED, reason_code="same")] * 3 + [NodeState()]
    facts = unpack(facts_of({f"n{i}": state for i, state in enumerate(states)}))
    assert (len(facts), facts[-2:]) == (
        5_002,
        [["failed", "same", ["n5000", "n5001", "n5002"]], ["queued", None, ["n5003"]]],
    )
    assert json_size(facts) < 400_000


def test_results_and_errors_of_a_part_belong_to_its_expressions() -> None:
    (request,) = requests(
        fan_out("vars.a", "vars.b", "vars.c"), [DueCondition(1), DueCondition(2), DueCondition(3)], "t", ""
    )
    found = results_of(request, ConditionResults(results=[True, "no value", False]))
    assert found == {"vars.a": True, "vars.b": BAD, "vars.c": False}


def test_errors_of_thousands_of_conditions_fit_into_one_result() -> None:
    texts = [f"vars.missing{i} == '{'x' * 1_000}'" for i in range(1_500)]
    values: dict[str, Any] = {root: {} for root in ROOTS}
    results = Evaluation(CONDITIONS_SEC, SecretRule(lambda path, value: False)).run(texts, values)
    assert all(isinstance(each, str) and each.startswith("Key not found in map") for each in results)
    assert json_size(results) < 1.3 * REPORT_BYTES


def pins(path: str, value: object) -> bool:
    """Report the values that are stored as `pin`."""
    if value == "raise":
        raise ValueError(value)
    return path.endswith(".pin")


@pytest.mark.parametrize("pin", ["12-34", 80012, ["4711", 4712], 'a"b'])
async def test_errors_hide_what_the_configured_detector_reports(pin: Any) -> None:
    db = memory_database()
    nodes = [
        function("set", io={"fn": "vars.set", "fn_args": {"kv": {"login": {"pin": pin}, "n": 5}}}),
        function("next", "set", when="{'n': 1}[vars.login.pin] > vars.n", allow_failure=True),
    ]
    run = await run_graph({"nodes": nodes}, functions=default_adapters(db=db, detector=pins), db=db)
    error = run.nodes["next"].error or ""
    assert error.endswith("it reads vars.login.pin = (hidden), vars.n = 5")
    assert not re.search(r"12-34|80012|4711|4712|a\\*\"b", error)


async def test_errors_hide_every_value_when_the_detector_fails() -> None:
    db = memory_database()
    nodes = [function("a", when="params.secret > 1", allow_failure=True)]
    run = await run_graph(
        {"nodes": nodes},
        params={"secret": "raise"},
        functions=default_adapters(db=db, detector=pins),
        db=db,
    )
    assert "params.secret = (hidden)" in (run.nodes["a"].error or "")
