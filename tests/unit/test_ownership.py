"""Whose workflow it is: markers, reserved ids, and the look-up of a workflow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.any_pb2 import Any as Detail
from temporalio.api.common.v1 import GrpcStatus
from temporalio.api.errordetails.v1 import NamespaceNotFoundFailure
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from flowkit.attempt.workflows import WorkflowState, id_queries, look_up
from flowkit.models.ownership import (
    MEMO,
    Owner,
    OwnerKind,
    belongs_here,
    may_lack_marker,
    read_owner,
    task_owner,
)
from flowkit.validation.arguments import new_task_id_problem

Status = WorkflowExecutionStatus
FLOW = "flow:d:3:40/1"


def test_a_marker_is_read_as_it_was_written() -> None:
    owner = Owner(kind=OwnerKind.ADMISSION, deployment="d", id="7-1")
    assert read_owner(owner.as_memo()[MEMO]) == owner
    strange: list[Any] = [None, "x", {}, {"kind": "other", "deployment": "d", "id": "1"}, {"kind": ["task"]}]
    assert [read_owner(each) for each in strange] == [None] * len(strange)


@pytest.mark.parametrize(
    ("task_id", "found", "own"),
    [
        ("t", task_owner("t", "d"), True),
        ("t", task_owner("t", "e"), False),
        ("t", Owner(kind=OwnerKind.ADMISSION, deployment="d", id="7-1"), True),
        ("t", Owner(kind=OwnerKind.ADMISSION, deployment="e", id="7-1"), False),
        (FLOW, task_owner(FLOW, "d"), True),
        (FLOW, task_owner(FLOW, "e"), False),
        (FLOW, Owner(kind=OwnerKind.TASK, deployment="d", id=FLOW), False),
    ],
)
def test_a_workflow_belongs_to_the_deployment_of_its_marker(task_id: str, found: Owner, own: bool) -> None:
    assert belongs_here(task_id, found, "d") is own


def test_ids_of_runs_of_flows_are_reserved() -> None:
    assert "are reserved for the runs of flows" in (new_task_id_problem(FLOW) or "")
    assert "choose another id" in (new_task_id_problem(FLOW, kind=OwnerKind.ADMISSION) or "")
    assert new_task_id_problem(FLOW, kind=OwnerKind.FLOW) is None
    assert new_task_id_problem("flows-1") is None


def test_ids_of_nominal_times_and_of_workflows_of_backfills_are_reserved() -> None:
    night = "payroll-2026-11-28T02:00:00Z"
    for kind in OwnerKind:
        problem = new_task_id_problem(night, kind=kind)
        assert (problem is None) is (kind in {OwnerKind.SCHEDULE, OwnerKind.BACKFILL})
        assert problem is None or "reserved for the tasks of schedules; choose another id" in problem
        assert "begin with backfill:" in (new_task_id_problem("backfill:lost-week", kind=kind) or "")
    for free in ("payroll-2026-11-28", f"{night}-again", "2026-11-28T02:00:00Z", "backfills"):
        assert new_task_id_problem(free) is None


def test_a_task_without_a_marker_has_the_id_of_a_nominal_time_only_from_its_schedule() -> None:
    night = "payroll-2026-11-28T02:00:00Z"
    assert [may_lack_marker(night, by) for by in ("payroll", None, "other", "pay")] == [
        True,
        False,
        False,
        False,
    ]
    assert [may_lack_marker(each, None) for each in ("t", FLOW, "backfill:b")] == [True, False, False]


def test_ids_are_quoted_for_queries_or_left_out() -> None:
    assert id_queries([]) == []
    assert id_queries(["a", "it's", "\\", "'\""]) == ["WorkflowId IN ('a', \"it's\")"]
    assert [query.count("x") for query in id_queries([f"x{each}" for each in range(250)])] == [100, 100, 50]


class Temporal:
    """A client of one workflow."""

    def __init__(self, outcome: WorkflowExecutionStatus | RPCError) -> None:
        self._outcome = outcome

    def get_workflow_handle(self, *_: object, **__: object) -> Temporal:
        """Return the handle of the workflow."""
        return self

    async def describe(self) -> Any:
        """Return the description, or raise the error."""
        if isinstance(self._outcome, RPCError):
            raise self._outcome
        return SimpleNamespace(status=self._outcome)


def missing_namespace() -> RPCError:
    """Return the error of Temporal for a namespace that it does not know, which has the status of a missing
    workflow.
    """
    detail = Detail()
    detail.Pack(NamespaceNotFoundFailure(namespace="n"))
    status = GrpcStatus(details=[detail]).SerializeToString()
    return RPCError("Namespace n is not found.", RPCStatusCode.NOT_FOUND, status)


@pytest.mark.parametrize(
    ("outcome", "run_id", "state"),
    [
        (Status.RUNNING, None, WorkflowState.OPEN),
        (Status.CONTINUED_AS_NEW, None, WorkflowState.OPEN),
        (Status.CONTINUED_AS_NEW, "r", WorkflowState.CLOSED),
        (Status.COMPLETED, None, WorkflowState.CLOSED),
        (Status.TERMINATED, None, WorkflowState.CLOSED),
        (RPCError("not found", RPCStatusCode.NOT_FOUND, b""), None, WorkflowState.ABSENT),
    ],
)
async def test_a_workflow_is_open_closed_or_absent(
    outcome: Any, run_id: str | None, state: WorkflowState
) -> None:
    client: Any = Temporal(outcome)
    found = await look_up(client, "t", run_id=run_id)
    assert (found.state, found.description is None) == (state, state is WorkflowState.ABSENT)


@pytest.mark.parametrize("error", [missing_namespace(), RPCError("away", RPCStatusCode.UNAVAILABLE, b"")])
async def test_a_look_up_without_a_certain_answer_raises_the_error(error: RPCError) -> None:
    client: Any = Temporal(error)
    with pytest.raises(RPCError) as caught:
        await look_up(client, "t")
    assert caught.value is error
