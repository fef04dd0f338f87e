"""The rules of actions: what they affect, and why a task rejects them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.graphs import node

from flowkit.actions import plans
from flowkit.actions.plans import Audit, Plan, result_of
from flowkit.actions.preconditions import state_of
from flowkit.actions.records import Action, ChangeGraph, Pause, Resume, RetryNode, SkipNode
from flowkit.actions.scopes import Pauses, nodes_below
from flowkit.actions.table import parse_action, plan
from flowkit.errors import ActionRejected, RejectionCause
from flowkit.graph.validation import parse_graph
from flowkit.limits import ACTION_AFFECTED, ACTION_RESULTS_BYTES, ACTION_SCOPES, APPLIED_ACTIONS
from flowkit.models import NodeState, NodeStatus
from flowkit.models.actions import AppliedAction, PausedScope

PULL = {"input_inline": {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": ["a"]}}}
GRAPH: dict[str, Any] = {
    "nodes": [
        node("a"),
        node("b", depends_on=["a"]),
        node("c", depends_on=["b"]),
        node("d", type="other"),
        node("e", routing={"on_failure": ["f"]}),
        node("f"),
    ]
}
A, B, C, D, E, F = range(6)


class Task:
    """A task with this graph, whose nodes have the given statuses."""

    def __init__(self, *paused: str, **statuses: NodeStatus) -> None:
        self.nodes = parse_graph(GRAPH).nodes
        self.pauses = Pauses(self.nodes, [PausedScope(scope=scope, since=1.0) for scope in paused])
        self.states = [NodeState(status=statuses.get(each.node_id, NodeStatus.QUEUED)) for each in self.nodes]

    def snapshot(self, **more: Any) -> plans.TaskSnapshot:
        return plans.TaskSnapshot(nodes=self.nodes, states=self.states, pauses=self.pauses, **more)

    def plan(self, action: Action, **more: Any) -> Plan:
        return plan(action, self.snapshot(**more))

    def state(self, action: Action, **more: Any) -> str:
        """Return the state that a preview of an action returns."""
        return state_of(self.plan(action, **more), self.snapshot(**more))

    def changes(self, action: Action) -> list[tuple[str, str, str]]:
        planned = self.plan(action)
        return [(self.nodes[each.index].node_id, each.from_, each.to) for each in planned.changes]


@pytest.mark.parametrize(
    ("scope", "paused"),
    [
        ("task", {A, B, C, D, E, F}),
        ("node:b", {B}),
        ("below:a", {B, C}),
        ("below:e", {F}),
        ("role:other", {D}),
    ],
)
def test_scope_pauses_its_nodes(scope: str, paused: set[int]) -> None:
    pauses = Task(scope).pauses
    assert {index for index in range(6) if index in pauses.paused} == paused


def test_a_change_of_pauses_begins_some_and_ends_others() -> None:
    pauses = Task("node:b", "role:other").pauses
    assert not pauses.whole_task
    pauses.change([PausedScope(scope="task", since=2.0)], ["node:b"])
    assert [each.scope for each in pauses.scopes] == ["role:other", "task"]
    assert pauses.whole_task
    pauses.change([], ["task"])
    assert not pauses.whole_task
    assert pauses.paused == {D}


def test_nodes_below_include_those_that_pull_or_whose_function_names_the_node() -> None:
    function = {"type": "coordinator_fn", "io": {"fn": "metrics.aggregate", "fn_args": {"node_id": "a"}}}
    nodes = parse_graph(
        {"nodes": [node("a"), node("p", io=PULL), {"node_id": "f", **function}, node("x")]}
    ).nodes
    assert nodes_below(nodes, 0) == {1, 2}


def test_pause_holds_what_waits_and_lets_finish_what_runs() -> None:
    task = Task(a=NodeStatus.FINISHED, b=NodeStatus.RUNNING, d=NodeStatus.DEFERRED)
    planned = task.plan(Pause())
    assert planned.pauses == ("task",)
    assert planned.interrupts == ()
    assert planned.notes == ("attempts that run until their end: 1; interrupt=true stops them",)
    assert task.changes(Pause()) == [
        ("b", "running", "running, then paused"),
        ("c", "queued", "paused"),
        ("d", "deferred", "paused"),
        ("e", "queued", "paused"),
        ("f", "queued", "paused"),
    ]


def test_interrupt_stops_what_runs_also_in_a_scope_that_is_paused_already() -> None:
    task = Task("task", b=NodeStatus.RUNNING)
    planned = task.plan(Pause(scopes=("node:b",), interrupt=True))
    assert (planned.interrupts, [each.to for each in planned.changes]) == ((B,), ["paused"])


def test_resume_frees_only_the_nodes_that_no_other_pause_holds() -> None:
    task = Task("below:a", "node:b")
    assert task.changes(Resume(scopes=("below:a",))) == [("c", "paused", "queued")]
    assert task.plan(Resume(scopes=("below:a",))).notes == ("nodes that stay paused by node:b: 1",)
    assert task.plan(Resume()).resumes == {"below:a", "node:b"}


@pytest.mark.parametrize(
    ("paused", "action", "problem"),
    [
        ((), Pause(scopes=("nodes:a",)), "scopes has 'nodes:a'; a scope is 'task', 'node:ID'"),
        ((), Pause(scopes=("node:bb",)), "the task has no node 'bb'; did you mean 'b'?"),
        ((), Pause(scopes=("below:f",)), "no node depends on 'f'"),
        ((), Pause(scopes=("role:x",)), "the roles of the task are crawler and other"),
        (("task",), Pause(), "task is paused already; resume ends a pause"),
        ((), Pause(scopes=("node:a",)), "all nodes of node:a have ended"),
        ((), Resume(), "nothing is paused"),
        (("task",), Resume(scopes=("node:a",)), "scopes has 'node:a', but the paused scopes are task"),
        ((), Pause(if_revision=3), "if_revision is 3, and the task has revision 0: another action"),
        ((), ChangeGraph(), "change_graph needs nodes to add or changes"),
        ((), ChangeGraph(nodes=(node("b"),)), "the task has the node b already; give new nodes other ids"),
        ((), ChangeGraph(changes={"x": {"timeout_sec": 5}}), "the task has no node 'x'"),
        (
            (),
            ChangeGraph(changes={"a": {"timeout_sec": 5}}),
            "node 'a' is finished, and change_graph changes only",
        ),
        ((), ChangeGraph(nodes=(node("x"),), edges=(("x", "b"),)), "['x', 'b'] does not lead to a new node"),
        (
            (),
            ChangeGraph(nodes=(node("x"),), edges_ex=({"from": "x", "to": {}},)),
            "does not lead to a new node",
        ),
        ((), Pause(scopes=tuple(f"node:{i}" for i in range(ACTION_SCOPES + 1))), "51 paused scopes, and 50"),
    ],
)
def test_action_that_does_not_fit_is_rejected_with_what_is_allowed(
    paused: tuple[str, ...], action: Action, problem: str
) -> None:
    with pytest.raises(ActionRejected) as caught:
        Task(*paused, a=NodeStatus.FINISHED).plan(action)
    assert problem in str(caught.value)


CHANGES: dict[str, dict[str, Any]] = {
    "it has ended": {"status": NodeStatus.FAILED, "held_until": None},
    "it runs": {"status": NodeStatus.RUNNING, "held_until": None},
    "it has another attempt": {"epoch": 2},
    "it was reset": {"generation": 1},
    "it is no longer held": {"held_until": None, "next_retry_at": 5.0},
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
def test_an_action_is_rejected_once_a_node_that_it_affects_is_not_as_its_preview_has_shown(
    changed: dict[str, Any],
) -> None:
    task = Task(a=NodeStatus.DEFERRED, d=NodeStatus.RUNNING)
    task.states[A] = replace(task.states[A], epoch=1, held_until=9.0)
    seen = task.state(RetryNode(node_id="a", interrupt=True))
    action = RetryNode(node_id="a", interrupt=True, if_state=seen)
    task.states[D] = NodeState(status=NodeStatus.FINISHED, epoch=7)
    assert task.plan(action).resets == (A,), "the action does not affect d"
    task.states[A] = replace(task.states[A], **changed)
    with pytest.raises(ActionRejected) as caught:
        task.plan(action)
    assert caught.value.cause is RejectionCause.OUTDATED
    now = f"now a is {task.states[A].status.value if task.states[A].held_until is None else 'held'} (attempt"
    assert str(caught.value).startswith(f"if_state is '{seen}', and what the action affects has changed")
    assert now in str(caught.value)
    assert str(caught.value).endswith("; look at what the action would affect now, then decide again")


def test_an_action_is_rejected_once_it_affects_other_nodes_or_another_run_of_the_task() -> None:
    task = Task(a=NodeStatus.FINISHED)
    seen = task.state(SkipNode(node_id="a"))
    action = SkipNode(node_id="a", if_state=seen)
    assert task.plan(action).resets == (A,)
    with pytest.raises(ActionRejected, match="if_state"):
        task.plan(action, run_seq=2)
    task.states[B] = NodeState(status=NodeStatus.FINISHED, epoch=1)
    with pytest.raises(ActionRejected, match=re.escape("now a is finished and b is finished (attempt 1);")):
        task.plan(action)


def test_a_change_of_the_graph_expects_only_the_nodes_that_the_task_has() -> None:
    action = ChangeGraph(nodes=(node("x"),), changes={"b": {"timeout_sec": 5}})
    task = Task(a=NodeStatus.RUNNING)
    given = replace(action, if_state=task.state(action))
    task.states[A] = NodeState(status=NodeStatus.FINISHED)
    assert task.plan(given).adds == ("x",)
    task.states[B] = NodeState(generation=1)
    with pytest.raises(ActionRejected, match="now b is queued;"):
        task.plan(given)


def test_the_error_of_another_revision_names_the_actions_that_were_applied_meanwhile() -> None:
    applied = [
        AppliedAction(revision=4, action="retry_node", at=1.0, what="a", by="bob"),
        AppliedAction(revision=5, action="pause", at=2.0, what="task"),
    ]
    with pytest.raises(ActionRejected, match=re.escape("meanwhile (pause of task); look at")):
        Task().plan(Pause(if_revision=4), revision=5, applied=applied)
    with pytest.raises(ActionRejected, match=re.escape("(retry_node of a by bob and pause of task)")):
        Task().plan(Pause(if_revision=3), revision=5, applied=applied)


@pytest.mark.parametrize(
    ("name", "given", "problem"),
    [
        ("halt", {}, "there is no action 'halt'; the actions are pause, resume"),
        ("pause", [], "the input of pause is []; it must be an object"),
        ("pause", {"scope": "task"}, "pause has the unknown field 'scope'; did you mean 'scopes'?"),
        ("pause", {"scopes": "task"}, "pause: scopes is 'task'; it must be a list of at most 50 of 'task'"),
        ("pause", {"interrupt": 1}, "pause: interrupt is 1; it must be true or false"),
        ("resume", {"reason": "x" * 501}, "it must be a text of at most 500 characters"),
        ("resume", {"if_revision": -1}, "resume: if_revision is -1; it must be the revision that"),
        ("resume", {"if_state": "x"}, "resume: if_state is 'x'; it must be the `state` that a preview"),
        ("resume", {"if_state": 7}, "resume: if_state is 7; it must be the `state` that a preview"),
        ("change_graph", {"nodes": [{}]}, "it must be a list of nodes as in a graph, each with a 'node_id'"),
        ("change_graph", {"edges": [["a"]]}, "it must be a list of [from, to] pairs of node ids"),
        ("change_graph", {"edges_ex": [["a", "b"]]}, "it must be a list of objects with 'from' and 'to'"),
        (
            "change_graph",
            {"changes": {"a": {"type": "x"}}},
            "new values of io, retry_policy, timeout_sec, deadline_sec",
        ),
        ("change_graph", {"changes": {"a": {}}}, "it must be an object that has, by node id, new values"),
    ],
)
def test_input_that_is_not_valid_is_rejected_by_field(name: str, given: Any, problem: str) -> None:
    with pytest.raises(ActionRejected) as caught:
        parse_action(name, given)
    assert problem in str(caught.value)


def test_change_of_the_graph_adds_and_changes_nodes_and_only_one_is_made_at_a_time() -> None:
    action = ChangeGraph(nodes=(node("x"), node("y")), changes={"b": {"timeout_sec": 5}})
    task = Task()
    planned = task.plan(action)
    assert (planned.adds, planned.replaces) == (("x", "y"), (B,))
    assert result_of(planned, task.nodes, 0)["affected"] == [
        {"node_id": "x", "from": "new", "to": "queued"},
        {"node_id": "y", "from": "new", "to": "queued"},
        {"node_id": "b", "from": "queued", "to": "queued, changed"},
    ]
    with pytest.raises(ActionRejected, match="an earlier change of the graph is in progress"):
        task.plan(action, changes_graph=True)


def test_input_may_be_empty() -> None:
    assert parse_action("pause", None) == Pause()
    assert parse_action("resume", {"scopes": ["node:a"]}) == Resume(scopes=("node:a",))


@pytest.mark.parametrize(
    ("names", "kept"), [(("node:a, b", "role:r"), ["node:a, b", "role:r"]), (("node:" + "a" * 2_000,), [])]
)
def test_the_audit_keeps_names_whole_or_not_at_all(names: tuple[str, ...], kept: list[str]) -> None:
    audit = Audit()
    audit.add("resume", Resume(), Plan(what=", ".join(names), names=names), 1.0, "u")
    assert audit.entries[0].names == kept


def test_audit_counts_all_actions_and_keeps_the_latest() -> None:
    audit = Audit()
    for number in range(APPLIED_ACTIONS + 5):
        audit.add("resume", Resume(), Plan(what="task"), float(number), f"u{number}")
    assert (audit.revision, len(audit.entries)) == (APPLIED_ACTIONS + 5, APPLIED_ACTIONS)
    assert audit.find("u4") is None
    assert (found := audit.find("u5")) is not None
    assert found["revision"] == 6


def test_repeated_update_returns_the_same_result_as_long_as_the_results_are_small() -> None:
    audit, size = Audit(), ACTION_RESULTS_BYTES // 3
    for number in range(4):
        update_id, result = f"u{number}", {"revision": number + 1, "affected": [], "notes": ["x" * size]}
        audit.add("resume", Resume(), Plan(what="task"), float(number), update_id)
        assert audit.keep_result(update_id, result) == audit.find(update_id) == result
    assert [audit.results.keys() & {f"u{number}"} != set() for number in range(4)] == [
        False,
        False,
        True,
        True,
    ]
    assert (found := audit.find("u0")) is not None
    assert (found["revision"], found["affected"]) == (1, [])
    assert "this update was applied before, as revision 1" in found["notes"][0]


def test_result_lists_a_bounded_number_of_nodes() -> None:
    nodes = parse_graph({"nodes": [node(f"n{i}") for i in range(ACTION_AFFECTED + 2)]}).nodes
    states = [NodeState() for _ in nodes]
    planned = plan(Pause(), plans.TaskSnapshot(nodes=nodes, states=states, pauses=Pauses(nodes, [])))
    result = result_of(planned, nodes, 1)
    assert len(result["affected"]) == ACTION_AFFECTED
    assert result["notes"] == ["and 2 more nodes"]
