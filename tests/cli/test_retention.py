"""`flowkit purge` removes what ended long ago, with all that belongs to it, and nothing else."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.cli.retention.commands import read_duration
from flowkit.connection import Namespace
from flowkit.errors import ConfigError
from tests.integration.world import node

if TYPE_CHECKING:
    from tests.cli.conftest import Program, Said
    from tests.integration.world import World

BELONGINGS = ("artifacts", "metrics_raw", "stream_progress", "worker_events", "dispatches")


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 2_592_000), ("12h", 43_200), ("90m", 5_400), ("1D", 86_400)]
)
def test_a_duration_is_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert read_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "30", "d", "-1d", "1.5h", "0d", "30s", "30 d", "1w", "999999999d", "٣d"]
)
def test_anything_else_is_no_duration(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a duration"):
        read_duration(text)


@pytest.mark.parametrize(
    ("arguments", "told"),
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
def test_a_wrong_option_is_exit_code_2(program: Program, arguments: list[str], told: str) -> None:
    said = program.run("purge", *arguments)
    assert (said.code, said.out) == (2, "")
    assert told in said.err


async def purge(program: Program, world: World, *options: str) -> Said:
    """`flowkit purge` of what ended more than an hour ago."""
    return await program.call("purge", "--older-than", "1h", *options, env=world.environment)


async def ended(
    world: World, task_id: str, *, hours: float = 2, status: str = "finished", **more: Any
) -> None:
    """The document of a task that ended so long ago, and a row of each kind that belongs to it."""
    finished_at = datetime.now(UTC) - timedelta(hours=hours)
    document = {"id": task_id, "status": status, "finished_at": finished_at, **more}
    await world.db.tasks.insert_one(document)
    for name in BELONGINGS:
        await world.db[name].insert_one(
            {"task_id": task_id, "node_id": "a", "batch_uid": "b", "event_hash": "h"}
        )


async def left(world: World) -> dict[str, set[str]]:
    """Ids of the tasks that are left, by collection."""
    found = {name: {row["task_id"] async for row in world.db[name].find({})} for name in BELONGINGS}
    return {**found, "tasks": {row["id"] async for row in world.db.tasks.find({})}}


def everywhere(*task_ids: str) -> dict[str, set[str]]:
    """These tasks, with all that belongs to them."""
    return {name: set(task_ids) for name in (*BELONGINGS, "tasks")}


@pytest.mark.server
async def test_what_ended_before_that_is_removed_with_all_that_belongs_to_it(
    world: World, program: Program
) -> None:
    here = await Namespace(await world.client()).id()
    await ended(world, "old", namespace_id=here)
    await ended(world, "of an earlier release", status="cancelled")
    await ended(world, "young", hours=0.5, namespace_id=here)
    await ended(world, "elsewhere", namespace_id="another")
    planned = await purge(program, world, "--dry-run")
    assert planned.out.splitlines()[0] == "would delete 2 tasks"
    assert len((await left(world))["tasks"]) == 4
    done = await purge(program, world)
    assert done.out.splitlines() == ["deleted 2 tasks", *(f"  {name}: 2" for name in BELONGINGS)]
    assert done.err == "deleted 2 tasks so far\n"
    assert await left(world) == everywhere("young", "elsewhere")


@pytest.mark.server
async def test_many_tasks_are_removed_in_steps(world: World, program: Program) -> None:
    for number in range(45):
        await ended(world, f"t{number}")
    said = await purge(program, world)
    assert said.err.splitlines() == [f"deleted {count} tasks so far" for count in (20, 40, 45)]
    assert await left(world) == everywhere()


@pytest.mark.server
async def test_only_tasks_that_ended_as_asked_are_removed(world: World, program: Program) -> None:
    for status in ("finished", "failed", "cancelled"):
        await ended(world, status, status=status)
    said = await purge(program, world, "--status", "failed", "--status", "cancelled", "--json")
    assert json.loads(said.out) == {
        "dry_run": False,
        "tasks": 2,
        "rows": dict.fromkeys(BELONGINGS, 2),
        "running": [],
    }
    assert said.err == ""
    assert await left(world) == everywhere("finished")


@pytest.mark.server
async def test_a_task_that_temporal_runs_is_kept_whatever_its_document_says(
    world: World, program: Program
) -> None:
    await world.engine()
    task_id = await world.create(node("a"))
    await world.until_status(task_id, "running")
    long_ago = datetime.now(UTC) - timedelta(days=2)
    await world.db.tasks.update_one({"id": task_id}, {"$set": {"status": "failed", "finished_at": long_ago}})
    said = await purge(program, world)
    assert said.out.splitlines() == ["deleted 0 tasks", f"kept 1 task that Temporal runs: {task_id}"]
    assert task_id in (await left(world))["tasks"]


@pytest.mark.server
async def test_open_tasks_and_those_without_a_date_are_kept(world: World, program: Program) -> None:
    odd: list[dict[str, Any]] = [
        {"id": "open", "status": "running", "finished_at": None},
        {"id": "text", "status": "finished", "finished_at": "2020-01-01T00:00:00+00:00"},
        {"status": "finished", "finished_at": datetime(2020, 1, 1, tzinfo=UTC)},
    ]
    await world.db.tasks.insert_many(odd)
    assert (await purge(program, world)).out == "deleted 0 tasks\n"
    assert await world.db.tasks.count_documents({}) == 3


@pytest.mark.server
async def test_a_purge_that_was_interrupted_is_continued_by_the_next(world: World, program: Program) -> None:
    await ended(world, "half")
    await world.db.artifacts.delete_many({})
    await purge(program, world)
    assert await left(world) == everywhere()


@pytest.mark.server
async def test_close_orphaned_without_open_tasks_says_so(world: World, program: Program) -> None:
    said = await program.call("close-orphaned", env=world.environment)
    assert (said.code, said.out) == (0, "no open tasks\n")


@pytest.mark.server
async def test_close_orphaned_counts_open_tasks_by_namespace(world: World, program: Program) -> None:
    here = await Namespace(await world.client()).id()
    await world.create(node("a"))
    for namespace_id in ({}, {"namespace_id": "gone-1"}):
        await world.db.tasks.insert_one({"id": str(namespace_id), "status": "running", **namespace_id})
    said = await program.call("close-orphaned", env=world.environment)
    assert said.out.splitlines() == [
        "        1  open tasks that name no namespace (of an earlier release)",
        *sorted(
            [
                f"        1  open tasks of namespace {here}, which this Temporal server has as 'default'",
                "        1  open tasks of namespace gone-1, which this Temporal server does not have",
            ]
        ),
    ]
