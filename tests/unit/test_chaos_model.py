"""The model of the random tasks, checked by examples and against workers and engines without servers."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.integration.chaos import typed
from tests.integration.chaos.handlers import Planned, count, touching
from tests.integration.chaos.model import (
    FAILED,
    FINISHED,
    SKIPPED,
    NodeEnd,
    Row,
    TaskEnd,
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
    INLINE_ROLES,
    ROLES,
    TOUCH,
    TYPED_ROLES,
    BatchPlan,
    Call,
    Drawing,
    MixedDrawing,
    NodePlan,
    PlannedFailure,
    TaskPlan,
)
from tests.integration.chaos.tasks import drawn_task, node_plan, task_plan
from tests.integration.chaos.verify import Comparison, Stored, read_stored

from flowkit.core.utils import stable_hash
from flowkit.graph.validation import parse_graph
from flowkit.testing import memory_database, run_graph

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = 1
TASKS = 16
TWO = (BatchPlan(uid="b0", items=(1, 2)), BatchPlan(uid="b1", items=(3,)))


def node(key: str, **fields: Any) -> NodePlan:
    """Return a node whose id is its key. Without sources and call, it makes two batches."""
    made = {} if fields.keys() & {"sources", "call"} else {"batches": TWO}
    return NodePlan(node_id=key, key=key, **{"role": "reader", **made, **fields})


def task(*nodes: NodePlan, continues: bool = True) -> TaskPlan:
    """Return a task of these nodes."""
    return TaskPlan(
        task_id="t",
        nodes=nodes,
        order=tuple(range(len(nodes))),
        continues=continues,
        cancel_after=None,
    )


def failing(
    at: int, *, times: int | None = None, raises: bool = False, permanent: bool = False
) -> PlannedFailure:
    """Return a failure of all attempts, or of the first `times`."""
    return PlannedFailure(times=times, at=at, raises=raises, permanent=permanent)


def native_plan(number: int) -> TaskPlan:
    """Return a task without external nodes."""
    return drawn_task(SEED, number, Drawing)


def mixed_plan(number: int) -> TaskPlan:
    """Return a task with nodes on external workers."""
    return drawn_task(SEED, number, MixedDrawing)


@pytest.mark.parametrize("plan_of", [native_plan, mixed_plan])
def test_same_seed_gives_the_same_tasks_and_every_graph_is_valid(plan_of: Callable[[int], TaskPlan]) -> None:
    for number in range(40):
        plan = plan_of(number)
        drawn_task.cache_clear()
        assert plan_of(number) == plan
        parse_graph(plan.as_graph())
        assert [node_plan(each.node_id) for each in plan.nodes] == list(plan.nodes)


def test_random_tasks_cover_every_feature() -> None:
    plans = [native_plan(number) for number in range(100)]
    nodes = [each for plan in plans for each in plan.nodes]
    assert {"all", "any", "all_done", "count:2"} <= {each.fan_in for each in nodes}
    called = {each.call.fn for each in nodes if each.call}
    assert {"vars.incr", "vars.set", "vars.merge", "metrics.aggregate", "merge.generic", TOUCH} <= called
    assert {each.role for each in nodes} == {"", *ROLES, *TYPED_ROLES}
    assert {1, 2, 3} <= {len(each.sources) for each in nodes}
    assert {0, 2} <= {each.chunk for each in nodes if each.sources}
    failures = [each.failure for each in nodes if each.failure]
    assert {None, 1, 2} <= {each.times for each in failures}
    ends = [task_end(plan) for plan in plans]
    assert {(end.status, end.stops) for end in ends} == {(FINISHED, False), (FAILED, False), (FAILED, True)}
    assert any(each.on_success for each in nodes)
    assert any(each.skip_reason == "routing" for end in ends for each in end.nodes.values())
    assert any(each.skip_reason == "condition" for end in ends for each in end.nodes.values())
    assert any(each.code == "bad_condition" for end in ends for each in end.nodes.values())
    assert any(map(_fails_together_with_a_parent, plans, ends))
    assert any(each.first_batch for each in nodes)
    assert any(each.streams for each in nodes)
    assert any(_remediated(plan, end) for plan, end in zip(plans, ends, strict=True))
    shared = [set(above[a].rows) & set(above[b].rows) for above, a, b in _pairs_of_sources(plans)]
    assert any(shared), "no node pulls equal uids from two sources"


def _fails_together_with_a_parent(plan: TaskPlan, end: TaskEnd) -> bool:
    """Return whether a node and one of its parents fail because of their conditions."""
    bad = {name for name, each in end.nodes.items() if each.code == "bad_condition"}
    return any(node.node_id in bad and bad.intersection(node.parents) for node in plan.nodes)


def _remediated(plan: TaskPlan, end: TaskEnd) -> bool:
    """Return whether a target handles a failure that the task does not tolerate otherwise."""
    handled = [each for each in plan.nodes if each.node_id in end.handled_failures]
    return any(each.on_failure and not each.allow_failure for each in handled)


def _pairs_of_sources(plans: list[TaskPlan]) -> list[tuple[Any, str, str]]:
    return [
        (task_end(plan).nodes, each.sources[0], each.sources[1])
        for plan in plans
        for each in plan.nodes
        if len(each.sources) > 1
    ]


def test_tasks_mix_native_inline_and_external_nodes() -> None:
    kinds = [{kind_of(each) for each in task_plan(SEED, number).nodes} for number in range(100)]
    assert {"function", "external", "native", "inline"} in kinds
    assert 40 <= sum("external" in each for each in kinds) <= 80


def test_sources_share_no_uid_that_an_external_worker_cannot_distinguish() -> None:
    for number in range(100):
        plan = mixed_plan(number)
        end = task_end(plan)
        for each in plan.nodes:
            uids = Counter(uid for source in each.sources for uid in end.nodes[source].rows)
            assert not each.external or each.chunk or max(uids.values(), default=1) == 1


def test_nodes_whose_finalize_always_fails_start_after_their_sources() -> None:
    nodes = [node for number in range(200) for node in mixed_plan(number).nodes]
    failing = [node for node in nodes if node.needs_all_sources]
    assert failing
    assert {(node.parents == node.sources, node.fan_in) for node in failing} == {(True, "all")}
    assert not any(node.first_batch or node.streams for node in failing)


def test_tasks_have_routes_conditions_and_streams_between_nodes_of_every_kind() -> None:
    routed: Counter[tuple[str, str]] = Counter()
    streamed: Counter[tuple[str, str]] = Counter()
    for number in range(400):
        nodes = {node.node_id: node for node in mixed_plan(number).nodes}
        for node in nodes.values():
            routed.update(
                (kind_of(node), kind_of(nodes[each])) for each in (*node.on_success, *node.on_failure)
            )
            above = node.parents if node.first_batch else node.streams
            streamed.update((kind_of(nodes[each]), kind_of(node)) for each in above)
    assert len(routed) == 16, routed
    workers = ("external", "native", "inline")
    assert {(above, below) for above in workers for below in workers} <= set(streamed), streamed


def test_tasks_pull_from_nodes_of_every_kind() -> None:
    kinds: Counter[tuple[bool, str]] = Counter()
    for number in range(100):
        nodes = {node.node_id: node for node in mixed_plan(number).nodes}
        pullers = [node for node in nodes.values() if node.external and node.sources]
        for node in pullers:
            kinds.update((bool(node.chunk), kind_of(nodes[source])) for source in node.sources)
    assert len(kinds) == 8, kinds


def kind_of(node: Any) -> str:
    """Return who runs a node."""
    if node.call:
        return "function"
    return "external" if node.external else "inline" if node.role in INLINE_ROLES else "native"


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
def test_gates_open_for_the_required_number_of_finished_parents(
    fan_in: str, parents: list[str], expected: bool
) -> None:
    assert opens(fan_in, parents) is expected


def test_a_permanently_failed_node_keeps_the_batches_before_the_failed_one() -> None:
    end = node_end(node("a", failure=failing(1)), {})
    assert (end.status, end.code, list(end.rows), end.failed_uid) == (FAILED, "flaky", ["b0"], "b1")
    end = node_end(node("a", failure=failing(FINAL, raises=True, permanent=True)), {})
    assert (end.status, end.code, list(end.rows), end.failed_uid) == (FAILED, "bad_input", ["b0", "b1"], None)
    assert node_end(node("a", failure=failing(1, times=2)), {}).status == FINISHED


def test_batches_of_several_sources_have_distinct_uids() -> None:
    sources = ("a", "b/@")
    assert qualified("b0", "a", sources) == "b0"
    assert qualified("b0", "b/@", sources) == "b0@b%2F%40"
    assert qualified("b0@x", "a", sources) == "b0%40x@a"
    assert qualified("b0@x", "b/@", ["b/@"]) == "b0@x"


def test_chunks_never_span_two_batches_and_use_the_uids_of_the_protocol() -> None:
    above = {"a": NodeEnd(status=FINISHED, rows={"b0": Row(items=(1, 2, 3), origin="a")})}
    chunks = dict(pulled(node("c", sources=("a",), chunk=2), above))
    assert [chunks[chunk_uid("a", "b0", number)].items for number in (0, 1)] == [(1, 2), (3,)]
    assert chunk_uid("a", "b0", 0) == stable_hash({"src": "a", "parent": "b0", "idx": 0})


def test_functions_take_effect_once_each_in_any_order() -> None:
    calls = [
        node("i", call=Call(fn="vars.incr", args={"key": "count.n", "by": 2})),
        node("j", call=Call(fn="vars.incr", args={"key": "count.n", "by": 3})),
        node("s", call=Call(fn="vars.set", args={"kv": {"marks.s": 1, "flags.s": {"on": True}}})),
        node("m", call=Call(fn="vars.merge", args={"data": {"marks": {"m": 2}}})),
    ]
    wanted = {"count": {"n": 5}, "marks": {"s": 1, "m": 2}, "flags": {"s": {"on": True}}}
    assert variables(calls) == variables(calls[::-1]) == wanted


def test_failure_that_is_not_allowed_fails_the_task_and_stops_it_unless_it_continues() -> None:
    bad = node("a", failure=failing(0))
    below = node("b", parents=("a",))
    end = task_end(task(bad, below))
    assert (end.status, end.stops, end.nodes["b"].skip_reason) == (FAILED, False, "upstream_failed")
    assert task_end(task(bad, below, continues=False)).stops
    tolerated = node("a", failure=failing(0), allow_failure=True)
    end = task_end(task(tolerated, below))
    assert (end.status, end.handled_failures) == (FINISHED, ("a",))


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let typed handlers work at once, and leave this process alone."""
    monkeypatch.setattr(typed, "PACE", 0)
    monkeypatch.setattr(typed, "BEHAVES", True)


async def ran(number: int) -> tuple[TaskPlan, Stored]:
    """Run a random task without servers and return what it stored."""
    plan, db = native_plan(number), memory_database()
    handlers = [*(Planned(role, pace=0, behaves=True) for role in ROLES), *typed.TYPED]
    functions = {TOUCH: touching(partial(count, db.touches), pace=0)}
    run = await run_graph(plan.as_graph(), *handlers, functions=functions, db=db)
    return plan, await read_stored(db, run.task_id)


@pytest.mark.slow
async def test_workers_and_engines_without_servers_match_the_model() -> None:
    for number in range(TASKS):
        assert Comparison(*await ran(number)).problems() == []


@pytest.mark.parametrize(
    ("entry", "claim", "counts"),
    [
        pytest.param({"attempt_epoch": 1}, {}, True, id="external, in its first generation"),
        pytest.param(
            {"attempt_epoch": 2, "first_epoch": 2}, {}, False, id="external, not run since the reset"
        ),
        pytest.param({"attempt_epoch": 3, "first_epoch": 2}, {}, True, id="external, run since the reset"),
        pytest.param({"attempt_epoch": 3, "first_epoch": 2}, {"attempt_epoch": 1}, False, id="native, late"),
        pytest.param(
            {"attempt_epoch": 3, "first_epoch": 2}, {"attempt_epoch": 3}, True, id="native, current"
        ),
    ],
)
async def test_late_claims_of_an_earlier_generation_do_not_count(
    entry: dict[str, Any], claim: dict[str, Any], counts: bool
) -> None:
    db = memory_database()
    await db.tasks.insert_one({"id": "t", "graph": {"nodes": [{"node_id": "b", **entry}]}})
    await db.stream_progress.insert_one(
        {"task_id": "t", "consumer_node": "b", "from_node": "a", "batch_uid": "b0", **claim}
    )
    assert len((await read_stored(db, "t")).claims) == counts


def metric(found: Stored) -> dict[str, Any]:
    """Return the metrics row of a batch."""
    return next(row for row in found.metrics if not row["failed"] and row["batch_uid"] != "__final__")


def forget_a_batch(found: Stored) -> None:
    """Remove a batch."""
    found.metrics.remove(metric(found))


def double_a_batch(found: Stored) -> None:
    """Count a batch twice."""
    found.metrics.append(metric(found))


def mix_epochs(found: Stored) -> None:
    """Give a row the values of an earlier epoch."""
    metric(found)["metrics"]["written_by"]["epoch"] -= 1


def count_again(found: Stored) -> None:
    """Count an increment twice."""
    found.document["coordinator"]["vars"]["count"]["n"] += 1


def leave_open(found: Stored) -> None:
    """Leave the document open."""
    found.document["finished_at"] = None


def skip_a_node(found: Stored) -> None:
    """Show a finished node as skipped."""
    entry = next(node for node in found.document["graph"]["nodes"] if node["status"] == FINISHED)
    entry |= {"status": SKIPPED, "skip_reason": "upstream_failed"}


def keep_a_marker(found: Stored) -> None:
    """Add a second complete marker."""
    found.artifacts.append(next(row for row in found.artifacts if row["status"] == "complete"))


CORRUPTIONS = [
    forget_a_batch,
    double_a_batch,
    mix_epochs,
    count_again,
    leave_open,
    skip_a_node,
    keep_a_marker,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
async def test_the_comparison_reports_corrupted_data(corrupt: Callable[[Stored], None]) -> None:
    plan, found = await _with_increment()
    corrupted = copy.deepcopy(found)
    corrupt(corrupted)
    assert Comparison(plan, found).problems() == []
    assert Comparison(plan, corrupted).problems() != []


async def _with_increment() -> tuple[TaskPlan, Stored]:
    """Run a task that is not stopped and has an increment and batches."""
    for number in range(TASKS * 15):
        plan = native_plan(number)
        end = task_end(plan)
        calls = [each for each in plan.nodes if each.call and end.nodes[each.node_id].status == FINISHED]
        single = all(len(each.sources) < 2 for each in plan.nodes)
        if single and not end.stops and "count" in variables(calls) and end.nodes[plan.nodes[0].node_id].rows:
            return await ran(number)
    raise AssertionError("no such task")
