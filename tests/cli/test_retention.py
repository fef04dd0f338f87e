"""`flowkit purge` removes tasks that ended long ago with all their documents, and nothing else."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.cli.retention.commands import read_duration
from flowkit.connection import Namespace
from flowkit.errors import ConfigError
from tests.integration.harness import node

if TYPE_CHECKING:
    from tests.cli.conftest import Program, ProgramOutput
    from tests.integration.harness import Harness

TASK_COLLECTIONS = (
    *("artifacts", "metrics_raw", "stream_progress", "worker_events", "dispatches"),
    *("stored_graphs", "input_values", "map_items", "node_shards", "batch_tries"),
    *("flow_messages", "flow_events", "attempt_logs"),
)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 2_592_000), ("12h", 43_200), ("90m", 5_400), ("1D", 86_400)]
)
def test_duration_is_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert read_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "30", "d", "-1d", "1.5h", "0d", "30s", "30 d", "1w", "999999999d", "٣d"]
)
def test_invalid_duration_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a duration"):
        read_duration(text)


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (
            ["--older-than", "soon"],
            "--older-than 'soon' is not a duration; write a whole number and m, h or d",
        ),
        (
            ["--older-than", "1d", "--status", "running"],
            "--status 'running' is not the status of an ended task",
        ),
    ],
)
def test_invalid_option_exits_with_code_2(program: Program, arguments: list[str], reported: str) -> None:
    output = program.run("purge", *arguments)
    assert (output.code, output.out) == (2, "")
    assert reported in output.err


async def purge(program: Program, harness: Harness, *options: str) -> ProgramOutput:
    """Run `flowkit purge` for tasks that ended more than an hour ago."""
    return await program.call("purge", "--older-than", "1h", *options, env=harness.environment)


async def ended(
    harness: Harness, task_id: str, *, hours: float = 2, status: str = "finished", **more: Any
) -> None:
    """Insert a task that ended some hours ago, with one document in each collection of a task."""
    finished_at = datetime.now(UTC) - timedelta(hours=hours)
    document = {"id": task_id, "status": status, "finished_at": finished_at, **more}
    await harness.db.tasks.insert_one(document)
    for name in TASK_COLLECTIONS:
        await harness.db[name].insert_one(
            {"task_id": task_id, "node_id": "a", "batch_uid": "b", "event_hash": "h"}
        )


async def left(harness: Harness) -> dict[str, set[str]]:
    """Return the ids of the remaining tasks by collection."""
    found = {name: {row["task_id"] async for row in harness.db[name].find({})} for name in TASK_COLLECTIONS}
    return {**found, "tasks": {row["id"] async for row in harness.db.tasks.find({})}}


def everywhere(*task_ids: str) -> dict[str, set[str]]:
    """Return the expected ids if exactly these tasks remain in every collection."""
    return {name: set(task_ids) for name in (*TASK_COLLECTIONS, "tasks")}


@pytest.mark.server
async def test_purge_removes_older_tasks_with_all_their_documents(harness: Harness, program: Program) -> None:
    here = await Namespace(await harness.client()).id()
    await ended(harness, "old", namespace_id=here)
    await ended(harness, "of an earlier release", status="cancelled")
    await ended(harness, "young", hours=0.5, namespace_id=here)
    await ended(harness, "elsewhere", namespace_id="another")
    planned = await purge(program, harness, "--dry-run")
    assert planned.out.splitlines()[0] == "would delete 2 tasks"
    assert len((await left(harness))["tasks"]) == 4
    done = await purge(program, harness)
    assert done.out.splitlines() == ["deleted 2 tasks", *(f"  {name}: 2" for name in TASK_COLLECTIONS)]
    assert done.err == "deleted 2 tasks so far\n"
    assert await left(harness) == everywhere("young", "elsewhere")


@pytest.mark.server
async def test_purge_removes_stored_graphs_of_tasks_that_never_started(
    harness: Harness, program: Program
) -> None:
    here = await Namespace(await harness.client()).id()
    await ended(harness, "young", hours=0.5, namespace_id=here)
    for task_id, hours in (("unused", 2.0), ("new", 0.5), ("young", 2.0)):
        created_at = datetime.now(UTC) - timedelta(hours=hours)
        row = {"task_id": task_id, "namespace_id": here, "part": 0, "created_at": created_at}
        await harness.db.stored_graphs.insert_one(row)
    output = await purge(program, harness)
    assert output.out.splitlines() == ["deleted 0 tasks", "  stored_graphs: 1"]
    assert (await left(harness))["stored_graphs"] == {"new", "young"}


@pytest.mark.server
async def test_many_tasks_are_purged_in_several_steps(harness: Harness, program: Program) -> None:
    for number in range(45):
        await ended(harness, f"t{number}")
    output = await purge(program, harness)
    assert output.err.splitlines() == [f"deleted {count} tasks so far" for count in (20, 40, 45)]
    assert await left(harness) == everywhere()


@pytest.mark.server
async def test_purge_removes_only_tasks_with_the_requested_statuses(
    harness: Harness, program: Program
) -> None:
    for status in ("finished", "failed", "cancelled"):
        await ended(harness, status, status=status)
    output = await purge(program, harness, "--status", "failed", "--status", "cancelled", "--json")
    assert json.loads(output.out) == {
        "dry_run": False,
        "tasks": 2,
        "rows": dict.fromkeys(TASK_COLLECTIONS, 2),
        "backfills": 0,
        "backfill_runs": 0,
        "running": [],
    }
    assert output.err == ""
    assert await left(harness) == everywhere("finished")


@pytest.mark.server
async def test_purge_keeps_a_task_that_runs_in_temporal_even_if_its_document_is_closed(
    harness: Harness, program: Program
) -> None:
    await harness.engine()
    task_id = await harness.create(node("a"))
    await harness.until_status(task_id, "running")
    long_ago = datetime.now(UTC) - timedelta(days=2)
    await harness.db.tasks.update_one(
        {"id": task_id}, {"$set": {"status": "failed", "finished_at": long_ago}}
    )
    output = await purge(program, harness)
    assert output.out.splitlines() == ["deleted 0 tasks", f"kept 1 task still running in Temporal: {task_id}"]
    assert task_id in (await left(harness))["tasks"]


@pytest.mark.server
async def test_purge_keeps_open_tasks_and_tasks_without_an_end_date(
    harness: Harness, program: Program
) -> None:
    odd: list[dict[str, Any]] = [
        {"id": "open", "status": "running", "finished_at": None},
        {"id": "text", "status": "finished", "finished_at": "2020-01-01T00:00:00+00:00"},
        {"status": "finished", "finished_at": datetime(2020, 1, 1, tzinfo=UTC)},
    ]
    await harness.db.tasks.insert_many(odd)
    assert (await purge(program, harness)).out == "deleted 0 tasks\n"
    assert await harness.db.tasks.count_documents({}) == 3


@pytest.mark.server
async def test_next_purge_completes_an_interrupted_one(harness: Harness, program: Program) -> None:
    await ended(harness, "half")
    await harness.db.artifacts.delete_many({})
    await purge(program, harness)
    assert await left(harness) == everywhere()


@pytest.mark.server
async def test_close_orphaned_reports_that_there_are_no_open_tasks(
    harness: Harness, program: Program
) -> None:
    output = await program.call("close-orphaned", env=harness.environment)
    assert (output.code, output.out) == (0, "no open tasks\n")


@pytest.mark.server
async def test_close_orphaned_counts_open_tasks_by_namespace(harness: Harness, program: Program) -> None:
    here = await Namespace(await harness.client()).id()
    await harness.create(node("a"))
    for namespace_id in ({}, {"namespace_id": "gone-1"}):
        await harness.db.tasks.insert_one({"id": str(namespace_id), "status": "running", **namespace_id})
    output = await program.call("close-orphaned", env=harness.environment)
    assert output.out.splitlines() == [
        "        1  open tasks without a namespace (from an earlier release)",
        *sorted(
            [
                f"        1  open tasks of namespace {here}, which is 'default' on this Temporal server",
                "        1  open tasks of namespace gone-1, which this Temporal server does not have",
            ]
        ),
    ]
