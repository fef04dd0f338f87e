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
    ("hold", "graph_hold", "sec"), [(60, None, 60), (None, 600, 600), (60, 600, 60), (None, None, 7 * 86_400)]
)
def test_held_node_counts_as_held_since_its_hold_began(
    hold: float | None, graph_hold: float | None, sec: float
) -> None:
    counts, until_ms = OpenStates(), int((NOW + sec - 25) * 1000)
    held = node("page", "deferred", held_until_ms=until_ms, hold_sec=hold)
    counts.note(document("t", "deferred", held) | {"graph": {"nodes": [held], "hold_sec": graph_hold}})
    assert counts.nodes() == {("page", "held"): 1}
    assert counts.held(NOW)["page",] == pytest.approx(25, abs=0.01)
    counts.note(document("t", "running", node("page", "running", held_until_ms=until_ms)))
    assert counts.held(NOW) == {}


def test_content_that_another_program_has_written_does_not_count() -> None:
    counts = OpenStates()
    for key, graph in enumerate(
        [None, {}, {"nodes": 1}, {"nodes": [1, None, {"type": 5, "status": "queued"}]}]
    ):
        counts.note({"_id": key, "status": "running", "graph": graph})
    counts.note(
        document("odd", "running", node("page", "unheard of"), node("page", "deferred", held_until_ms="x"))
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
                held_until_ms=chance.choice([None, 5]),
            )
            for _ in range(chance.randrange(6))
        ]
        ended = chance.choice([None, None, ENDED])
        documents[key] = document(key, chance.choice([*TaskStatus]).value, *nodes, finished_at=ended)
        counts.note(documents[key])
    fresh = OpenStates()
    for each in documents.values():
        fresh.note(each)
    assert (counts.tasks(), counts.nodes(), counts.held(NOW)) == (
        fresh.tasks(),
        fresh.nodes(),
        fresh.held(NOW),
    )
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
