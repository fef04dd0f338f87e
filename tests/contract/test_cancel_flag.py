"""The documented flags, raised by the workflow or by hand, tell an attempt to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import TASK, attempt, begun, opened, record, shown

from flowkit.adapters.cancel_flags import DB_FLAG
from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from flowkit.adapters.store import TaskStore


@pytest.fixture(autouse=True)
async def _running(tasks: TaskStore) -> None:
    await opened(tasks, "a", "b")
    await begun(tasks, attempt())


@pytest.fixture
def by_hand(db: Any) -> Any:
    """Writes fields of the document as a user would."""

    async def write(**fields: Any) -> None:
        paths = {path.replace("__", "."): value for path, value in fields.items()}
        await db.tasks.update_one({"id": TASK}, {"$set": paths})

    return write


async def test_no_flag_is_up_in_a_running_task(tasks: TaskStore) -> None:
    assert await tasks.cancel_flag(attempt()) is None


async def test_a_cancelled_task_tells_its_reason(tasks: TaskStore) -> None:
    await tasks.record(record(cancel="user_request"))
    assert await tasks.cancel_flag(attempt()) == "user_request"


async def test_a_cancelled_task_stops_every_node(tasks: TaskStore) -> None:
    await tasks.record(record(shown("b", NodeStatus.CANCELLING, index=1), cancel="user_request"))
    assert await tasks.cancel_flag(attempt("a")) == "user_request"
    assert await tasks.cancel_flag(attempt("b", index=1)) == "user_request"


async def test_a_flag_raised_by_hand_is_told_from_ours(tasks: TaskStore, by_hand: Any) -> None:
    await by_hand(coordinator__cancelled=True)
    assert await tasks.cancel_flag(attempt()) == DB_FLAG


async def test_a_flag_raised_by_hand_may_have_a_reason(tasks: TaskStore, by_hand: Any) -> None:
    await by_hand(coordinator__cancelled=True, coordinator__cancel_reason="too dear")
    assert await tasks.cancel_flag(attempt()) == "too dear"


async def test_a_flag_raised_by_hand_at_a_node_stops_that_node_only(tasks: TaskStore, by_hand: Any) -> None:
    await by_hand(graph__nodes__1__coordinator__cancelled=True)
    assert await tasks.cancel_flag(attempt("a")) is None
    assert await tasks.cancel_flag(attempt("b", index=1)) == DB_FLAG


async def test_a_node_set_to_cancelling_by_hand_stops(tasks: TaskStore, by_hand: Any) -> None:
    await by_hand(graph__nodes__0__status="cancelling")
    assert await tasks.cancel_flag(attempt()) == DB_FLAG


@pytest.mark.parametrize("value", [False, "true", None, 0])
async def test_only_true_is_a_flag(tasks: TaskStore, by_hand: Any, value: object) -> None:
    await by_hand(coordinator__cancelled=value, graph__nodes__0__coordinator__cancelled=value)
    assert await tasks.cancel_flag(attempt()) is None


async def test_a_task_without_a_document_has_no_flag(db: Any, tasks: TaskStore) -> None:
    await db.tasks.delete_many({})
    assert await tasks.cancel_flag(attempt()) is None


async def test_states_of_all_nodes_are_told(tasks: TaskStore) -> None:
    found = await tasks.node_states(TASK)
    assert {name: (status.value, epoch) for name, (status, epoch) in found.items()} == {
        "a": ("running", 1),
        "b": ("queued", 0),
    }
    assert await tasks.node_states("unknown") == {}


@pytest.mark.parametrize(
    ("flag", "up"),
    [
        ({"coordinator.cancelled": True}, True),
        ({"graph.nodes.1.coordinator.cancelled": True}, True),
        ({"graph.nodes.1.status": "cancelling"}, True),
        ({"graph.nodes.1.status": "running", "coordinator.cancelled": False}, False),
    ],
)
async def test_one_look_sees_which_tasks_have_a_flag_up(
    db: Any, tasks: TaskStore, flag: dict[str, Any], up: bool
) -> None:
    assert await tasks.flagged([TASK, "another"]) == set()
    await db.tasks.update_one({"id": TASK}, {"$set": flag})
    assert await tasks.flagged(["another", TASK]) == ({TASK} if up else set())
    assert await tasks.flagged(["another"]) == set()
    assert await tasks.flagged([]) == set()
