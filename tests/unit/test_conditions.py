"""Conditions without a server: what is rejected, what an expression reads, and how its evaluation ends."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from tests.unit.graphs import node

from flowkit.activities.conditions import ConditionActivities, Evaluation
from flowkit.adapters.tasks.store import TaskStore
from flowkit.adapters.vars.sensitive import DefaultDetector, Detector
from flowkit.core.loop_portal import LoopPortal
from flowkit.errors import BadCondition, GraphError
from flowkit.graph import cel
from flowkit.graph.cel import ROOTS, compile_expression, evaluate
from flowkit.graph.conditions import SecretRule, select_values
from flowkit.graph.submission import validate_input
from flowkit.limits import CONDITION_VALUES_BYTES, CONDITIONS_SEC
from flowkit.models import EvaluateConditions
from flowkit.models.temporal_names import ENGINE_ACTIVITIES
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowkit.models import Graph

EMPTY: dict[str, Any] = {root: {} for root in ROOTS}


def submitted(*nodes: dict[str, Any], edges_ex: list[dict[str, Any]] | None = None) -> Graph:
    """Return the graph of a task with these nodes."""
    return validate_input("t", {"graph": {"nodes": list(nodes), "edges_ex": edges_ex}})


def problems(*nodes: dict[str, Any], edges_ex: list[dict[str, Any]] | None = None) -> list[str]:
    """Return the first line of each problem of a graph."""
    with pytest.raises(GraphError) as caught:
        submitted(*nodes, edges_ex=edges_ex)
    return [problem.partition("\n")[0] for problem in caught.value.problems]


def results_of(texts: list[str], values: dict[str, Any], seconds: float = CONDITIONS_SEC) -> list[bool | str]:
    """Evaluate expressions that are due together."""
    return Evaluation(seconds, SecretRule(DefaultDetector().is_sensitive)).run(texts, values)


def child(when: str) -> list[dict[str, Any]]:
    """Return nodes of which `b` has a condition and `a.1` and `r` are ancestors; `c` is none."""
    above = node("a.1", routing={"on_failure": ["r"]})
    return [above, node("r"), node("b", depends_on=["r"], when=when), node("c", depends_on=["b"])]


@pytest.mark.parametrize(
    "when",
    [
        """nodes["a.1"].status == 'failed'""",
        "nodes['r'].error_code == '' && nodes.r.stats.n > 1",
        "nodes[r'a.1'].stats.size() == 0",
        "has(params.nodes) && params.nodes.c.status == 1",
        "vars.l.all(nodes, nodes.c > 1)",
        """nodes // the router
           ["a.1"] . status != "nodes.c.status" """,
        "vars.`a-b` == 1",
    ],
)
def test_condition_may_name_ancestors_and_routers(when: str) -> None:
    assert submitted(*child(when)).nodes[2].when == when


@pytest.mark.parametrize(
    ("when", "problem"),
    [
        ("nodes.c.status == ''", "'c' is not an ancestor of 'b', so it may end later"),
        ("nodes.b.status == ''", "'b' is not an ancestor of 'b', so it may end later"),
        ("nodes['a'].status == ''", "'a' is not a node"),
        ("nodes[params.x].status == ''", "nodes needs the id of a node as text, for example"),
        ("nodes.exists(id, nodes[id].status == 'failed')", "nodes needs the id of a node as text"),
        ("size(nodes) > 1", "nodes needs the id of a node as text"),
        ("'r' in nodes", "nodes needs the id of a node as text"),
        (".nodes.c.status == ''", "'c' is not an ancestor of 'b'"),
        ("nodes.r == {}", "nodes['r'] is not a value; use its status, error_code or stats"),
        ("nodes.r.state == ''", "nodes['r'] has no field 'state'; use its status"),
        ("node.r.status == ''", "undeclared reference to 'node.r.status'; did you mean 'nodes'?"),
        ("now() > 1", "undeclared reference to 'now'"),
        ("'a' + 1 == 'a1'", "found no matching overload for '_+_' applied to '(string, int)'"),
        ("1 + 1", "the result is of type int, not bool"),
        ("(" * 500, "Expression recursion limit exceeded"),
        ("vars.\ud800", "the expression is not valid Unicode"),
        ("'a", "token recognition error"),
    ],
)
def test_condition_that_cannot_work_is_rejected(when: str, problem: str) -> None:
    nodes = child("true")
    nodes[2]["when"] = when
    if "\ud800" in when:
        with pytest.raises(BadCondition, match=problem):
            compile_expression(when)
        return
    found, *_ = problems(*nodes)
    assert found.startswith(f"node 'b': when: {problem}")


@pytest.mark.parametrize(
    ("edge", "problem"),
    [
        ({"from": "a", "to": "b", "when": 7}, "when 7 must be a CEL expression of 1 to 2,000 characters"),
        ({"from": "a", "to": "b", "when": "false"}, "the edge is listed twice with different conditions"),
        ({"from": "c", "to": "b", "when": "true"}, "the condition has no effect, because depends_on of 'b'"),
        ({"from": "a", "to": "d", "when": "true"}, "the condition has no effect, because 'a' routes to 'd'"),
        ({"from": "a", "to": "c", "when": "vars.x =="}, "when: the expression is incomplete"),
    ],
)
def test_edge_whose_condition_cannot_work_is_rejected(edge: dict[str, Any], problem: str) -> None:
    nodes = [node("a", routing={"on_failure": ["d"]}), node("b", depends_on=["a"]), node("c"), node("d")]
    (found,) = problems(*nodes, edges_ex=[{"from": "a", "to": "b", "when": "true"}, edge])
    assert found.startswith(f"graph.edges_ex '{edge['from']}' -> '{edge['to']}': {problem}")


def test_edges_add_conditions_to_parents_of_either_form_without_a_warning() -> None:
    edge = {"from": "a", "to": "b", "when": "true"}
    for nodes in (
        [node("a"), node("b", depends_on=["a", "c"]), node("c")],
        [node("a"), node("b"), node("c")],
    ):
        graph = submitted(*nodes, edges_ex=[edge])
        others = [each for each in graph.warnings if "names no input adapter" not in each]
        assert (graph.nodes[1].edge_when, others) == ({"a": "true"}, [])


def test_excerpt_of_a_long_condition_surrounds_the_caret() -> None:
    with pytest.raises(BadCondition) as caught:
        compile_expression(f"vars.x == '{'é' * 900}' && oops && vars.y == '{'z' * 900}'")
    _, line, caret = str(caught.value).split("\n  | ")
    assert (len(line), line[len(caret) - 1 :][:4]) == (100, "oops")


def test_expression_reads_only_the_named_part_of_the_values() -> None:
    values = {
        "params": {"big": "x" * 100},
        "vars": {"a": {"b": {"c": 1, "d": 2}, "e": 3}, "l": [1, 2], "t": "text", "key": "c"},
        "nodes": {"n": {"status": "finished", "stats": {"rows": 3}}},
    }
    text = "vars.a.b[vars.key] == 1 && has(vars.t.x) && has(vars.no.way) && vars.l[0] > 0 && nodes.n.stats.rows > 1"
    assert select_values(values, compile_expression(text).accesses) == {
        "params": {},
        "vars": {"a": {"b": {"c": 1, "d": 2}}, "l": [1, 2], "t": "text", "key": "c"},
        "nodes": {"n": {"stats": {"rows": 3}}},
    }
    assert (
        select_values(values, compile_expression("size(vars) > 1 && vars.l == []").accesses)["vars"]
        == values["vars"]
    )


def test_values_of_other_types_become_text() -> None:
    values = {
        **EMPTY,
        "vars": {"at": datetime(2026, 1, 31, tzinfo=UTC), "raw": b"\x00\x01", "one": {7: (1, 2)}},
    }
    read = select_values(values, compile_expression("size(vars) > 1").accesses)
    assert read["vars"] == {"at": "2026-01-31T00:00:00+00:00", "raw": "AAE=", "one": {"7": [1, 2]}}
    assert evaluate(compile_expression("timestamp(vars.at).getFullYear() == 2026 && size(vars) == 3"), read)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("vars.no.x == 1", 'Key not found in map: "no"'),
        ("vars.n", "the result is of type int, not bool"),
        ("vars.n / 0 == 1", "divide by zero"),
        ("vars.text > 1", "No matching overloads found"),
        ("vars.text.matches('[')", "invalid regular expression"),
        ("vars.l.all(a, vars.l.all(b, vars.l.all(c, true)))", "Iteration budget exceeded"),
    ],
)
def test_error_of_an_evaluation_is_its_result(text: str, error: str) -> None:
    values = {**EMPTY, "vars": {"n": 1, "text": "x", "l": list(range(100))}}
    (result,) = results_of([text], values)
    assert isinstance(result, str)
    assert result.startswith(error)
    assert f", in the condition {text}; it reads vars." in result


def test_error_hides_secrets_wherever_they_are() -> None:
    secret = "sk-aB3dE5gH7jK9mN1pQ3rS"
    assert DefaultDetector().is_sensitive("x", secret)
    values = {**EMPTY, "params": {"key": secret, "many": [secret]}, "vars": {"m": {}, "n": 1}}
    (result,) = results_of(["vars.m[params.key] == vars.n || vars.m[params.many[0]]"], values)
    assert isinstance(result, str)
    assert secret not in result
    assert 'Key not found in map: "(hidden)"' in result
    assert "vars.m = {}, params.key = (hidden), vars.n = 1, params.many = (hidden)" in result


def test_results_keep_their_order_when_some_come_from_a_process() -> None:
    values = {**EMPTY, "vars": {"l": [1, 2, 3], "text": "y" * 20_000}}
    texts = [
        "true",
        "vars.l.exists(x, x == 2)",
        "vars.text == ''",
        "vars.no",
        "vars.l.all(x, x < 3)",
        "vars.l[",
    ]
    *first, last = results_of(texts, values)
    assert [each if isinstance(each, bool) else None for each in first] == [True, True, False, None, False]
    assert "the expression is incomplete" in str(last)


@pytest.mark.slow
def test_evaluation_is_limited_in_time_and_memory() -> None:
    large = {"l": list(range(95)), "s": "x" * 600_000, "t": "x" * 200_000 + "y"}
    slow = "params.l.all(a, params.l.all(b, !params.s.contains(params.t)))"
    greedy = "params.l.map(a, params.l.map(b, params.s + params.s)).size() == 0"
    results = results_of([slow, "params.l.exists(a, a == 3)", greedy], {**EMPTY, "params": large})
    assert str(results[0]).startswith("the evaluation takes more than 2 s")
    assert results[1] is True
    assert str(results[2]).startswith("the evaluation needs too much memory")


LARGE = {**EMPTY, "params": {"l": list(range(95)), "s": "x" * 600_000, "t": "x" * 200_000 + "y"}}
ENDLESS = "params.l.all(a, params.l.all(b, !params.s.contains(params.t)))"


def test_conditions_that_are_due_together_share_one_time_limit() -> None:
    late = "the conditions that are due together take more than 0.3 s, in the condition"
    results = results_of([ENDLESS, "size(params) == 3", f"{ENDLESS} && true"], LARGE, seconds=0.3)
    assert [str(each)[: len(late)] for each in results] == [late] * 3


def evaluated_with(disturb: Callable[[Evaluation], None]) -> list[bool | str]:
    """Return the result of an endless condition while `disturb` runs on another thread."""
    evaluation = Evaluation(CONDITIONS_SEC, SecretRule(DefaultDetector().is_sensitive))
    with ThreadPoolExecutor(1) as threads:
        disturbing = threads.submit(disturb, evaluation)
        results = evaluation.run([ENDLESS], LARGE)
        disturbing.result()
    assert evaluation._process._process is None
    return results


def running(evaluation: Evaluation, *known: int) -> int:
    """Return the id of the process that evaluates the condition, when there is one besides those that are known."""
    while (process := evaluation._process._process) is None or process.pid in known:
        threading.Event().wait(0.01)
    return process.pid


def test_condition_whose_process_is_killed_twice_is_too_large() -> None:
    def kill_twice(evaluation: Evaluation) -> None:
        first = running(evaluation)
        os.kill(first, signal.SIGKILL)
        os.kill(running(evaluation, first), signal.SIGKILL)

    (result,) = evaluated_with(kill_twice)
    assert str(result).startswith("the evaluation needs too much memory, in the condition")


def test_end_of_the_activity_ends_the_process() -> None:
    def stop(evaluation: Evaluation) -> None:
        running(evaluation)
        evaluation.stop()

    (result,) = evaluated_with(stop)
    assert "together take more than" in str(result)


def test_expressions_of_a_graph_are_limited_together_and_equal_ones_count_once() -> None:
    texts = [f"vars.x == '{'é' * 900}{i:04}'" for i in range(282)]
    assert submitted(*(node(f"n{i}", when=texts[0]) for i in range(282))).nodes[281].when == texts[0]
    with pytest.raises(GraphError) as caught:
        submitted(*(node(f"n{i}", when=text) for i, text in enumerate(texts)))
    assert (caught.value.code, str(caught.value)) == (
        "conditions_too_large",
        "the expressions of all conditions have 512,112 bytes, more than 512,000: shorten them, or use equal ones",
    )


def test_each_expression_of_a_graph_is_compiled_once() -> None:
    texts = [f"vars.compiled_once == {i}" for i in range(1_100)]
    before = cel._compile.cache_info().misses
    submitted(*(node(f"n{i}", when=text) for i, text in enumerate([*texts, *texts])))
    assert cel._compile.cache_info().misses - before == len(texts)


def test_too_large_values_are_refused() -> None:
    values = {**EMPTY, "vars": {"text": "y" * CONDITION_VALUES_BYTES, "n": 1}}
    whole, part = results_of(["vars.text == ''", "vars.n == 1"], values)
    assert str(whole).startswith("its values have 1,000,")
    assert part is True


def test_name_of_the_activity_is_reserved() -> None:
    assert "evaluate_conditions" in ENGINE_ACTIVITIES


@pytest.mark.parametrize(
    ("deployment", "code", "permanent"), [("", "mongo_refused", True), ("another", "wrong_database", False)]
)
async def test_activity_refuses_a_task_without_a_document_and_another_database(
    deployment: str, code: str, permanent: bool
) -> None:
    activities = ConditionActivities(
        tasks=TaskStore(memory_database()), portal=LoopPortal(), detector=Detector()
    )
    due = EvaluateConditions(task_id="t", texts=["true"], deployment=deployment)
    with pytest.raises(ApplicationError) as caught:
        await ActivityEnvironment().run(activities.evaluate_conditions, due)
    assert (caught.value.type, caught.value.non_retryable) == (code, permanent)
