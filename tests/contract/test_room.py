"""A document that is full of errors makes room for what its other nodes have to write."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import bson
import pytest
from tests.contract.builders import (
    AT,
    RUN,
    TASK,
    attempt,
    begun,
    opened,
    record,
    shown,
    stored,
    stored_statuses,
)
from tests.contract.recording_database import RecordingDatabase
from tests.contract.size_limited_database import SizeLimitedDatabase

from flowkit.adapters.tasks.room import SHORT_ERROR_CHARS
from flowkit.adapters.tasks.store import TaskStore
from flowkit.coordinator.adapters import CoordinatorAdapters
from flowkit.errors import StoreTooLarge
from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from flowkit.models import NodeRecord

FAILED, WAITING = 20, 5
NAMES = [f"n{index}" for index in range(FAILED + WAITING)]
NEXT = attempt(NAMES[FAILED], index=FAILED)


def failures(*indexes: int, error: str = "e" * 2_000) -> list[NodeRecord]:
    """Return failed nodes with long errors."""
    return [
        shown(NAMES[index], NodeStatus.FAILED, index=index, epoch=1, last_error=error) for index in indexes
    ]


async def full(db: Any, *, error: str = "e" * 2_000) -> SizeLimitedDatabase:
    """A database that allows no growth of its document, in which many nodes have failed."""
    tasks = TaskStore(db)
    await opened(tasks, *NAMES)
    await tasks.record(record(*failures(*range(FAILED), error=error)))
    return SizeLimitedDatabase(db, bytes_at_most=len(bson.encode(await stored(db))))


async def errors(db: Any) -> set[int]:
    """Return the lengths of the errors in the document."""
    nodes = (await stored(db))["graph"]["nodes"]
    return {len(node["last_error"]) for node in nodes if node.get("last_error")}


async def test_attempts_run_in_a_document_that_errors_have_filled(db: Any) -> None:
    tasks = TaskStore(await full(db))
    waiting = [attempt(NAMES[index], index=index) for index in range(FAILED, FAILED + WAITING)]
    await asyncio.gather(*(begun(tasks, each) for each in waiting))
    await asyncio.gather(*(tasks.attempts.finish(each, RUN, AT) for each in waiting))
    assert (await stored_statuses(db))[FAILED:] == ["finished"] * WAITING
    assert await errors(db) == {SHORT_ERROR_CHARS}
    assert (await stored(db))["coordinator"]["truncated"] is True


async def test_new_failures_keep_a_part_of_their_errors(db: Any) -> None:
    limited = await full(db)
    tasks = TaskStore(limited)
    await tasks.record(record(*failures(FAILED, FAILED + 1)))
    assert (await stored_statuses(db))[FAILED : FAILED + 2] == ["failed", "failed"]
    assert await errors(db) == {SHORT_ERROR_CHARS, 2_000}, "there is room for the new ones"
    assert limited.refused == 1


async def test_functions_take_effect_in_a_full_document(db: Any) -> None:
    adapters = CoordinatorAdapters(db=await full(db))
    await adapters.vars_set(TASK, kv={"text": "x" * 500})
    assert (await stored(db))["coordinator"]["vars"] == {"text": "x" * 500}


async def test_error_of_a_newer_attempt_is_not_cut_by_an_older_decision(db: Any) -> None:
    recording = RecordingDatabase(await full(db))

    async def fails_again() -> None:
        await db.tasks.update_one(
            {"id": TASK}, {"$set": {"graph.nodes.0.attempt_epoch": 2, "graph.nodes.0.last_error": "new"}}
        )

    async def nothing() -> None:
        """Let the update of the attempt pass."""

    recording.before["tasks"] += [nothing, fails_again]
    await begun(TaskStore(recording), NEXT)
    nodes = (await stored(db))["graph"]["nodes"]
    assert nodes[0]["last_error"] == "new"
    assert len(nodes[1]["last_error"]) == SHORT_ERROR_CHARS


async def test_attempt_is_refused_and_nothing_changes_if_no_error_can_be_cut(db: Any) -> None:
    tasks = TaskStore(await full(db, error="short"))
    before = await stored(db)
    with pytest.raises(StoreTooLarge) as caught:
        await begun(tasks, NEXT)
    assert caught.value.code == "document_too_large"
    assert await stored(db) == before
