"""The rules of actions that start new generations of nodes, and the scheduler after them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.graphs import node

from flowkit.actions.changed_nodes import changeable, changes_of, with_changes
from flowkit.actions.plans import NodeEnd, Plan, TaskSnapshot, find_resets
from flowkit.actions.records import Action, CompleteNode, Decide, FailNode, RetryNode, Satisfy, SkipNode
from flowkit.actions.scopes import Pauses, children_of
from flowkit.actions.table import parse_action, plan
from flowkit.errors import ActionRejected
from flowkit.graph.validation import parse_graph
from flowkit.models import FirstBatch, Graph, NodeOutcome, NodeState, NodeStatus, SkipReason
from flowkit.models.actions import PausedScope
from flowkit.models.graphs import Approval
from flowkit.models.waits import for_slot
from flowkit.workflows.scheduling.conditions import DueCondition
from flowkit.workflows.scheduling.scheduler import HOLD, Scheduler

FINISHED, FAILED, RUNNING = NodeStatus.FINISHED, NodeStatus.FAILED, NodeStatus.RUNNING
QUEUED, SKIPPED, DEFERRED = NodeStatus.QUEUED, NodeStatus.SKIPPED, NodeStatus.DEFERRED


def pull(*sources: str) -> dict[str, Any]:
    return {
        "input_inline": {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": [*sources]}}
    }


def sums(name: str) -> dict[str, Any]:
    return {"type": "coordinator_fn", "io": {"fn": "metrics.aggregate", "fn_args": {"node_id": name}}}


NODES: list[dict[str, Any]] = [
    node("a", routing={"on_failure": ["fix"]}),
    node("b", depends_on=["a"]),
    node("side"),
    node("any", depends_on=["a", "side"], fan_in="any"),
    node("any_pull", depends_on=["a", "side"], fan_in="any", io=pull("a")),
    node("after_any", depends_on=["any"]),
    {"node_id": "sum", "depends_on": ["side"], **sums("a")},
    node("fix"),
    node("last", depends_on=["b", "sum"]),
]
GRAPH: dict[str, Any] = {"nodes": NODES}


class Sample:
    """A task with this graph, whose nodes have the given statuses or states, and else are queued."""

    def __init__(self, raw: dict[str, Any] = GRAPH, **given: Any) -> None:
        self.graph: Graph = changeable(parse_graph(raw), {})
        self.nodes = self.graph.nodes
        self.index = {each.node_id: each.index for each in self.nodes}
        self.states = [_state(given.get(each.node_id, QUEUED)) for each in self.nodes]

    def plan(self, action: Action, **more: Any) -> Plan:
        pauses = Pauses(self.nodes, [])
        return plan(action, TaskSnapshot(nodes=self.nodes, states=self.states, pauses=pauses, **more))

    def changes(self, action: Action) -> dict[str, tuple[str, str]]:
        return {self.nodes[each.index].node_id: (each.from_, each.to) for each in self.plan(action).changes}

    def resets(self, target: str) -> tuple[set[str], set[str]]:
        found = find_resets([self.index[target]], self.nodes, self.states, children_of(self.nodes))
        return tuple({self.nodes[index].node_id for index in each} for each in found)  # type: ignore[return-value]


def _state(given: NodeStatus | NodeState) -> NodeState:
    if isinstance(given, NodeState):
        return given
    epoch = int(given not in (QUEUED, SKIPPED))
    return NodeState(status=given, epoch=epoch)


ALL: dict[str, Any] = dict.fromkeys(
    ("a", "b", "side", "any", "any_pull", "after_any", "sum", "fix", "last"), FINISHED
)


def test_reset_covers_what_depends_on_the_node_but_not_what_any_parent_started() -> None:
    resets, unstarted = Sample(**ALL).resets("a")
    assert resets == {"a", "b", "any_pull", "sum", "fix", "last"}
    assert unstarted == set()


def test_nodes_that_have_not_started_are_decided_again_instead_of_reset() -> None:
    resets, unstarted = Sample(a=FINISHED, b=RUNNING, side=FINISHED).resets("a")
    assert resets == {"a", "b"}
    assert unstarted == {"any", "any_pull", "sum", "fix", "last"}


def test_a_skipped_node_below_is_reset_whatever_its_gate() -> None:
    skipped = NodeState(status=SKIPPED, skip_reason=SkipReason.UPSTREAM_FAILED)
    resets, _ = Sample(a=FAILED, any=skipped, after_any=skipped).resets("a")
    assert {"any", "after_any"} <= resets


def test_retry_of_a_held_node_lists_its_new_state_first() -> None:
    sample = Sample(a=NodeState(status=DEFERRED, held_until=9.0, epoch=2, reason_code="x"), side=RUNNING)
    assert sample.changes(RetryNode(node_id="a")) == {"a": ("held", "queued")}


def test_running_descendants_need_an_interrupt() -> None:
    sample = Sample(a=FINISHED, b=RUNNING)
    with pytest.raises(ActionRejected, match="b depends on node 'a' and runs; interrupt=true stops it"):
        sample.plan(RetryNode(node_id="a"))
    planned = sample.plan(RetryNode(node_id="a", interrupt=True))
    assert planned.interrupts == (sample.index["b"],)
    assert planned.resets == (sample.index["a"], sample.index["b"])


WAITS = NodeState(status=DEFERRED, epoch=2, failures=1, next_retry_at=9.0, reason_code="flaky")


def test_retry_of_a_node_in_its_backoff_ends_the_wait_and_resets_nothing() -> None:
    sample = Sample(a=WAITS, b=RUNNING)
    planned = sample.plan(RetryNode(node_id="a"))
    assert (planned.ends_wait, planned.resets, planned.interrupts) == (sample.index["a"], (), ())
    assert sample.changes(RetryNode(node_id="a")) == {"a": ("deferred", "deferred, due now")}


@pytest.mark.parametrize("more", [{"interrupt": True}, {"timeout_sec": 5.0}])
def test_restart_or_changed_input_in_the_backoff_begins_a_new_generation(more: dict[str, Any]) -> None:
    sample = Sample(a=WAITS)
    planned = sample.plan(RetryNode(node_id="a", **more))
    assert (planned.ends_wait, planned.resets) == (None, (sample.index["a"],))


def test_restart_stops_a_running_node_and_what_runs_below_it() -> None:
    sample = Sample(a=RUNNING, b=RUNNING)
    planned = sample.plan(RetryNode(node_id="a", interrupt=True))
    assert planned.interrupts == planned.resets == (sample.index["a"], sample.index["b"])


def test_retry_of_a_wide_node_ends_the_waits_of_its_shards_while_others_run() -> None:
    sample = Sample(a=RUNNING)
    planned = sample.plan(RetryNode(node_id="a"), waiting=[sample.index["a"]])
    assert (planned.ends_wait, planned.changes[0].to) == (sample.index["a"], "running")


def test_retry_of_a_paused_node_that_was_in_its_backoff_takes_effect_after_the_pause() -> None:
    sample = Sample(a=NodeState(status=DEFERRED, epoch=2, retry_left=60.0))
    pauses = Pauses(sample.nodes, [PausedScope(scope="node:a", since=1.0)])
    planned = plan(
        RetryNode(node_id="a"), TaskSnapshot(nodes=sample.nodes, states=sample.states, pauses=pauses)
    )
    assert (planned.ends_wait, planned.changes[0].to) == (sample.index["a"], "paused")
    sample.states[0].retry_left = None
    with pytest.raises(ActionRejected, match="it continues after the pause, which resume ends"):
        plan(RetryNode(node_id="a"), TaskSnapshot(nodes=sample.nodes, states=sample.states, pauses=pauses))


def test_notes_name_functions_that_count_again() -> None:
    notes = Sample(**ALL).plan(RetryNode(node_id="a")).notes
    assert notes == ("functions that take effect once more: sum", "variables keep their values")


HELD = NodeState(status=DEFERRED, held_until=9.0, epoch=1, reason_code="flaky")
BY_USER = NodeState(status=SKIPPED, skip_reason=SkipReason.USER)


@pytest.mark.parametrize(
    ("action", "given", "problem"),
    [
        (RetryNode(node_id="aa"), {}, "the task has no node 'aa'; did you mean 'a'?"),
        (RetryNode(node_id="a"), {}, "node 'a' is queued; change_graph changes its input before it starts"),
        (
            RetryNode(node_id="a", interrupt=True),
            {},
            "node 'a' is queued; change_graph changes its input",
        ),
        (
            RetryNode(node_id="a"),
            {"a": RUNNING},
            "node 'a' is running; retry_node with interrupt=true stops its",
        ),
        (
            RetryNode(node_id="a"),
            {"a": DEFERRED},
            "it continues as soon as it can; interrupt=true starts it again",
        ),
        (
            RetryNode(node_id="last", interrupt=True),
            {
                "a": FAILED,
                "b": NodeState(status=SKIPPED, skip_reason=SkipReason.UPSTREAM_FAILED),
                "last": NodeState(status=SKIPPED, skip_reason=SkipReason.UPSTREAM_FAILED),
            },
            "node 'last' is skipped; retry_node of a, because of which it was skipped, starts it again",
        ),
        (
            RetryNode(node_id="b"),
            {
                "a": NodeState(status=SKIPPED, skip_reason=SkipReason.USER),
                "b": NodeState(status=SKIPPED, skip_reason=SkipReason.USER),
            },
            "retry_node of a, because of which it was skipped",
        ),
        (
            RetryNode(node_id="b"),
            {"a": FAILED, "b": NodeState(status=SKIPPED, skip_reason=SkipReason.UPSTREAM_FAILED)},
            "retry_node of a, because of which it was skipped, starts it again",
        ),
        (
            RetryNode(node_id="fix"),
            {"a": FINISHED, "fix": NodeState(status=SKIPPED, skip_reason=SkipReason.ROUTING)},
            "retry_node of a, which has not routed to it, starts it again",
        ),
        (SkipNode(node_id="a"), {"a": RUNNING}, "node 'a' is running; interrupt=true stops its attempt"),
        (SkipNode(node_id="a"), {"a": BY_USER}, "node 'a' is skipped already"),
        (FailNode(node_id="a"), {"a": FAILED}, "node 'a' is failed already"),
        (
            Decide(node_id="a", decision="approve"),
            {"a": HELD},
            "node 'a' is no approval, and it is held; retry_node",
        ),
        (Satisfy(prerequisite="x"), {}, "no node of the task names the prerequisite 'x'; its nodes have no"),
        (
            RetryNode(node_id="any_pull", input_inline={"input_args": {"from_nodes": ["side"]}}),
            {"any_pull": FINISHED},
            "input_inline changes from which nodes 'any_pull' pulls",
        ),
        (
            RetryNode(node_id="a", input_inline={"x": "y" * 70_000}),
            {"a": FINISHED},
            "the changed input of node 'a': io is 70,",
        ),
    ],
)
def test_action_that_does_not_fit_is_rejected(action: Action, given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ActionRejected) as caught:
        Sample(**given).plan(action)
    assert problem in str(caught.value)


def test_a_node_whose_reset_is_in_progress_accepts_no_action() -> None:
    sample = Sample(**ALL)
    with pytest.raises(ActionRejected, match="an earlier action resets node 'b'"):
        sample.plan(RetryNode(node_id="b"), resetting={sample.index["b"]})
    with pytest.raises(ActionRejected, match="an earlier action resets b at present"):
        sample.plan(RetryNode(node_id="a"), resetting={sample.index["b"]})


@pytest.mark.parametrize(
    ("name", "given", "problem"),
    [
        ("retry_node", {}, "retry_node needs node_id, which must be the id of a node"),
        (
            "retry_node",
            {"node_id": "a", "timeout_sec": 0},
            "timeout_sec is 0; it must be valid: timeout_sec 0",
        ),
        (
            "retry_node",
            {"node_id": "a", "retry_policy": {"maxx": 1}},
            "unknown key 'maxx'; did you mean 'max'",
        ),
        (
            "decide",
            {"node_id": "a", "decision": "yes"},
            "decision is 'yes'; it must be 'approve' or 'reject'",
        ),
        ("satisfy", {"prerequisite": ""}, "prerequisite is ''; it must be a prerequisite, a text"),
        (
            "complete_node",
            {"node_id": "a", "metrics": [1]},
            "metrics is a list of 1 value; it must be an object",
        ),
        ("complete_node", {"node_id": "a", "batches": [{"metrics": {}}]}, "objects with a 'batch_uid'"),
        (
            "complete_node",
            {"node_id": "a", "batches": [{"batch_uid": "1"}, {"batch_uid": "1"}]},
            "that no other has",
        ),
    ],
)
def test_input_that_is_not_valid_is_rejected_by_field(name: str, given: Any, problem: str) -> None:
    with pytest.raises(ActionRejected) as caught:
        parse_action(name, given)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"$ref": "a", "$id": 1}, 'io.input_inline.key has the keys "$ref" and "$id"'),
        (2**63, "io.input_inline.key"),
    ],
)
def test_a_changed_input_that_mongodb_cannot_store_is_rejected(value: Any, problem: str) -> None:
    sample = Sample({"nodes": [node("a")]}, a=FAILED)
    with pytest.raises(ActionRejected) as caught:
        sample.plan(RetryNode(node_id="a", input_inline={"key": value}))
    assert f"the changed input of node 'a': {problem}" in str(caught.value)


def test_null_means_that_a_field_is_not_given() -> None:
    given = {"node_id": "a", "input_inline": None, "if_revision": None, "reason": None}
    assert parse_action("retry_node", given) == RetryNode(node_id="a")


def test_retry_changes_single_keys_of_the_input_and_of_the_policy() -> None:
    raw = {"nodes": [node("a", io={"input_inline": {"limit": 10, "old": 1, "kept": [1]}})]}
    given = {"limit": {"$cel": "params.n"}, "old": None}
    parsed = parse_action(
        "retry_node",
        {"node_id": "a", "input_inline": {"limit": {"$cel": "params.n"}}, "retry_policy": {"max": 9}},
    )
    assert isinstance(parsed, RetryNode)
    planned = Sample(raw, a=FAILED).plan(replace(parsed, input_inline=given, timeout_sec=7.0))
    assert planned.changed is not None
    assert planned.changed.io.input_inline == {"limit": {"$cel": "params.n"}, "kept": [1]}
    assert planned.changed.expressions == (("io.input_inline.limit", "params.n"),)
    assert (planned.changed.retry_policy.max, planned.changed.timeout_sec) == (9, 7.0)
    assert with_changes(parse_graph(raw).nodes[0], changes_of(planned.changed)) == planned.changed


def test_decision_ends_an_approval_that_waits() -> None:
    sample = Sample(a=DEFERRED)
    sample.nodes[0] = replace(sample.nodes[0], approval=Approval(text="?"))  # type: ignore[index]
    planned = sample.plan(Decide(node_id="a", decision="reject", comment="no", by="ada"))
    assert planned.end == NodeEnd(index=0, status=FAILED, failure=("rejected", "rejected by ada: no"))
    assert [(each.from_, each.to) for each in planned.changes] == [("waiting", "failed")]
    assert planned.resets == ()
    approved = sample.plan(Decide(node_id="a", decision="approve", comment="fine", by="ada"))
    assert approved.end == NodeEnd(index=0, status=FINISHED)


def test_a_plan_says_how_a_node_ends_in_its_new_generation() -> None:
    sample = Sample(a=FAILED)
    failed = Sample(a=FINISHED).plan(FailNode(node_id="a", by="ada"))
    assert failed.end == NodeEnd(index=0, status=FAILED, failure=("failed_by_user", "failed by ada"))
    completed = sample.plan(CompleteNode(node_id="a", metrics={"rows": 2}))
    assert completed.end == NodeEnd(index=0, status=FINISHED, outcome=NodeOutcome(metrics={"rows": 2}))
    assert sample.plan(SkipNode(node_id="a")).end == NodeEnd(index=0, status=SKIPPED)


def test_satisfy_names_nodes_that_lack_others() -> None:
    sample = Sample()
    sample.nodes[0] = replace(sample.nodes[0], prerequisites=("x", "y"))  # type: ignore[index]
    sample.nodes[1] = replace(sample.nodes[1], prerequisites=("x",))  # type: ignore[index]
    assert sample.changes(Satisfy(prerequisite="x")) == {
        "a": ("waiting", "waiting"),
        "b": ("waiting", "queued"),
    }
    assert sample.plan(Satisfy(prerequisite="x")).notes == ("nodes that wait for further prerequisites: a",)
    with pytest.raises(ActionRejected, match="is satisfied already"):
        sample.plan(Satisfy(prerequisite="x"), satisfied=["x"])


# --- the scheduler ----------------------------------------------------------------------------------------------


def scheduler_of(sample: Sample) -> Scheduler:
    found = Scheduler(sample.graph, sample.states)
    found.pop_ready()
    return found


def reset(scheduler: Scheduler, planned: Plan, active: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """Do what the workflow does with a plan, as if the reset took no time."""
    scheduler.renew(planned.resets)
    scheduler.unblock(planned.unblocks)
    scheduler.rebuild(active)


def test_a_new_generation_starts_when_its_gate_is_open_and_its_descendants_wait() -> None:
    sample = Sample(**ALL)
    scheduler = scheduler_of(sample)
    assert scheduler.done
    reset(scheduler, sample.plan(RetryNode(node_id="a")))
    assert not scheduler.done
    assert [sample.nodes[index].node_id for index in scheduler.pop_ready()] == ["a", "any_pull", "sum"]
    state = scheduler.states[sample.index["a"]]
    assert (state.status, state.generation, state.epoch, state.first_epoch) == (QUEUED, 1, 1, 1)
    scheduler.end(sample.index["a"], FINISHED)
    assert scheduler.pop_ready() == [sample.index["b"]]
    assert scheduler.states[sample.index["fix"]].skip_reason is SkipReason.ROUTING


def test_a_retried_failure_no_longer_stops_the_task() -> None:
    sample = Sample({"nodes": [node("a"), node("b")], "on_node_failure": "continue"}, a=FAILED, b=RUNNING)
    scheduler = scheduler_of(sample)
    assert scheduler.failures
    reset(scheduler, sample.plan(RetryNode(node_id="a")), active={1})
    assert not scheduler.failures
    assert scheduler.pop_ready() == [0]


def test_what_was_decided_about_a_node_is_decided_again_when_its_gate_is() -> None:
    scheduler = scheduler_of(Sample())
    state = scheduler.states[1]
    state.condition, state.edges, state.evaluated, state.deadline_at = True, {0: True}, True, 5.0
    scheduler.unblock([1])
    assert state == NodeState()


def test_a_node_whose_reset_is_in_progress_neither_starts_nor_is_skipped() -> None:
    sample = Sample(
        {"nodes": [node("a"), node("b"), node("c", depends_on=["a", "b"])]}, a=FINISHED, b=RUNNING
    )
    scheduler = scheduler_of(sample)
    scheduler.resetting.add(2)
    scheduler.rebuild({1})
    scheduler.end(1, NodeStatus.CANCELLED)
    assert scheduler.states[2].status is QUEUED
    scheduler.resetting.clear()
    scheduler.rebuild()
    assert scheduler.states[2].status is SKIPPED


def test_a_node_that_any_parent_started_continues_although_its_gate_closes() -> None:
    raw = {"nodes": [node("a", allow_failure=True), node("c", depends_on=["a"], fan_in="any")]}
    sample = Sample(raw, a=FINISHED, c=RUNNING)
    scheduler = scheduler_of(sample)
    planned = sample.plan(RetryNode(node_id="a"))
    assert planned.resets == (0,)
    reset(scheduler, planned, active={1})
    scheduler.end(0, FAILED)
    assert scheduler.states[1].status is RUNNING
    assert Scheduler(sample.graph, sample.states).pop_ready() == [1]


def test_conditions_of_a_reset_node_are_due_again_when_the_reset_is_over() -> None:
    raw = {
        "nodes": [node("a"), node("b", depends_on=["a"])],
        "edges_ex": [{"from": "a", "to": "b", "when": "vars.x == 1"}],
    }
    sample = Sample(raw, a=FINISHED, b=NodeState(status=FAILED, reason_code="bad_condition"))
    scheduler = scheduler_of(sample)
    scheduler.resetting.add(1)
    reset(scheduler, sample.plan(RetryNode(node_id="b")))
    assert scheduler.pop_due() == []
    scheduler.resetting.clear()
    scheduler.rebuild()
    assert scheduler.pop_due() == [DueCondition(1, 0)]


def test_a_held_condition_waits_for_a_decision() -> None:
    raw = {"nodes": [node("a", when="vars.x == 1")]}
    sample = Sample(raw)
    sample.nodes[0] = replace(sample.nodes[0], hold_sec=5.0)  # type: ignore[index]
    scheduler = Scheduler(sample.graph, sample.states)
    assert scheduler.any_due
    scheduler.pop_due()
    scheduler.fail([0])
    assert (scheduler.pop_ready(), scheduler.states[0].held_until) == ([0], HOLD)


def test_finish_running_starts_nothing_new_and_stops_when_all_that_started_have_ended() -> None:
    raw = {"nodes": [node("a"), node("b"), node("c", depends_on=["b"])], "on_node_failure": "finish_running"}
    sample = Sample(raw, a=RUNNING, b=RUNNING)
    scheduler = scheduler_of(sample)
    scheduler.end(0, FAILED)
    assert (scheduler.finishes_running, scheduler.must_stop) == (True, False)
    scheduler.end(1, FINISHED)
    assert scheduler.pop_ready() == []
    assert scheduler.must_stop


FINISHING = {"on_node_failure": "finish_running"}
DELAY = {"type": "delay", "io": {"input_inline": {"sec": 60}}}


@pytest.mark.parametrize(
    ("fields", "state", "waits"),
    [
        ({}, NodeState(status=RUNNING, epoch=1), True),
        ({}, NodeState(status=NodeStatus.CANCELLING, epoch=1), True),
        ({}, NodeState(status=DEFERRED, epoch=1, next_retry_at=60.0), True),
        ({}, NodeState(wait=for_slot("r", "2 of 2")), False),
        ({"type": "approval"}, NodeState(status=DEFERRED), False),
        (DELAY, NodeState(status=DEFERRED, next_retry_at=60.0), False),
    ],
    ids=["running", "cancelling", "backoff", "slot", "approval", "delay"],
)
def test_finish_running_waits_for_attempts_and_retries_and_not_for_people_and_times(
    fields: dict[str, Any], state: NodeState, waits: bool
) -> None:
    sample = Sample({"nodes": [node("a"), {**node("b"), **fields}], **FINISHING}, a=RUNNING, b=state)
    scheduler = scheduler_of(sample)
    scheduler.end(0, FAILED)
    assert scheduler.must_stop is not waits


def test_finish_running_does_not_wait_for_a_paused_node_without_an_attempt() -> None:
    sample = Sample({"nodes": [node("a"), node("b")], **FINISHING}, a=RUNNING, b=RUNNING)
    scheduler = scheduler_of(sample)
    scheduler.pauses.change([PausedScope(scope="node:b", since=0.0)], ())
    scheduler.end(0, FAILED)
    assert not scheduler.must_stop
    scheduler.states[1].status = DEFERRED
    assert scheduler.must_stop


def test_finish_running_fails_a_held_node_with_its_own_error_and_holds_no_other() -> None:
    held = NodeState(status=DEFERRED, epoch=1, held_until=60.0, reason_code="boom", last_error="boom: no")
    nodes = [node("a"), node("b", hold_on_failure=True), node("c", depends_on=["b"]), node("d")]
    nodes[3]["hold_on_failure"] = True
    scheduler = scheduler_of(Sample({"nodes": nodes, **FINISHING}, a=RUNNING, b=held, d=RUNNING))
    assert scheduler.end_holds() == []
    assert scheduler.holds_failure(3)
    scheduler.end(0, FAILED)
    assert (scheduler.end_holds(), scheduler.end_holds()) == ([1], [])
    assert [(state.status, state.last_error) for state in scheduler.states[1:3]] == [
        (FAILED, "boom: no"),
        (SKIPPED, None),
    ]
    assert {1, 2} <= scheduler.changed
    assert not scheduler.holds_failure(3)


@pytest.mark.parametrize(
    ("action", "way"),
    [
        (RetryNode(node_id="b", interrupt=True), "b would not start again, because a failed"),
        (CompleteNode(node_id="done"), "after would not start again, because a failed"),
        (RetryNode(node_id="a"), None),
        (CompleteNode(node_id="b", interrupt=True), None),
        (SkipNode(node_id="done"), "after would not start again, because a failed"),
        (CompleteNode(node_id="a"), None),
    ],
)
def test_finish_running_refuses_to_reset_nodes_that_would_not_start_again(
    action: Action, way: str | None
) -> None:
    nodes = [node("a"), node("b"), node("done"), node("after", depends_on=["done"])]
    nodes.append(node("below", depends_on=["a"]))
    task = Sample(
        {"nodes": nodes, **FINISHING}, a=FAILED, b=RUNNING, done=FINISHED, after=FINISHED, below=SKIPPED
    )
    stoppers = Scheduler(task.graph, task.states).stoppers
    assert stoppers == [0]
    if way is None:
        task.plan(action, stoppers=stoppers)
        return
    with pytest.raises(ActionRejected, match=way):
        task.plan(action, stoppers=stoppers)


def test_finish_running_waits_for_the_source_of_a_node_that_has_yielded_and_not_for_the_node() -> None:
    yielded = NodeState(status=DEFERRED, epoch=1, reason_code="yielded", next_retry_at=30.0)
    follower = node("f", depends_on=["s"], io={"start_when": "first_batch", **pull("s")})
    raw = {"nodes": [node("a"), node("s"), follower], **FINISHING}
    scheduler = scheduler_of(Sample(raw, a=RUNNING, s=RUNNING, f=yielded))
    scheduler.end(0, FAILED)
    assert not scheduler.must_stop
    scheduler.states[1].status = QUEUED
    assert scheduler.must_stop
    scheduler.states[1].status = RUNNING
    scheduler.end(1, FINISHED)
    assert not scheduler.must_stop, "the node processes the rest of what its source has stored"


def test_prerequisites_hold_a_node_whose_gate_is_open() -> None:
    sample = Sample({"nodes": [node("a"), node("b", depends_on=["a"])]})
    for index in (0, 1):
        sample.nodes[index] = replace(sample.nodes[index], prerequisites=("x", "y")[: index + 1])  # type: ignore[index]
    scheduler = Scheduler(sample.graph, sample.states)
    assert scheduler.pop_ready() == []
    scheduler.satisfy("x")
    assert scheduler.pop_ready() == [0]
    scheduler.end(0, FINISHED)
    assert (scheduler.pop_ready(), scheduler.missing_prerequisites(1)) == ([], ["y"])
    scheduler.satisfy("y")
    assert scheduler.pop_ready() == [1]


STREAM: dict[str, Any] = {
    "nodes": [
        node("p"),
        node("s", depends_on=["p"]),
        node("c", depends_on=["s"], io={**pull("s"), "start_when": "first_batch"}),
    ]
}


def given_up(**given: Any) -> tuple[Sample, Scheduler]:
    """Return a scheduler in which the node `s`, which `c` follows, runs its first attempt, which an action gives up."""
    sample = Sample(STREAM, p=FINISHED, s=NodeState(status=RUNNING, epoch=1, **given))
    scheduler = Scheduler(sample.graph, sample.states)
    scheduler.pop_ready()
    scheduler.resetting.add(sample.index["s"])
    scheduler.rebuild({sample.index["s"]})
    return sample, scheduler


def test_first_batch_of_an_attempt_that_is_given_up_opens_no_gate() -> None:
    sample, scheduler = given_up()
    assert not scheduler.accept_batch(FirstBatch(node_id="s", run_id="r", epoch=1))
    assert not sample.states[sample.index["s"]].streamed
    assert scheduler.pop_ready() == []


def test_first_batch_that_came_before_its_attempt_was_given_up_opens_no_gate_any_more() -> None:
    _, scheduler = given_up(streamed=True)
    assert scheduler.pop_ready() == []


def test_end_of_an_attempt_that_is_given_up_does_not_count() -> None:
    sample, scheduler = given_up()
    scheduler.end(sample.index["s"], FAILED)
    assert [state.status for state in sample.states] == [FINISHED, RUNNING, QUEUED]
    assert scheduler.hard_failure is None


@pytest.mark.parametrize("status", [FINISHED, FAILED, SKIPPED])
@pytest.mark.parametrize("parent", [FAILED, NodeState(status=SKIPPED, skip_reason=SkipReason.CONDITION)])
def test_a_person_ends_a_node_whatever_its_gate_says(status: NodeStatus, parent: Any) -> None:
    raw = {"nodes": [node("a", allow_failure=True), node("b", depends_on=["a"]), node("c", depends_on=["b"])]}
    sample = Sample(raw, a=parent)
    scheduler = Scheduler(sample.graph, sample.states)
    assert sample.states[1].status is SKIPPED
    scheduler.renew([1, 2])
    scheduler.end_as_decided({1: status}, set())
    assert sample.states[1].status is status
    assert sample.states[1].skip_reason is (SkipReason.USER if status is SKIPPED else None)
    assert scheduler.pop_ready() == ([2] if status is FINISHED else [])


def test_a_person_completes_a_streaming_node_although_its_parents_have_failed() -> None:
    sample = Sample(STREAM, p=FINISHED, s=FAILED, c=NodeState(status=DEFERRED, held_until=9.0, epoch=1))
    scheduler = Scheduler(sample.graph, sample.states)
    scheduler.renew([sample.index["c"]])
    scheduler.end_as_decided({sample.index["c"]: FINISHED}, set())
    assert sample.states[sample.index["c"]].status is FINISHED
