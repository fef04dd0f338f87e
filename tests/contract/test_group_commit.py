"""Attempts that start and end at the same time share their writes, and each has the same outcome as alone."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.contract.builders import AT, RUN, WORKER, attempt, begun, close, documents_of, opening
from tests.contract.recording_database import RecordingDatabase
from tests.unit.property_examples import examples

from flowkit.adapters.tasks.store import TaskStore
from flowkit.errors import EpochTaken, Fenced, FlowKitError, StoreRefused
from flowkit.limits import LARGE_DOCUMENT_BYTES
from flowkit.models import TaskStatus
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.models import AttemptInput

NODES = "abcdefgh"
TASKS = ("task-1", "task-2", "task-3")


def each(task_id: str, index: int, epoch: int = 2) -> AttemptInput:
    """Return an attempt. The document of the last task is large, so that its writes wait for each other."""
    size = LARGE_DOCUMENT_BYTES if task_id == TASKS[-1] else 0
    return replace(attempt(NODES[index], index=index, epoch=epoch), task_id=task_id, document_bytes=size)


async def open_all(tasks: TaskStore, ids: tuple[str, ...] = TASKS) -> None:
    for task_id in ids:
        await tasks.open_task(opening(*NODES, task_id=task_id))


async def outcome(write: Awaitable[None]) -> str:
    """Wait for a write and return its outcome as text."""
    try:
        await write
    except FlowKitError as error:
        return f"{type(error).__name__}: {error}"
    return "written"


async def stored_tasks(db: Any) -> list[dict[str, Any]]:
    """Return all task documents, sorted by id, without `_id`, which differs between two runs of the same writes."""
    found = [
        {name: value for name, value in task.items() if name != "_id"}
        for task in await documents_of(db.tasks)
    ]
    return sorted(found, key=lambda task: task["id"])


# --- number of calls ----------------------------------------------------------------------------------------------


async def test_hundred_attempts_start_and_end_in_a_few_calls() -> None:
    db = RecordingDatabase(memory_database())
    tasks, names = TaskStore(db), [f"n{number}" for number in range(100)]
    await tasks.open_task(opening(*names))
    db.updates.clear()
    attempts = [attempt(name, index=index) for index, name in enumerate(names)]
    await asyncio.gather(*(begun(tasks, each) for each in attempts))
    await asyncio.gather(*(tasks.attempts.finish(each, RUN, AT) for each in attempts))
    assert len(db.updates) == 4
    [task] = await documents_of(db.tasks)
    assert {node["status"] for node in task["graph"]["nodes"]} == {"finished"}


async def test_attempts_of_other_tasks_do_not_wait_for_those_in_a_large_document() -> None:
    tasks = TaskStore(RecordingDatabase(memory_database()))
    await open_all(tasks, ("task-1", "task-2"))
    large = [replace(each("task-1", index), document_bytes=10**15) for index in range(8)]
    small = [each("task-2", index) for index in range(8)]
    waiting = [asyncio.create_task(begun(tasks, one)) for one in large]
    await asyncio.gather(*(begun(tasks, one) for one in small))
    assert not any(each.done() for each in waiting[1:]), "only the first of them writes at once"
    for one in waiting:
        one.cancel()
    await asyncio.wait(waiting)


async def test_leases_of_many_attempts_are_extended_in_a_few_calls(db: Any) -> None:
    recorded = RecordingDatabase(db)
    tasks = TaskStore(recorded)
    await open_all(tasks, ("task-1",))
    attempts = [each("task-1", index) for index in range(8)]
    for one in attempts[1:]:
        await begun(tasks, one)
    recorded.updates.clear()
    await asyncio.gather(
        *(tasks.attempts.extend_lease(one, RUN, 10_000 + one.index, AT) for one in attempts[1:])
    )
    assert len(recorded.updates) == 2
    await asyncio.gather(*(tasks.attempts.extend_lease(one, RUN, 20_000, AT) for one in attempts))
    nodes = (await documents_of(db.tasks))[0]["graph"]["nodes"]
    assert [node["lease"].get("deadline_ts_ms") for node in nodes] == [None, *([20_000] * 7)]


# --- outcomes -----------------------------------------------------------------------------------------------------


async def test_rejected_attempts_of_a_group_get_their_reasons_and_the_others_continue(
    db: Any, tasks: TaskStore
) -> None:
    await open_all(tasks, ("task-1", "task-2"))
    await begun(tasks, each("task-1", 1, epoch=5), run="other-run")
    attempts = [each("task-1", index) for index in range(4)] + [each("task-2", 0), each("nowhere", 0)]
    unknown = replace(each("task-2", 3), node_id="no-such-node")
    ends = await asyncio.gather(*(begun(tasks, one) for one in [*attempts, unknown]), return_exceptions=True)
    assert [type(end) for end in ends] == [
        *(type(None), EpochTaken, type(None), type(None)),
        *(type(None), StoreRefused, StoreRefused),
    ]
    first, second = (task["graph"]["nodes"] for task in await stored_tasks(db))
    assert [node["attempt_epoch"] for node in first] == [2, 5, 2, 2, 0, 0, 0, 0]
    assert [node["attempt_epoch"] for node in second] == [2, 0, 0, 0, 0, 0, 0, 0]


async def test_higher_of_two_concurrent_epochs_gets_the_node(db: Any, tasks: TaskStore) -> None:
    await open_all(tasks, ("task-1",))
    others = [each("task-1", index) for index in (2, 3, 4)]
    await asyncio.gather(*(begun(tasks, one) for one in [*others, each("task-1", 0), each("task-1", 0, 3)]))
    [task] = await documents_of(db.tasks)
    assert task["graph"]["nodes"][0]["attempt_epoch"] == 3


async def test_attempts_of_a_reset_run_reopen_their_closed_document_together(
    db: Any, tasks: TaskStore
) -> None:
    await open_all(tasks, ("task-1",))
    await tasks.close_task(close(status=TaskStatus.FAILED, reason="terminated"))
    attempts = [each("task-1", index) for index in range(5)]
    await asyncio.gather(*(begun(tasks, one, run="reset-run") for one in attempts))
    [task] = await documents_of(db.tasks)
    assert (task["status"], task["finished_at"], "closed_run_id" in task) == ("running", None, False)
    assert [node["status"] for node in task["graph"]["nodes"][:6]] == [*(["running"] * 5), "finished"]


async def test_existing_rows_are_replaced_or_rejected_each_by_its_own_epoch(
    db: Any, artifacts: ArtifactStore
) -> None:
    for index, epoch in ((1, 1), (2, 3), (4, 2)):
        await artifacts.store_batch(each("task-1", index, epoch), "b1", {"epoch": epoch}, WORKER, AT)
    attempts = [each("task-1", index) for index in range(6)]
    writes = (artifacts.store_batch(one, "b1", {"epoch": 2}, WORKER, AT) for one in attempts)
    ends = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(end) for end in ends] == [Fenced if index == 2 else type(None) for index in range(6)]
    for collection, field in ((db.artifacts, "meta"), (db.metrics_raw, "metrics")):
        rows = {row["node_id"]: row[field]["epoch"] for row in await documents_of(collection)}
        assert rows == {"a": 2, "b": 2, "c": 3, "d": 2, "e": 2, "f": 2}


async def test_row_that_cannot_be_stored_is_rejected_alone(artifacts: ArtifactStore) -> None:
    metrics: list[dict[str, Any]] = [{"n": 1}, {"n": 2}, {"n": 2**70}, {"n": 3}, {"n": 4}]
    writes = (
        artifacts.store_batch(each("task-1", index), "b1", given, WORKER, AT)
        for index, given in enumerate(metrics)
    )
    ends = [await one for one in asyncio.as_completed(map(outcome_of_write, writes))]
    assert sorted(ends) == ["refused", *(["written"] * 4)]


async def outcome_of_write(write: Awaitable[None]) -> str:
    try:
        await write
    except (FlowKitError, OverflowError):
        return "refused"
    return "written"


# --- compared with single writes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """The earlier transitions of a few tasks, and the concurrent writes of many attempts."""

    before: list[Callable[[TaskStore], Awaitable[Any]]]
    writes: list[Callable[[TaskStore], Awaitable[None]]]
    without_errors: bool
    """Whether all writes succeed."""


def scenario(seed: int) -> Scenario:
    chance = random.Random(seed)
    with_errors, ended = chance.choice(((0.0, False), (0.05, False), (0.5, False), (0.5, True)))
    found = Scenario(before=[], writes=[], without_errors=not with_errors)
    for task_id in TASKS:
        for index in range(len(NODES)):
            finishes, run = chance.random() < 0.5, RUN
            epoch = earlier = chance.randrange(1, 4)
            if chance.random() < with_errors:
                epoch, run = chance.randrange(1, 4), RUN if ended else chance.choice((RUN, "other-run"))
            if finishes or chance.random() < with_errors:
                found.before.append(partial(begin, each(task_id, index, earlier), RUN))
            wanted = each(task_id, index, epoch)
            found.writes.append(partial(finish if finishes else begin, wanted, run))
    if ended:
        found.before.append(lambda tasks: tasks.close_task(close(status=TaskStatus.FAILED)))
    chance.shuffle(found.writes)
    return found


async def begin(one: AttemptInput, run: str, tasks: TaskStore) -> None:
    await begun(tasks, one, run=run)


async def finish(one: AttemptInput, run: str, tasks: TaskStore) -> None:
    await tasks.attempts.finish(one, run, AT)


async def after(scenario: Scenario, *, at_once: bool) -> tuple[list[str], list[dict[str, Any]], int]:
    """Return the outcome of each write, the stored documents and the number of updates."""
    db = RecordingDatabase(memory_database())
    tasks = TaskStore(db)
    await open_all(tasks)
    for step in scenario.before:
        await step(tasks)
    db.updates.clear()
    writes = [outcome(write(tasks)) for write in scenario.writes]
    ends = await asyncio.gather(*writes) if at_once else [await write for write in writes]
    return list(ends), await stored_tasks(db), len(db.updates)


async def test_group_has_the_same_outcome_as_its_attempts_one_by_one() -> None:
    for seed in range(examples(25)):
        chosen = scenario(seed)
        ends, tasks, updates = await after(chosen, at_once=True)
        expected, expected_tasks, single = await after(chosen, at_once=False)
        assert (ends, tasks) == (expected, expected_tasks)
        if chosen.without_errors:
            assert set(ends) == {"written"}
            assert updates < single / 4
