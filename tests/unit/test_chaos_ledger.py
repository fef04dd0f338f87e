"""What the chaos test concludes from the actions on a task: it accepts what may be, and reports planted errors."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from tests.integration.chaos import typed
from tests.integration.chaos.handlers import Planned
from tests.integration.chaos.ledger import ledger_of
from tests.integration.chaos.model import FAILED, FINISHED, SKIPPED, NodeEnd, Row, task_end
from tests.integration.chaos.operated import NativeOperatedDrawing
from tests.integration.chaos.operated_verify import OperatedComparison, natural_ends
from tests.integration.chaos.operators import WEIGHTS, Request, draw_request
from tests.integration.chaos.plans import APPROVAL, DELAY, DIE, ROLES, TOUCH, Call, NodePlan, TaskPlan
from tests.integration.chaos.tasks import drawn_task, node_plan, operated_task
from tests.integration.chaos.verify import read_stored
from tests.unit.test_chaos_model import node, task

from flowkit.graph.submission import validate_input
from flowkit.testing import memory_database, run_graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.chaos.verify import Stored

SEED = 1
PLAN = task(node("a"), node("b", parents=("a",), sources=("a",)), node("c", prerequisites=("legal",)))


def sent(number: int, name: str, *affected: tuple[str, str], revision: int = 1, **given: Any) -> Request:
    """Return an accepted request that affects these nodes, by their next state."""
    tag = f"t/{number}"
    listed = [{"node_id": node_id, "from": "queued", "to": to} for node_id, to in affected]
    answer = {"revision": revision, "affected": listed, "notes": []}
    return Request(tag=tag, name=name, given={**given, "reason": tag}, answers=[answer])


def audit_of(*requests: Request) -> dict[str, Any]:
    """Return the part of a task document about these actions, applied in this order."""
    entries = [
        {
            "revision": number,
            "action": each.name,
            "reason": each.tag,
            "what": each.given.get("node_id", ""),
            "affected": 1,
        }
        for number, each in enumerate(requests, start=1)
    ]
    return {"coordinator": {"actions": entries, "revision": len(entries)}}


SKIP = sent(0, "skip_node", ("a", "skipped"), ("b", "queued"), node_id="a")
FAIL_BELOW = sent(1, "fail_node", ("b", "failed"), node_id="b", revision=2)
RETRY = sent(2, "retry_node", ("a", "queued"), ("b", "queued"), node_id="a", revision=3)


def test_latest_action_on_a_node_or_on_one_above_it_decides() -> None:
    found = ledger_of(PLAN, [SKIP, FAIL_BELOW], audit_of(SKIP, FAIL_BELOW))
    assert {name: each.status for name, each in found.decided.items()} == {"a": SKIPPED, "b": FAILED}
    found = ledger_of(PLAN, [SKIP, FAIL_BELOW, RETRY], audit_of(SKIP, FAIL_BELOW, RETRY))
    assert (found.decided, found.unsure, found.problems) == ({}, set(), [])


def test_action_without_an_answer_leaves_open_what_it_has_started_again() -> None:
    lost = Request(tag=RETRY.tag, name=RETRY.name, given=RETRY.given, unknown=["deadline exceeded"])
    found = ledger_of(PLAN, [SKIP, FAIL_BELOW, lost], audit_of(SKIP, FAIL_BELOW, lost))
    assert ({*found.decided}, found.unsure, found.problems) == ({"b"}, {"b"}, [])
    assert ledger_of(PLAN, [SKIP, FAIL_BELOW, lost], audit_of(SKIP, FAIL_BELOW)).problems == []


def test_skipped_batches_are_forgotten_with_their_generation_only() -> None:
    plan = task(node("a", aside=("b0", "b1")))
    skip = sent(0, "skip_batches", ("a", "finished"), node_id="a")
    again = sent(1, "retry_batches", ("a", "queued"), node_id="a", batch_uids=["b1"], revision=2)
    retry = sent(2, "retry_node", ("a", "queued"), node_id="a", revision=3)
    assert ledger_of(plan, [skip], audit_of(skip)).skipped == {"a": {"b0", "b1"}}
    assert ledger_of(plan, [skip, again], audit_of(skip, again)).skipped == {"a": {"b0"}}
    assert ledger_of(plan, [skip, again, retry], audit_of(skip, again, retry)).skipped == {}


def test_only_batches_of_a_finished_node_are_all_skipped_for_sure() -> None:
    plan = task(node("a", aside=("b0", "b1")))
    skip = sent(0, "skip_batches", ("a", "queued"), node_id="a")
    retry = sent(1, "retry_node", ("a", "queued"), node_id="a", revision=2)
    found = ledger_of(plan, [skip], audit_of(skip))
    assert (found.skipped, found.may_skip) == ({"a": set()}, {"a"})
    assert ledger_of(plan, [skip, retry], audit_of(skip, retry)).may_skip == set()


SATISFY = [sent(number, "satisfy", prerequisite="legal", revision=number + 1) for number in (0, 1)]
REFUSED = Request(tag="t/0", name="skip_node", given={"node_id": "a"}, refusals=["it is running"])
WRONG = sent(0, "retry_batches", ("a", "queued"), node_id="a", batch_uids=["no such batch"])
WRONG.wrong = True


@pytest.mark.parametrize(
    ("requests", "document"),
    [
        pytest.param([SKIP], audit_of(), id="accepted and lost"),
        pytest.param([SKIP], audit_of(SKIP, SKIP), id="applied twice"),
        pytest.param([SKIP], audit_of(SKIP, FAIL_BELOW), id="sent by nobody"),
        pytest.param([REFUSED], audit_of(REFUSED), id="refused and applied"),
        pytest.param([FAIL_BELOW], audit_of(FAIL_BELOW), id="another revision"),
        pytest.param([WRONG], audit_of(WRONG), id="a batch that does not exist"),
        pytest.param(SATISFY, audit_of(*SATISFY), id="satisfied twice"),
        pytest.param(
            [SKIP], {"coordinator": audit_of(SKIP)["coordinator"] | {"revision": 2}}, id="audit too short"
        ),
    ],
)
def test_differences_between_requests_and_audit_are_reported(
    requests: list[Request], document: dict[str, Any]
) -> None:
    assert ledger_of(PLAN, requests, document).problems != []


def test_nodes_that_started_before_their_gate_would_close_may_stay() -> None:
    ends = {
        "a": NodeEnd(
            status=FAILED, rows={"b0": Row(items=(1,), origin="a")}, reasons=frozenset(["upstream_failed"])
        )
    }

    def statuses(**fields: Any) -> list[str]:
        child = node("b", parents=("a",), sources=("a",), **fields)
        return [each.status for each in natural_ends(child, ends, [])]

    assert statuses() == [SKIPPED]
    assert statuses(fan_in="any") == [SKIPPED, FINISHED]
    assert statuses(streams=("a",)) == [SKIPPED, FAILED, FINISHED]
    assert statuses(fan_in="all_done") == [FINISHED]


def test_operated_tasks_are_valid_and_have_every_feature() -> None:
    plans = [operated_task(SEED, number) for number in range(150)]
    nodes = [each for plan in plans for each in plan.nodes]
    for plan in plans:
        validate_input(
            plan.task_id, {"params": {}, "graph": plan.as_graph()}, external_roles=("indexer", "enricher")
        )
        assert [node_plan(each.node_id) for each in plan.nodes] == list(plan.nodes)
    assert {"", "hold", "finish_running"} <= {plan.on_failure for plan in plans}
    assert {"", APPROVAL, DELAY} == {each.kind for each in nodes}
    for has in (
        "prerequisites",
        "hold_sec",
        "aside",
        "mapped",
        "first_batch",
        "streams",
        "on_failure",
        "external",
    ):
        assert any(getattr(each, has) for each in nodes), has
    assert {1, 2, 3, 5} <= {each.parallel for each in nodes}
    assert {"block", "fork", DIE} <= {each.mischief for each in nodes}


def test_operators_send_every_action_with_and_without_interrupt() -> None:
    chance, plans = random.Random(SEED), [operated_task(SEED, number) for number in range(60)]
    drawn = [draw_request(chance, plan, "t/0", {}) for plan in plans for _ in range(10)]
    assert {each.name for each in drawn} == WEIGHTS.keys()
    assert {each.given.get("interrupt") for each in drawn} == {None, True, False}
    assert {each.wrong for each in drawn} == {True, False}


@cache
def quiet_plan() -> TaskPlan:
    """Return a task in which nothing waits, and a finished node pulls unchanged batches from another one."""
    for number in range(2_000):
        drawn = drawn_task(SEED, number, NativeOperatedDrawing)
        plan = replace(
            drawn, nodes=tuple(replace(each, prerequisites=(), hold_sec=0.0) for each in drawn.nodes)
        )
        waits = any(each.kind or _touches(each) for each in plan.nodes)
        if not waits and plan.continues and _reading(plan, task_end(plan).nodes):
            return plan
    raise AssertionError("no such task")


def _touches(node: NodePlan) -> bool:
    return node.call is not None and node.call.fn == TOUCH


def _reading(plan: TaskPlan, ends: Any) -> list[NodePlan]:
    return [
        each
        for each in plan.nodes
        if each.sources
        and not each.chunk
        and ends[each.node_id].status == FINISHED
        and ends[each.node_id].rows
        and all(ends[source].status == FINISHED for source in each.sources)
    ]


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let typed handlers work at once, and leave this process alone."""
    monkeypatch.setattr(typed, "PACE", 0)
    monkeypatch.setattr(typed, "BEHAVES", True)


async def ran() -> Stored:
    """Run this task without servers and return what it stored."""
    db = memory_database()
    run = await run_graph(
        quiet_plan().as_graph(), *(Planned(role, pace=0, behaves=True) for role in ROLES), *typed.TYPED, db=db
    )
    return await read_stored(db, run.task_id)


def problems(found: Stored, *requests: Request) -> list[str]:
    """Compare the task, after these actions."""
    changed = copy.deepcopy(found)
    changed.document["coordinator"] |= audit_of(*requests)["coordinator"]
    return OperatedComparison(quiet_plan(), changed, requests).problems()


def reader() -> NodePlan:
    """Return the node that pulls."""
    plan = quiet_plan()
    return _reading(plan, task_end(plan).nodes)[0]


def partials(found: Stored, node_id: str) -> list[dict[str, Any]]:
    """Return the batches of a node."""
    return [row for row in found.artifacts if row["node_id"] == node_id and row["status"] == "partial"]


def forget_a_batch(found: Stored) -> None:
    """Lose a batch of the node that pulls."""
    found.artifacts.remove(partials(found, reader().node_id)[0])


def keep_a_stale_batch(found: Stored) -> None:
    """Let the node hold a batch that it has read before its source started again."""
    partials(found, reader().node_id)[0]["meta"]["read"]["epoch"] = 0


def double_a_batch(found: Stored) -> None:
    """Store a batch twice."""
    found.artifacts.append(partials(found, reader().node_id)[0])


def use_another_input(found: Stored) -> None:
    """Make a batch of the input that a node had before."""
    partials(found, reader().node_id)[0]["meta"]["mark"] = "t/7"


def stay_paused(found: Stored) -> None:
    """Keep a pause that nobody has asked for."""
    found.document["coordinator"]["paused"] = [{"scope": "task"}]


def fail_the_reader(found: Stored) -> None:
    """Show a node as failed that nothing has failed."""
    entry = next(each for each in found.document["graph"]["nodes"] if each["node_id"] == reader().node_id)
    entry |= {"status": FAILED, "last_error": "failed_by_user: failed: t/7"}


@pytest.mark.parametrize(
    "corrupt",
    [
        forget_a_batch,
        keep_a_stale_batch,
        double_a_batch,
        use_another_input,
        stay_paused,
        fail_the_reader,
    ],
)
async def test_corrupted_data_of_an_operated_task_is_reported(corrupt: Callable[[Stored], None]) -> None:
    found = await ran()
    assert problems(found) == []
    corrupt(found)
    assert problems(found) != []


@pytest.mark.parametrize("name", ["skip_node", "complete_node", "fail_node"])
async def test_accepted_end_of_a_node_without_effect_is_reported(name: str) -> None:
    given: dict[str, Any] = {"metrics": {"tag": "t/0"}, "batches": []} if name == "complete_node" else {}
    request = sent(0, name, (reader().node_id, "ended"), node_id=reader().node_id, **given)
    assert any(request.tag in each for each in problems(await ran(), request))


async def test_end_of_a_node_by_an_action_holds_the_given_results() -> None:
    found, name = await ran(), reader().node_id
    batch = {"batch_uid": "by-hand", "metrics": {"items": [1, 2], "written_by": {"tag": "t/0"}}}
    request = sent(
        0, "complete_node", (name, "finished"), node_id=name, metrics={"tag": "t/0"}, batches=[batch]
    )
    final = {"node_id": name, "attempt_epoch": 9, "failed": False}
    found.metrics[:] = [
        *(row for row in found.metrics if row["node_id"] != name),
        {**final, "batch_uid": "by-hand", "metrics": batch["metrics"]},
        {**final, "batch_uid": "__final__", "metrics": {"tag": "t/0"}},
    ]
    found.artifacts[:] = [
        *(row for row in found.artifacts if row["node_id"] != name),
        {"node_id": name, "attempt_epoch": 9, "status": "partial", "batch_uid": "by-hand", "meta": {}},
        {"node_id": name, "attempt_epoch": 9, "status": "complete", "meta": {"tag": "t/0"}},
    ]
    about = f"node {name!r}"
    assert not any(about in each for each in problems(found, request))
    found.metrics[-2]["metrics"] = {"items": [3], "written_by": {"tag": "t/0"}}
    assert any(about in each for each in problems(found, request))


async def test_node_that_ran_without_its_prerequisite_is_reported() -> None:
    plan, found = quiet_plan(), await ran()
    comparison = OperatedComparison(plan, found, [])
    waiting = NodePlan(node_id="w", key="w", call=Call(fn="noop"), prerequisites=("legal",))
    entry = {"status": FINISHED, "attempt_epoch": 1}
    ran_without = comparison._undecided(waiting, NodeEnd(status=FINISHED), entry)
    assert any("ran without" in each for each in ran_without)
