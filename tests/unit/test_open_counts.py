"""What an engine counts of open tasks, from what their documents show."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest

from flowkit.adapters.slots import QueueLimits, SlotUsage, WaitingRole
from flowkit.engine.gauges import OpenStates, oldest_ready, slot_values
from flowkit.models import NodeStatus, TaskStatus
from flowkit.models.waits import (
    OUTSIDE,
    NodeWait,
    WaitKind,
    for_decision,
    for_prerequisites,
    for_slot,
    stored_wait,
)

NOW = 1_800_000_000.0
ENDED = datetime(2026, 1, 1, tzinfo=UTC)


def document(key: str, status: str, *nodes: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return what is read of a document."""
    return {"_id": key, "status": status, "finished_at": None, "graph": {"nodes": [*nodes]}} | fields


def node(role: str, status: str, **fields: Any) -> dict[str, Any]:
    """Return what is read of a node."""
    return {"type": role, "status": status, **fields}


def test_open_nodes_count_by_role_and_status_and_ended_ones_do_not() -> None:
    counts = OpenStates()
    nodes = [
        node("page", "running"),
        node("page", "queued"),
        node("page", "queued"),
        node("page", "finished"),
    ]
    counts.note(document("t", "running", *nodes, node("mail", "skipped")))
    assert counts.nodes() == {("page", "running"): 1, ("page", "queued"): 2}
    assert counts.tasks() == {("queued",): 0, ("running",): 1, ("deferred",): 0}


def test_task_that_has_changed_counts_once_and_one_that_has_ended_does_not() -> None:
    counts = OpenStates()
    counts.note(document("t", "running", node("page", "queued")))
    counts.note(document("t", "deferred", node("page", "deferred")))
    assert counts.nodes() == {("page", "deferred"): 1}
    assert counts.tasks()["deferred",] == 1
    counts.note(document("t", "finished", node("page", "finished"), finished_at=ENDED))
    assert (counts.nodes(), sum(counts.tasks().values())) == ({}, 0)


def test_failed_task_counts_until_its_last_attempts_have_ended() -> None:
    counts = OpenStates()
    counts.note(document("t", "failed", node("page", "cancelling")))
    assert counts.tasks()["failed",] == 1
    assert counts.nodes() == {("page", "cancelling"): 1}


@pytest.mark.parametrize(
    ("wait", "status"),
    [
        (for_decision("failed with x"), "deferred"),
        (for_decision("approve or reject"), "deferred"),
        (for_prerequisites(["legal"]), "queued"),
    ],
)
def test_node_that_waits_for_somebody_outside_counts_by_that_since_the_wait_began(
    wait: NodeWait, status: str
) -> None:
    counts = OpenStates()
    waiting = [node("page", status, **stored_wait(wait.began(NOW - age))) for age in (25, 10)]
    counts.note(document("t", "deferred", waiting[0]))
    counts.note(document("u", "deferred", waiting[1], node("page", status)))
    assert counts.nodes() == {("page", wait.kind.value): 2, ("page", status): 1}
    found = {kind: counts.oldest(kind, NOW) for kind in OUTSIDE}
    assert found == {kind: {("page",): 25.0} if kind is wait.kind else {} for kind in OUTSIDE}
    counts.note(document("t", "running", node("page", "running")))
    assert counts.oldest(wait.kind, NOW)["page",] == 10


@pytest.mark.parametrize("wait", [for_slot("page", "2 of 2"), for_decision("of an unknown age")])
def test_other_waits_count_by_the_status(wait: NodeWait) -> None:
    counts = OpenStates()
    counts.note(document("t", "running", node("page", "deferred", **stored_wait(wait))))
    assert counts.nodes() == {("page", "deferred"): 1}


def test_content_that_another_program_has_written_does_not_count() -> None:
    counts = OpenStates()
    for key, graph in enumerate(
        [None, {}, {"nodes": 1}, {"nodes": [1, None, {"type": 5, "status": "queued"}]}]
    ):
        counts.note({"_id": key, "status": "running", "graph": graph})
    counts.note(
        document(
            "odd", "running", node("page", "unheard of"), node("page", "deferred", waits_for=5, wait_kind=[])
        )
    )
    assert counts.nodes() == {("page", "deferred"): 1}
    assert counts.tasks()["running",] == 5


def test_counts_of_changes_agree_with_counts_of_all_documents() -> None:
    chance, counts, documents = random.Random(7), OpenStates(), {}
    for _ in range(2_000):
        key = f"t{chance.randrange(40)}"
        nodes = [
            node(
                chance.choice("abc"),
                chance.choice([*NodeStatus]).value,
                **chance.choice([{}, stored_wait(for_decision("x").began(chance.random()))]),
            )
            for _ in range(chance.randrange(6))
        ]
        ended = chance.choice([None, None, ENDED])
        documents[key] = document(key, chance.choice([*TaskStatus]).value, *nodes, finished_at=ended)
        counts.note(documents[key])
    fresh = OpenStates()
    for each in documents.values():
        fresh.note(each)
    decision = WaitKind.DECISION
    assert (counts.tasks(), counts.nodes()) == (fresh.tasks(), fresh.nodes())
    assert counts.oldest(decision, NOW) == fresh.oldest(decision, NOW)
    assert counts.nodes()


def test_activities_wait_in_the_queues_of_roles_and_of_the_versions_that_tasks_have_fixed() -> None:
    counts = OpenStates()
    nodes = [
        node("page", "queued"),
        node("shop.mail", "deferred"),
        node("busy", "running"),
        node("delay", "deferred"),
    ]
    pinned = {"coordinator": {"pinned": {"shop/mail": "1.4", "busy": "1.5"}}}
    counts.note(document("t", "running", *nodes) | pinned)
    assert counts.waiting_queues("q") == {
        "q.page": "page",
        "q.shop.mail": "shop.mail",
        "q.shop.mail@1.4": "shop.mail",
    }
    counts.note(document("t", "finished", finished_at=ENDED))
    assert counts.waiting_queues("q") == {}


def test_oldest_wait_of_a_role_is_the_longest_of_its_queues_slots_and_commands() -> None:
    queues = {"q.page": "page", "q.page@2": "page", "q.mail": "mail"}
    since = [{"page": NOW - 30, "slow": NOW - 5}, {"mail": NOW - 1}]
    found = oldest_ready({"q.page": 10, "q.page@2": 40, "q.mail": 2}, queues, since, NOW)
    assert found == {("page",): 40, ("slow",): 5, ("mail",): 2}


def test_slots_are_shown_for_each_limit_and_only_for_limits() -> None:
    limits = QueueLimits(total=10, by_role={"page": 4})
    usage = SlotUsage(total=7, by_role=Counter(page=4, mail=3))
    waiting = {"page": WaitingRole(requests=2, since=NOW), "mail": WaitingRole(requests=1, since=NOW)}
    assert slot_values(limits, usage, waiting) == {
        ("page", "used"): 4,
        ("page", "waiting"): 2,
        ("page", "size"): 4,
        ("*", "used"): 7,
        ("*", "waiting"): 3,
        ("*", "size"): 10,
    }
    assert slot_values(QueueLimits(), usage, waiting) == {}
