"""The rules of `retry_batches` and `skip_batches`, and what a rerun of failed batches keeps."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.graphs import node
from tests.unit.test_generations import HELD, Sample

from flowkit.actions.plans import SetAside
from flowkit.actions.records import Action, RetryBatches, SkipBatches
from flowkit.actions.reruns import check_keeps, plan_rerun
from flowkit.actions.table import parse_action
from flowkit.errors import ActionRejected
from flowkit.models import NodeState, NodeStatus
from flowkit.workflows.scheduling.scheduler import Scheduler

FINISHED, RUNNING = NodeStatus.FINISHED, NodeStatus.RUNNING
GRAPH: dict[str, Any] = {
    "nodes": [
        node("a"),
        node("p", depends_on=["a"], on_batch_failure={}),
        node("child", depends_on=["p"]),
    ]
}
TWO = NodeState(status=FINISHED, epoch=4, first_epoch=2, generation=1, failed_batches=2, evaluated=True)


def sample(**given: Any) -> Sample:
    return Sample(GRAPH, **given)


def test_a_retry_keeps_the_generation_of_the_node_and_resets_what_depends_on_it() -> None:
    task = sample(a=FINISHED, p=TWO, child=FINISHED)
    planned = task.plan(RetryBatches(node_id="p", batch_uids=("b1",)))
    assert (planned.resets, planned.kept, planned.what) == ((1, 2), frozenset({1}), "p: b1")
    assert planned.batches == (SetAside(index=1, batch_uids=("b1",)),)
    scheduler = Scheduler(task.graph, task.states)
    scheduler.renew(planned.resets, planned.kept)
    kept, child = scheduler.states[1], scheduler.states[2]
    assert (kept.status, kept.epoch, kept.first_epoch, kept.generation) == (NodeStatus.QUEUED, 4, 2, 1)
    assert kept.kept and not kept.evaluated
    assert (child.generation, child.first_epoch) == (1, 1)


def test_a_skip_of_batches_starts_only_a_node_again_that_has_not_finished() -> None:
    finished = sample(a=FINISHED, p=TWO, child=FINISHED).plan(SkipBatches(node_id="p"))
    assert (finished.resets, finished.batches) == ((), (SetAside(index=1, skips=True),))
    held = sample(a=FINISHED, p=HELD).plan(SkipBatches(node_id="p"))
    assert (held.resets, held.kept, held.what) == ((1,), frozenset({1}), "p: all batches that are set aside")


def test_skipped_batches_can_be_tried_again_by_name() -> None:
    none_left = NodeState(status=FINISHED, epoch=1)
    task = sample(a=FINISHED, p=none_left, child=FINISHED)
    assert task.plan(RetryBatches(node_id="p", batch_uids=("b1",))).resets == (1, 2)


@pytest.mark.parametrize(
    ("action", "given", "problem"),
    [
        (RetryBatches(node_id="a"), {"a": FINISHED}, "node 'a' sets no batches aside, because it has no"),
        (RetryBatches(node_id="p"), {"p": RUNNING}, "node 'p' is running; retry_batches is for a node that"),
        (SkipBatches(node_id="p"), {}, "node 'p' is queued; skip_batches is for a node that has finished"),
        (SkipBatches(node_id="p"), {"p": FINISHED}, "node 'p' has set no batch aside that is not skipped"),
        (RetryBatches(node_id="p"), {"p": TWO, "child": RUNNING}, "child depends on node 'p' and runs"),
    ],
)
def test_an_action_that_does_not_fit_is_rejected(action: Action, given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ActionRejected) as caught:
        sample(**given).plan(action)
    assert problem in str(caught.value)


@pytest.mark.parametrize("uids", ["b1", [""], [7], ["b"] * 10_001, ["x" * 600]])
def test_batch_uids_must_be_a_list_of_uids(uids: object) -> None:
    with pytest.raises(
        ActionRejected, match=r"retry_batches: batch_uids is .*; it must be a list of at most"
    ):
        parse_action("retry_batches", {"node_id": "p", "batch_uids": uids})


def test_a_rerun_keeps_the_batches_of_the_nodes_that_it_names() -> None:
    task = sample(a=FINISHED, p=TWO, child=FINISHED)
    planned = plan_rerun(["p"], task.nodes, task.states, keeps=["p"])
    assert (planned.resets, planned.kept) == ((1, 2), frozenset({1}))
    check_keeps(planned, task.nodes, task.states)


def test_a_rerun_that_makes_the_inputs_of_a_node_anew_keeps_no_batches_of_the_node() -> None:
    task = sample(a=FINISHED, p=TWO, child=FINISHED)
    planned = plan_rerun(["a", "p"], task.nodes, task.states, keeps=["p"])
    with pytest.raises(ActionRejected, match="node 'p' cannot keep its batches, because it depends on a"):
        check_keeps(planned, task.nodes, task.states)


def test_a_node_that_waits_to_try_its_batches_again_does_not_keep_them_when_its_parent_starts_over() -> None:
    waiting = NodeState(epoch=4, first_epoch=2, generation=1, kept=True)
    task = sample(a=FINISHED, p=waiting)
    assert task.resets("a") == ({"a", "p"}, {"child"})
