"""The random tasks for external workers, and the check that no two workers run one node to the end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.integration.chaos.external.owners import Runs, is_abandoned
from tests.integration.chaos.external.plans import external_node_plan, external_task_plan, large_task_plan
from tests.integration.chaos.model import task_end

from flowkit.graph.validation import parse_graph

SEED = 1


@pytest.mark.parametrize("number", range(100))
def test_every_graph_is_valid_and_sources_share_no_uid_that_a_worker_cannot_distinguish(number: int) -> None:
    for plan in (external_task_plan(SEED, number), large_task_plan(SEED, number)):
        parse_graph(plan.as_graph())
        end = task_end(plan)
        for node in plan.nodes:
            assert external_node_plan(node.node_id) == node
            uids = Counter(uid for source in node.sources for uid in end.nodes[source].rows)
            assert not node.external or node.chunk or max(uids.values(), default=1) == 1


def test_nodes_whose_finalize_always_fails_start_after_their_sources() -> None:
    nodes = [node for number in range(200) for node in large_task_plan(SEED, number).nodes]
    failing = [node for node in nodes if node.needs_all_sources]
    assert failing
    assert {(node.parents == node.sources, node.fan_in) for node in failing} == {(True, "all")}
    assert not any(node.first_batch or node.streams for node in failing)


def test_tasks_have_routes_conditions_and_streams_between_nodes_of_every_kind() -> None:
    routed: Counter[tuple[str, str]] = Counter()
    streamed: Counter[tuple[str, str]] = Counter()
    for number in range(200):
        nodes = {node.node_id: node for node in external_task_plan(SEED, number).nodes}
        for node in nodes.values():
            routed.update(
                (kind_of(node), kind_of(nodes[each])) for each in (*node.on_success, *node.on_failure)
            )
            above = node.parents if node.first_batch else node.streams
            streamed.update((kind_of(nodes[each]), kind_of(node)) for each in above)
    assert len(routed) == 9, routed
    workers = ("external", "native")
    assert {(above, below) for above in workers for below in workers} <= set(streamed), streamed


def test_tasks_pull_from_nodes_of_every_kind() -> None:
    kinds: Counter[tuple[bool, str]] = Counter()
    for number in range(100):
        nodes = {node.node_id: node for node in external_task_plan(SEED, number).nodes}
        pullers = [node for node in nodes.values() if node.external and node.sources]
        for node in pullers:
            kinds.update((bool(node.chunk), kind_of(nodes[source])) for source in node.sources)
    assert len(kinds) == 6, kinds
    assert {len(large_task_plan(SEED, number).nodes) for number in range(20)} == {6}


def kind_of(node: Any) -> str:
    """Return who runs a node."""
    return "function" if node.call else "external" if node.external else "native"


def test_record_of_an_attempt_is_abandoned_if_its_bridge_has_died() -> None:
    owned = {"owner": "flowkit-bridge-some-host-41-a1b2c3"}
    assert is_abandoned(owned, {7, 42})
    assert not is_abandoned(owned, {7, 41})
    assert not is_abandoned({"owner": ""}, {7})


def event(kind: str, worker: str, epoch: int = 1, **payload: str) -> dict[str, Any]:
    """Return a status event."""
    place = {"task_id": "t", "node_id": "n", "attempt_epoch": epoch, "ts_ms": 1_000}
    return {**place, "payload": {"kind": kind, "worker_id": worker, **payload}}


TAKEN = [
    event("TASK_ACCEPTED", "first", lease_id="1"),
    event("TASK_ACCEPTED", "second", lease_id="2"),
    event("TASK_DONE", "second"),
]


def unstopped(events: list[dict[str, Any]], *signals: dict[str, Any], dead: str = "") -> list[str]:
    """Return the workers that the check reports."""
    return [run.worker_id for run in Runs(events, signals).unstopped(lambda worker, _: worker == dead)]


def test_check_reports_a_worker_that_runs_on_beside_a_newer_owner() -> None:
    assert unstopped(TAKEN) == ["first"]
    redispatched = [TAKEN[0], event("TASK_ACCEPTED", "second", epoch=2, lease_id="2")]
    assert unstopped(redispatched) == ["first"]


def test_check_accepts_workers_that_were_cancelled_or_died_or_finished() -> None:
    signal = {"task_id": "t", "node_id": "n", "attempt_epoch": 1, "target_worker_id": "first"}
    assert unstopped(TAKEN, signal) == []
    assert unstopped(TAKEN, {**signal, "attempt_epoch": 2}) == ["first"]
    assert unstopped(TAKEN, dead="first") == []
    assert unstopped([*TAKEN, event("CANCELLED", "first")]) == []
