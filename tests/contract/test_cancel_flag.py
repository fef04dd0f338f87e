"""The documented cancel flags, set by the workflow or by hand, stop an attempt."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from unittest.mock import ANY

import pytest
from tests.contract.builders import (
    AT,
    RUN,
    TASK,
    attempt,
    begun,
    close,
    opened,
    record,
    shown,
    stored,
    stored_statuses,
)
from tests.contract.recording_database import RecordingDatabase

from flowkit import reason_codes
from flowkit.adapters.tasks.attempts import NodeWrite
from flowkit.adapters.tasks.cancel_flags import CancelFlag, Flagged
from flowkit.adapters.tasks.open_tasks import OpenTasks
from flowkit.adapters.tasks.store import TaskStore
from flowkit.adapters.vars import changes, store
from flowkit.errors import EpochTaken, Fenced
from flowkit.models import NodeStatus, TaskStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flowkit.models import AttemptInput

OTHER_RUN = "run-0"


@pytest.fixture(autouse=True)
async def _running(tasks: TaskStore) -> None:
    await opened(tasks, "a", "b")
    await begun(tasks, attempt())


@pytest.fixture
def direct_write(db: Any) -> Any:
    """A function that writes fields of the document as a user would."""

    async def write(**fields: Any) -> None:
        paths = {path.replace("__", "."): value for path, value in fields.items()}
        await db.tasks.update_one({"id": TASK}, {"$set": paths})

    return write


async def reason(tasks: TaskStore, one: AttemptInput) -> str | None:
    """Return the reason of the flag that requests the attempt's node to stop; None if no flag is set."""
    flag = await tasks.flags.find_flag(one)
    return flag.reason if flag else None


async def test_running_task_has_no_cancel_flag(tasks: TaskStore) -> None:
    assert await reason(tasks, attempt()) is None


async def test_cancel_flag_of_a_task_has_its_reason(tasks: TaskStore) -> None:
    await tasks.record(record(cancel="user_request"))
    assert await reason(tasks, attempt()) == "user_request"


async def test_cancelled_task_stops_every_node(tasks: TaskStore) -> None:
    await tasks.record(record(shown("b", NodeStatus.CANCELLING, index=1), cancel="user_request"))
    assert await reason(tasks, attempt("a")) == "user_request"
    assert await reason(tasks, attempt("b", index=1)) == "user_request"


async def test_direct_write_is_distinguished_from_a_flag_of_the_workflow(
    tasks: TaskStore, direct_write: Any
) -> None:
    await direct_write(coordinator__cancelled=True)
    assert await reason(tasks, attempt()) == reason_codes.DB_FLAG


async def test_direct_write_can_have_a_reason(tasks: TaskStore, direct_write: Any) -> None:
    await direct_write(coordinator__cancelled=True, coordinator__cancel_reason="too dear")
    assert await reason(tasks, attempt()) == "too dear"


async def test_direct_write_to_a_node_stops_only_that_node(tasks: TaskStore, direct_write: Any) -> None:
    await direct_write(graph__nodes__1__coordinator__cancelled=True)
    assert await reason(tasks, attempt("a")) is None
    assert await reason(tasks, attempt("b", index=1)) == reason_codes.DB_FLAG


async def test_node_set_to_cancelling_by_a_direct_write_stops(tasks: TaskStore, direct_write: Any) -> None:
    await direct_write(graph__nodes__0__status="cancelling")
    assert await reason(tasks, attempt()) == reason_codes.DB_FLAG


@pytest.mark.parametrize("value", [False, "true", None, 0])
async def test_only_the_value_true_is_a_flag(tasks: TaskStore, direct_write: Any, value: object) -> None:
    await direct_write(coordinator__cancelled=value, graph__nodes__0__coordinator__cancelled=value)
    assert await reason(tasks, attempt()) is None


async def test_task_without_a_document_has_no_flag(db: Any, tasks: TaskStore) -> None:
    await db.tasks.delete_many({})
    assert await reason(tasks, attempt()) is None


async def test_cancel_state_includes_all_nodes(tasks: TaskStore) -> None:
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
async def test_one_query_finds_all_flagged_tasks(
    db: Any, tasks: TaskStore, flag: dict[str, Any], up: bool
) -> None:
    assert await tasks.flags.find_flagged([TASK, "another"]) == set()
    await db.tasks.update_one({"id": TASK}, {"$set": flag})
    assert await tasks.flags.find_flagged(["another", TASK]) == ({TASK} if up else set())
    assert await tasks.flags.find_flagged(["another"]) == set()
    assert await tasks.flags.find_flagged([]) == set()


# --- who set the flag ---------------------------------------------------------------------------------------------


async def cancelled(tasks: TaskStore) -> None:
    await tasks.record(record(cancel="user_request"))


async def closed(tasks: TaskStore) -> None:
    await tasks.close_task(close(status=TaskStatus.CANCELLED, reason="user_request"))


async def orphan(tasks: TaskStore) -> None:
    await OpenTasks(tasks.database).close_orphan(TASK, RUN, "user_request", AT)


@pytest.mark.parametrize("end", [cancelled, closed, orphan])
async def test_flags_of_the_workflow_name_its_run(
    tasks: TaskStore, end: Callable[[TaskStore], Awaitable[None]]
) -> None:
    await end(tasks)
    assert await tasks.flags.find_flag(attempt()) == CancelFlag(reason="user_request", run_id=RUN)


async def test_other_fields_do_not_turn_a_direct_write_into_a_flag_of_the_workflow(
    tasks: TaskStore, direct_write: Any
) -> None:
    await direct_write(
        coordinator__cancelled=True, coordinator__cancelled_at="now", coordinator__cancel_reason="too dear"
    )
    assert await tasks.flags.find_flag(attempt()) == CancelFlag(reason="too dear", run_id=None)


async def test_direct_write_to_a_node_is_not_mistaken_for_an_old_flag_of_the_task(
    tasks: TaskStore, direct_write: Any
) -> None:
    await direct_write(coordinator__cancelled=False, coordinator__cancel_run_id=OTHER_RUN)
    await direct_write(graph__nodes__0__coordinator__cancelled=True)
    assert await tasks.flags.find_flag(attempt()) == CancelFlag(reason=reason_codes.DB_FLAG, run_id=None)


# --- flags that exist when an attempt starts ----------------------------------------------------------------------


@pytest.fixture(params=[RUN, None], ids=["of the workflow", "written directly"])
async def flagged(request: pytest.FixtureRequest, direct_write: Any) -> CancelFlag:
    """Return a flag that is valid for this run."""
    await direct_write(coordinator__cancelled=True, coordinator__cancel_reason="enough")
    if request.param:
        await direct_write(coordinator__cancel_run_id=request.param)
    return CancelFlag(reason="enough", run_id=request.param)


async def test_no_attempt_starts_while_the_task_is_flagged(
    db: Any, tasks: TaskStore, flagged: CancelFlag
) -> None:
    before = await stored(db)
    with pytest.raises(Flagged) as caught:
        await begun(tasks, attempt("b", index=1))
    assert caught.value.flag == flagged
    assert await stored(db) == before


async def test_no_concurrent_attempt_starts_while_the_task_is_flagged(
    db: Any, tasks: TaskStore, flagged: CancelFlag
) -> None:
    before = await stored(db)
    both = [attempt("a", epoch=2), attempt("b", index=1)]
    ends = await asyncio.gather(*(begun(tasks, each) for each in both * 5), return_exceptions=True)
    assert {type(end) for end in ends} == {Flagged}
    assert await stored(db) == before


async def test_no_function_takes_effect_while_the_task_is_flagged(
    db: Any, tasks: TaskStore, flagged: CancelFlag
) -> None:
    write = NodeWrite(attempt=attempt("b", index=1), run_id=RUN, at=AT)
    before = await stored(db)
    with pytest.raises(Flagged):
        await store.Variables(tasks).write(TASK, changes.setting({"kv": {"n": 1}}), write)
    assert await stored(db) == before


async def test_running_attempt_of_a_flagged_task_can_finish(
    db: Any, tasks: TaskStore, direct_write: Any
) -> None:
    await direct_write(coordinator__cancelled=True)
    await tasks.attempts.finish(attempt(), RUN, AT)
    assert await stored_statuses(db) == ["finished", "queued"]


async def test_attempt_of_a_task_without_a_flag_starts_with_one_write(db: Any) -> None:
    recording = RecordingDatabase(db)
    await begun(TaskStore(recording), attempt("b", index=1))
    assert len(recording.updates) == 1


# --- flags of an earlier run (Temporal's Reset) -------------------------------------------------------------------


@pytest.fixture
async def _left_over(tasks: TaskStore) -> None:
    """Leave the flags of a run that was cancelled and then reset."""
    await tasks.record(record(shown("a", NodeStatus.CANCELLING, epoch=1), cancel="user_request"))


@pytest.mark.usefixtures("_left_over")
@pytest.mark.parametrize(("node_id", "index"), [("a", 0), ("b", 1)])
async def test_first_attempt_of_a_new_run_clears_all_flags_of_the_earlier_run(
    db: Any, tasks: TaskStore, node_id: str, index: int
) -> None:
    await begun(tasks, attempt(node_id, index=index, epoch=2), run="run-2")
    document = await stored(db)
    assert document["coordinator"] == {"liveness": {"state": "ok"}, "recorded_at": ANY}
    assert [node.get("coordinator") or {} for node in document["graph"]["nodes"]] == [{}, {}]
    assert [node.get("cancel_requested_at") for node in document["graph"]["nodes"]] == [None, None]
    assert (document["status"], document["run_id"]) == ("running", "run-2")
    assert document["graph"]["nodes"][index]["status"] == "running"
    assert await tasks.flags.find_flag(attempt(node_id, index=index, epoch=2)) is None


@pytest.mark.usefixtures("_left_over")
async def test_rejected_attempt_clears_no_flags(db: Any, tasks: TaskStore) -> None:
    before = await stored(db)
    with pytest.raises(EpochTaken):
        await begun(tasks, attempt("a", epoch=1), run="run-2")
    assert await stored(db) == before


async def test_direct_write_to_a_closed_task_does_not_stop_its_reset(
    db: Any, tasks: TaskStore, direct_write: Any
) -> None:
    await tasks.close_task(close(shown("a", NodeStatus.FAILED, epoch=1), status=TaskStatus.FAILED))
    await direct_write(coordinator__cancelled=True)
    with pytest.raises(Fenced):
        await begun(tasks, attempt(epoch=2))
    await begun(tasks, attempt(epoch=2), run="run-2")
    assert "cancelled" not in (await stored(db))["coordinator"]
