"""The model of the random tasks: by examples, and against the very code of workers and engines without servers."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.integration.chaos.handlers import Planned, count, touching
from tests.integration.chaos.model import (
    FAILED,
    FINISHED,
    SKIPPED,
    NodeEnd,
    Row,
    chunk_uid,
    node_end,
    opens,
    pulled,
    qualified,
    task_end,
    variables,
)
from tests.integration.chaos.plans import (
    FINAL,
    ROLES,
    TOUCH,
    BatchPlan,
    Call,
    NodePlan,
    TaskPlan,
    Trouble,
    node_plan,
    task_plan,
)
from tests.integration.chaos.verify import Comparison, Left, left
from tests.unit.examples import examples

from flowkit.adapters.pull import stable_hash
from flowkit.testing import memory_database, run_graph
from flowkit.workflows.validation import parse_graph

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = 1
TASKS = examples(60)
TWO = (BatchPlan(uid="b0", items=(1, 2)), BatchPlan(uid="b1", items=(3,)))


def node(key: str, **fields: Any) -> NodePlan:
    """A node whose id is its key; it makes two batches unless it does something else."""
    made = {} if fields.keys() & {"sources", "call"} else {"batches": TWO}
    return NodePlan(node_id=key, key=key, **{"role": "reader", **made, **fields})


def task(*nodes: NodePlan, keeps_going: bool = True) -> TaskPlan:
    """A task of these nodes."""
    return TaskPlan(
        task_id="t",
        nodes=nodes,
        order=tuple(range(len(nodes))),
        keeps_going=keeps_going,
        cancel_after=None,
    )


def breaking(at: int, *, times: int | None = None, raises: bool = False, permanent: bool = False) -> Trouble:
    """A trouble in all attempts, unless it is one of the first `times`."""
    return Trouble(times=times, at=at, raises=raises, permanent=permanent)


def test_a_seed_gives_the_same_tasks_again_and_every_graph_is_valid() -> None:
    for number in range(200):
        plan = task_plan(SEED, number)
        assert task_plan.__wrapped__(SEED, number) == plan
        parse_graph(plan.as_graph())
        assert [node_plan(each.node_id) for each in plan.nodes] == list(plan.nodes)


def test_random_tasks_have_everything_that_the_test_is_about() -> None:
    plans = [task_plan(SEED, number) for number in range(60)]
    nodes = [each for plan in plans for each in plan.nodes]
    assert {"all", "any", "count:2"} <= {each.fan_in for each in nodes}
    called = {each.call.fn for each in nodes if each.call}
    assert {"vars.incr", "vars.set", "vars.merge", "metrics.aggregate", "merge.generic", TOUCH} <= called
    assert {each.role for each in nodes} == {"", *ROLES}
    assert {1, 2, 3} <= {len(each.sources) for each in nodes}
    assert {0, 2} <= {each.chunk for each in nodes if each.sources}
    troubles = [each.trouble for each in nodes if each.trouble]
    assert {None, 1, 2} <= {each.times for each in troubles}
    ends = [task_end(plan) for plan in plans]
    assert {(end.status, end.stops) for end in ends} == {(FINISHED, False), (FAILED, False), (FAILED, True)}
    shared = [set(above[a].rows) & set(above[b].rows) for above, a, b in _pairs_of_sources(plans)]
    assert any(shared), "no node pulls equal uids from two sources"


def _pairs_of_sources(plans: list[TaskPlan]) -> list[tuple[Any, str, str]]:
    return [
        (task_end(plan).nodes, each.sources[0], each.sources[1])
        for plan in plans
        for each in plan.nodes
        if len(each.sources) > 1
    ]


@pytest.mark.parametrize(
    ("fan_in", "parents", "expected"),
    [
        ("all", [], True),
        ("all", [FINISHED, FINISHED], True),
        ("all", [FINISHED, SKIPPED], False),
        ("any", [FAILED, FINISHED], True),
        ("any", [FAILED, SKIPPED], False),
        ("count:2", [FINISHED, FAILED, FINISHED], True),
        ("count:2", [FINISHED, FAILED, SKIPPED], False),
    ],
)
def test_gates_open_for_as_many_finished_parents_as_they_ask_for(
    fan_in: str, parents: list[str], expected: bool
) -> None:
    assert opens(fan_in, parents) is expected


def test_a_node_that_fails_for_good_keeps_the_batches_before_that_one() -> None:
    end = node_end(node("a", trouble=breaking(1)), {})
    assert (end.status, end.code, list(end.rows), end.failed_uid) == (FAILED, "flaky", ["b0"], "b1")
    end = node_end(node("a", trouble=breaking(FINAL, raises=True, permanent=True)), {})
    assert (end.status, end.code, list(end.rows), end.failed_uid) == (FAILED, "bad_input", ["b0", "b1"], None)
    assert node_end(node("a", trouble=breaking(1, times=2)), {}).status == FINISHED


def test_batches_of_several_sources_keep_apart_whatever_their_uids() -> None:
    sources = ("a", "b/@")
    assert qualified("b0", "a", sources) == "b0"
    assert qualified("b0", "b/@", sources) == "b0@b%2F%40"
    assert qualified("b0@x", "a", sources) == "b0%40x@a"
    assert qualified("b0@x", "b/@", ["b/@"]) == "b0@x"


def test_chunks_never_span_two_batches_and_have_uids_of_the_protocol() -> None:
    above = {"a": NodeEnd(status=FINISHED, rows={"b0": Row(items=(1, 2, 3), origin="a")})}
    chunks = dict(pulled(("a",), 2, above))
    assert [chunks[chunk_uid("a", "b0", number)].items for number in (0, 1)] == [(1, 2), (3,)]
    assert chunk_uid("a", "b0", 0) == stable_hash({"src": "a", "parent": "b0", "idx": 0})


def test_functions_have_their_effect_once_each_in_any_order() -> None:
    calls = [
        node("i", call=Call(fn="vars.incr", args={"key": "count.n", "by": 2})),
        node("j", call=Call(fn="vars.incr", args={"key": "count.n", "by": 3})),
        node("s", call=Call(fn="vars.set", args={"kv": {"marks.s": 1, "flags.s": {"on": True}}})),
        node("m", call=Call(fn="vars.merge", args={"data": {"marks": {"m": 2}}})),
    ]
    wanted = {"count": {"n": 5}, "marks": {"s": 1, "m": 2}, "flags": {"s": {"on": True}}}
    assert variables(calls) == variables(calls[::-1]) == wanted


def test_a_failure_that_somebody_minds_fails_the_task_and_stops_it_unless_it_keeps_going() -> None:
    bad = node("a", trouble=breaking(0))
    below = node("b", parents=("a",))
    end = task_end(task(bad, below))
    assert (end.status, end.stops, end.nodes["b"].skip_reason) == (FAILED, False, "upstream_failed")
    assert task_end(task(bad, below, keeps_going=False)).stops
    tolerated = node("a", trouble=breaking(0), allow_failure=True)
    end = task_end(task(tolerated, below))
    assert (end.status, end.handled_failures) == (FINISHED, ("a",))


async def ran(number: int, *, seed: int = SEED) -> tuple[TaskPlan, Left]:
    """A random task, run without servers, and what it has left behind."""
    plan, db = task_plan(seed, number), memory_database()
    handlers = [Planned(role, pace=0) for role in ROLES]
    functions = {TOUCH: touching(partial(count, db.touches), pace=0)}
    run = await run_graph(plan.as_graph(), *handlers, functions=functions, db=db)
    return plan, await left(db, run.task_id)


@pytest.mark.parametrize("number", range(TASKS))
async def test_what_workers_and_engines_do_without_servers_is_what_the_model_tells(number: int) -> None:
    assert Comparison(*await ran(number)).problems() == []


def metric(found: Left) -> dict[str, Any]:
    """A row of a batch."""
    return next(row for row in found.metrics if not row["failed"] and row["batch_uid"] != "__final__")


def forget_a_batch(found: Left) -> None:
    """A batch is missing."""
    found.metrics.remove(metric(found))


def double_a_batch(found: Left) -> None:
    """A batch counts twice."""
    found.metrics.append(metric(found))


def mix_epochs(found: Left) -> None:
    """A row holds what an earlier epoch has written."""
    metric(found)["metrics"]["written_by"]["epoch"] -= 1


def count_again(found: Left) -> None:
    """An increment counts twice."""
    found.document["coordinator"]["vars"]["count"]["n"] += 1


def leave_open(found: Left) -> None:
    """The document was not closed."""
    found.document["finished_at"] = None


def skip_a_node(found: Left) -> None:
    """A node that finished is shown as skipped."""
    entry = next(node for node in found.document["graph"]["nodes"] if node["status"] == FINISHED)
    entry |= {"status": SKIPPED, "skip_reason": "upstream_failed"}


def keep_a_marker(found: Left) -> None:
    """A marker of an earlier epoch is still there."""
    found.artifacts.append(next(row for row in found.artifacts if row["status"] == "complete"))


SPOILS = [
    forget_a_batch,
    double_a_batch,
    mix_epochs,
    count_again,
    leave_open,
    skip_a_node,
    keep_a_marker,
]


@pytest.mark.parametrize("spoil", SPOILS)
async def test_a_difference_is_noticed(spoil: Callable[[Left], None]) -> None:
    plan, found = await _with_increment()
    spoiled = copy.deepcopy(found)
    spoil(spoiled)
    assert Comparison(plan, found).problems() == []
    assert Comparison(plan, spoiled).problems() != []


async def _with_increment() -> tuple[TaskPlan, Left]:
    """A task that is not stopped and has an increment and batches."""
    for number in range(TASKS * 10):
        plan = task_plan(SEED, number)
        end = task_end(plan)
        calls = [each for each in plan.nodes if each.call and end.nodes[each.node_id].status == FINISHED]
        single = all(len(each.sources) < 2 for each in plan.nodes)
        if single and not end.stops and "count" in variables(calls) and end.nodes[plan.nodes[0].node_id].rows:
            return await ran(number)
    raise AssertionError("no such task")
