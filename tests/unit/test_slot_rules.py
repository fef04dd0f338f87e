"""Which roles may get another slot of the concurrency limits, and which slots are leaked."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.api.common.v1 import ActivityType
from temporalio.api.workflow.v1 import PendingActivityInfo, PendingWorkflowTaskInfo
from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionResponse

from flowkit import CoordinatorConfig
from flowkit.adapters.slots import Holder, QueueLimits, SlotUsage, full_roles, has_room, is_full, wait_reason
from flowkit.attempt.workflows import ABSENT, FoundWorkflow, WorkflowState
from flowkit.engine.slot_leaks import Use, use_of
from flowkit.errors import ConfigError
from flowkit.models import slot_wait_id, temporal_names
from flowkit.workflows.slots import priority_of

ROLES = ("slow", "fast", "a.b")
COUNTS = st.dictionaries(st.sampled_from(ROLES), st.integers(1, 5))
HOLDER = Holder(task_id="t", run_id="r", node_id="n", epoch=2, role="slow", at=0.0)


def test_limits_are_read_from_the_configuration_at_each_call() -> None:
    config = CoordinatorConfig()
    assert not QueueLimits.of(config).configured
    config.max_global_running = 3
    assert QueueLimits.of(config) == QueueLimits(total=3)
    config.max_type_concurrency["slow"] = 1
    assert QueueLimits.of(config) == QueueLimits(total=3, by_role={"slow": 1})


@pytest.mark.parametrize(
    ("limits", "role", "concerned"),
    [
        (QueueLimits(), "slow", False),
        (QueueLimits(total=1), "slow", True),
        (QueueLimits(by_role={"slow": 1}), "slow", True),
        (QueueLimits(by_role={"slow": 1}), "fast", False),
    ],
)
def test_limit_concerns_its_role_or_all_roles(limits: QueueLimits, role: str, concerned: bool) -> None:
    assert limits.concern(role) is concerned


@given(total=st.none() | st.integers(1, 8), by_role=COUNTS, asked=st.lists(st.sampled_from(ROLES)))
def test_slots_are_granted_up_to_the_limits_and_no_further(
    total: int | None, by_role: dict[str, int], asked: list[str]
) -> None:
    limits, usage, granted = QueueLimits(total=total, by_role=by_role), SlotUsage(), dict.fromkeys(ROLES, 0)
    for role in asked:
        if has_room(limits, usage, role):
            usage = usage.with_one(role)
            granted[role] += 1
        else:
            full = total is not None and sum(granted.values()) == total
            assert full or granted[role] == by_role[role]
    assert usage.total == sum(granted.values()) <= (total or len(asked))
    assert all(granted[role] <= limit for role, limit in by_role.items())
    assert full_roles(limits, usage) == {role for role, limit in by_role.items() if granted[role] == limit}
    assert is_full(limits, usage) == (usage.total == total)


@pytest.mark.parametrize(
    ("usage", "served", "reason"),
    [
        (SlotUsage(total=2, by_role={"slow": 2}), True, "2 of 2"),
        (SlotUsage(total=12, by_role={"slow": 1}), True, "12 of 12 over all roles"),
        (SlotUsage(total=12, by_role={"slow": 2}), False, "2 of 2"),
        (SlotUsage(total=11, by_role={"slow": 1}), False, "no worker serves the role"),
        (SlotUsage(total=1), True, "other tasks are first"),
    ],
)
def test_wait_names_the_limit_that_is_reached(usage: SlotUsage, served: bool, reason: str) -> None:
    assert wait_reason(QueueLimits(total=12, by_role={"slow": 2}), usage, "slow", served=served) == reason


@pytest.mark.parametrize(
    ("given_priority", "priority"),
    [(7, 7), (-7, -7), (None, 0), ("7", 0), (True, 0), (1.5, 0), (2**31, 0)],
)
def test_priority_is_an_integer_of_the_params(given_priority: Any, priority: int) -> None:
    assert priority_of({"priority": given_priority}) == priority
    assert priority_of({}) == 0


def pending(activity_id: str) -> PendingActivityInfo:
    """Return a pending activity. An activity with a number as its id asks for a slot."""
    name = temporal_names.ACQUIRE_SLOTS if activity_id.isdigit() else "slow"
    return PendingActivityInfo(activity_id=activity_id, activity_type=ActivityType(name=name))


def found(state: WorkflowState, *activities: str, task: bool = False) -> FoundWorkflow:
    """Return what a look-up finds, as far as it matters for slots."""
    description: Any = SimpleNamespace(
        raw_description=DescribeWorkflowExecutionResponse(
            pending_activities=[pending(each) for each in activities],
            pending_workflow_task=PendingWorkflowTaskInfo() if task else None,
        )
    )
    return FoundWorkflow(state=state, description=description)


@pytest.mark.parametrize(
    ("looked_up", "use"),
    [
        (ABSENT, Use.UNUSED),
        (found(WorkflowState.CLOSED, "n.2"), Use.CLOSED),
        (found(WorkflowState.CLOSED), Use.CLOSED),
        (found(WorkflowState.OPEN, "n.2"), Use.IN_FLIGHT),
        (found(WorkflowState.OPEN, "n.1", "m.2"), Use.UNUSED),
        (found(WorkflowState.OPEN, slot_wait_id("n", 2)), Use.UNDELIVERED),
        (found(WorkflowState.OPEN, task=True), Use.IN_FLIGHT),
        (found(WorkflowState.OPEN, "7"), Use.IN_FLIGHT),
        (found(WorkflowState.OPEN), Use.UNUSED),
    ],
)
def test_slot_is_leaked_if_its_workflow_neither_runs_nor_starts_the_attempt(
    looked_up: FoundWorkflow, use: Use
) -> None:
    assert use_of(HOLDER, looked_up) is use


@given(node_id=st.text(min_size=1), epoch=st.integers(1), other=st.text(min_size=1), later=st.integers(1))
def test_id_of_a_wait_is_never_the_id_of_an_attempt(node_id: str, epoch: int, other: str, later: int) -> None:
    assert slot_wait_id(node_id, epoch) != f"{other}.{later}"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"max_global_running": 0}, "max_global_running is 0; it must be none, or a whole number between 1"),
        ({"max_global_running": True}, "max_global_running is True; it must be none"),
        ({"max_type_concurrency": 3}, "max_type_concurrency is 3; it must be a mapping of role to"),
        ({"max_type_concurrency": {"slow": 0}}, "max_type_concurrency['slow'] is 0; it must be a whole"),
        ({"max_type_concurrency": {"a b": 1}}, "max_type_concurrency's key is 'a b'; it must be a role"),
    ],
)
def test_limits_that_cannot_work_are_rejected(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        CoordinatorConfig(**settings)


def test_configuration_copies_its_limits() -> None:
    given = {"slow": 1}
    config = CoordinatorConfig(max_type_concurrency=given)
    given["slow"] = 2
    assert config.max_type_concurrency == {"slow": 1}
